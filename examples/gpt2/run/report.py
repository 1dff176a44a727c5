"""What a person wants to know before and after a run, as text."""

import math
from typing import Any

import jax

from examples.gpt2.config import Config
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices import hardware
from examples.gpt2.run.command import format_bytes, table
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.step import Trainer


def before(
  config: Config, tokens: Tokens, trainer: Trainer, folder: RunFolder
) -> str:
  """Returns what is to come."""
  devices = jax.devices()
  per_step = config.batch_size * config.context_length
  state = hardware.bytes_per_device(trainer.shapes)
  return table(
    {
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
      f'{config.steps * per_step:,} in all',
      'optimizer': f'{config.optimizer}, learning rate '
      f'{config.learning_rate:g}, weight decay {config.weight_decay:g}',
      'devices': f'{len(devices)} x {devices[0].device_kind}, '
      f'{jax.process_count()} process(es), {config.dtype}',
      'mesh': ', '.join(f'{k} {v}' for k, v in trainer.mesh.shape.items()),
      'memory': f'{format_bytes(state)} of weights and moments on each device',
      'results': str(folder.path),
    }
  )


def after(folder: RunFolder) -> str:
  """Returns what came out, with the sample."""
  lines = folder.read_metrics()
  sample = folder.path / 'sample.txt'
  rows = _losses(lines, folder.read_settings()) | _watched(lines)
  files = {'picture': str(folder.picture), 'sample': str(sample)}
  return table(rows | _speed(lines) | files) + '\n\n' + sample.read_text()


def _losses(
  lines: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, str]:
  if not lines or 'val_loss' not in lines[-1]:
    return {'validation loss': 'not known, since metrics are lost'}
  entropy = settings['corpus']['unigram_entropy']
  rows = {
    'validation loss': f'{lines[-1]["val_loss"]:.4f} nats per token '
    f'(unigram entropy {entropy:.4f})'
  }
  skipped = sum(line.get('skipped', False) for line in lines)
  if skipped:
    rows['left out'] = f'{skipped} steps whose loss or gradient was not finite'
  return rows


def _watched(lines: list[dict[str, Any]]) -> dict[str, str]:
  """Returns rows from the last watch step, and of the noise of all."""
  watched = [line for line in lines if 'max_attention_logit' in line]
  if not watched:
    return {}
  logits = ', '.join(
    'not finite' if x is None else f'{x:.1f}'
    for x in watched[-1]['max_attention_logit']
  )
  rows = {'max attention logit': f'{logits} (first to last layer)'}
  scale = noise_scale_tokens(watched)
  if scale is not None:
    per_step = lines[-1]['tokens'] / lines[-1]['step']
    rows['gradient noise'] = (
      f'critical batch about {scale:,.0f} tokens; a step has {per_step:,.0f}'
    )
  return rows


def noise_scale_tokens(lines: list[dict[str, Any]]) -> float | None:
  """Returns the noise scale of the second half of the watch steps, in tokens.

  Trace and squared norm are averaged by themselves, since either is noisy and
  their ratio is not without bias.

  Args:
    lines: Lines of metrics.jsonl that hold ``'gradient_noise'``.

  Returns:
    The ratio of the means; None if the gradient drowns in its noise.
  """
  half = [
    line
    for line in lines[len(lines) // 2 :]
    if line['gradient_noise'] and not line.get('skipped', False)
  ]
  trace = math.fsum(line['gradient_noise']['trace'] for line in half)
  square = math.fsum(line['gradient_noise']['squared_norm'] for line in half)
  if square <= 0 or trace <= 0:
    return None
  length = half[-1]['tokens'] / half[-1]['step'] / half[-1]['batch_size']
  return trace / square * length


def _speed(lines: list[dict[str, Any]]) -> dict[str, str]:
  if not lines:
    return {}
  speeds = sorted(line['tokens_per_second'] for line in lines)
  waited = max(line['waited_share'] for line in lines[len(lines) // 2 :])
  mfu = sorted(line['mfu'] or math.nan for line in lines)[len(lines) // 2]
  shown = 'n/a' if math.isnan(mfu) else f'{mfu:.1%}'
  peak = max(line['peak_bytes'] for line in lines)
  return {
    'speed': f'{speeds[len(speeds) // 2]:,.0f} tokens/s (median), MFU {shown}, '
    f'at most {waited:.1%} of a step spent waiting for data',
    'peak memory': format_bytes(peak),
  }
