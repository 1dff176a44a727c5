"""What a person wants to know before and after a run, as text."""

import math
import statistics
from typing import Any

import jax

from examples.gpt2.command import format_bytes, table
from examples.gpt2.config import FittedConfig
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices import hardware
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.step import Trainer


def before(
  config: FittedConfig, tokens: Tokens, trainer: Trainer, folder: RunFolder
) -> str:
  """Returns what is to come."""
  devices = jax.devices()
  per_step = config.batch_size * config.context_length
  state = hardware.bytes_per_device(trainer.shapes)
  rows = {
    'model': f'{config.preset}, {config.architecture}, '
    f'{trainer.num_params:,} parameters, '
    f'{config.num_layers} layers of width {config.width}',
    'text': f'{tokens.source}, {tokens.num_bytes:,} bytes, '
    f'sha256 {tokens.sha256[:16]}',
    'tokens': f'{len(tokens.train):,} to train on, '
    f'{len(tokens.validation):,} held out, vocabulary {tokens.vocab_size:,}, '
    f'unigram entropy {tokens.unigram_entropy:.3f} nats',
    'steps': f'{config.steps:,} of {config.batch_size:,} x '
    f'{config.context_length:,} = {per_step:,} tokens, '
    f'{config.steps * per_step:,} in all, '
    f'{config.steps * per_step / len(tokens.train):.2g} times the text',
    'optimizer': f'{config.optimizer}, learning rate '
    f'{config.learning_rate:g}, weight decay {config.weight_decay:g}',
    'devices': f'{len(devices)} x {devices[0].device_kind}, '
    f'{jax.process_count()} process(es), {config.dtype}',
    'mesh': ', '.join(f'{k} {v}' for k, v in trainer.mesh.shape.items()),
    'memory': f'{format_bytes(state)} of weights and moments on each device',
    'results': str(folder.path),
  }
  return table(rows)


def after(folder: RunFolder) -> str:
  """Returns what came out, with the sample."""
  lines, settings = folder.read_metrics(), folder.read_settings()
  corpus = settings['corpus']
  rows = {'validation loss': 'not known, since metrics are lost'}
  if lines and 'val_loss' in lines[-1]:
    rows['validation loss'] = (
      f'{lines[-1]["val_loss"]:.4f} nats per token '
      f'(unigram entropy {corpus["unigram_entropy"]:.4f})'
    )
  skipped = sum('skipped' in line for line in lines)
  if skipped:
    rows['left out'] = f'{skipped} steps whose loss or gradient was not finite'
  diagnosed = [x for x in lines if 'max_attention_logit' in x]
  rows |= _diagnosed(diagnosed, settings['config'])
  sample = folder.path / 'sample.txt'
  files = {'sample': str(sample)}
  if folder.picture.is_file():
    files = {'picture': str(folder.picture)} | files
  return f'{table(rows | _speed(lines) | files)}\n\n{sample.read_text("utf-8")}'


def _diagnosed(
  lines: list[dict[str, Any]], config: dict[str, Any]
) -> dict[str, str]:
  """Returns rows of the diagnostics steps: of the last, and of their noise.

  Trace and squared norm are averaged separately, since either is noisy and
  their ratio is biased, and over the second half, when weights have settled.
  """
  if not lines:
    return {}
  logits = ', '.join(
    'not finite' if x is None else f'{x:.1f}'
    for x in lines[-1]['max_attention_logit']
  )
  rows = {'max attention logit': f'{logits} (first to last layer)'}
  half = [x for x in lines[len(lines) // 2 :] if not x.get('skipped')]
  noises = [x['gradient_noise'] for x in half if x['gradient_noise']]
  trace = math.fsum(noise['trace'] for noise in noises)
  square = math.fsum(noise['squared_norm'] for noise in noises)
  if trace > 0 and square > 0:
    length = config['context_length']
    scale, per_step = trace / square * length, config['batch_size'] * length
    rows['gradient noise'] = (
      f'critical batch about {scale:,.0f} tokens; a step has {per_step:,}'
    )
  return rows


def _speed(lines: list[dict[str, Any]]) -> dict[str, str]:
  if not lines:
    return {}
  speed = statistics.median_high(line['tokens_per_second'] for line in lines)
  waited = max(line['waited_share'] for line in lines[len(lines) // 2 :])
  mfus = [line['mfu'] for line in lines if line['mfu'] is not None]
  mfu = f'{statistics.median_high(mfus):.1%}' if mfus else 'n/a'
  return {
    'speed': f'{speed:,.0f} tokens/s (median), MFU {mfu}, '
    f'at most {waited:.1%} of a step spent making batches',
    'peak memory': format_bytes(max(line['peak_bytes'] for line in lines)),
  }
