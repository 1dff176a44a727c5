"""What a person wants to know before and after a run, as text."""

import math
import statistics
from typing import Any

import jax

from examples.gpt2.config import Config
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices import hardware
from examples.gpt2.run.command import format_bytes, table
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.step import Trainer

Line = dict[str, Any]


def before(
  config: Config, tokens: Tokens, trainer: Trainer, folder: RunFolder
) -> str:
  """Returns what is to come."""
  c, devices = config, jax.devices()
  per_step = c.batch_size * c.context_length
  state = hardware.bytes_per_device(trainer.shapes)
  rows = {
    'model': f'{c.preset}, {c.architecture}, {trainer.num_params:,} parameters,'
    f' {c.num_layers} layers of width {c.width}',
    'text': f'{tokens.source}, {tokens.num_bytes:,} bytes, '
    f'sha256 {tokens.sha256[:16]}',
    'tokens': f'{len(tokens.train):,} to train on, '
    f'{len(tokens.validation):,} held out, vocabulary {tokens.vocab_size:,}, '
    f'unigram entropy {tokens.unigram_entropy:.3f} nats',
    'steps': f'{c.steps:,} of {c.batch_size:,} x {c.context_length:,} = '
    f'{per_step:,} tokens, {c.steps * per_step:,} in all',
    'optimizer': f'{c.optimizer}, learning rate {c.learning_rate:g}, '
    f'weight decay {c.weight_decay:g}',
    'devices': f'{len(devices)} x {devices[0].device_kind}, '
    f'{jax.process_count()} process(es), {c.dtype}',
    'mesh': ', '.join(f'{k} {v}' for k, v in trainer.mesh.shape.items()),
    'memory': f'{format_bytes(state)} of weights and moments on each device',
    'results': str(folder.path),
  }
  return table(rows)


def after(folder: RunFolder) -> str:
  """Returns what came out, with the sample."""
  lines = folder.read_metrics()
  sample = folder.path / 'sample.txt'
  files = {'picture': str(folder.picture), 'sample': str(sample)}
  rows = {'validation loss': 'not known, since metrics are lost'}
  if lines:
    entropy = folder.read_settings()['corpus']['unigram_entropy']
    rows |= _losses(lines, entropy) | _diagnosed(lines) | _speed(lines)
  return f'{table(rows | files)}\n\n{sample.read_text()}'


def _losses(lines: list[Line], entropy: float) -> dict[str, str]:
  rows = {}
  if 'val_loss' in lines[-1]:
    rows['validation loss'] = (
      f'{lines[-1]["val_loss"]:.4f} nats per token '
      f'(unigram entropy {entropy:.4f})'
    )
  skipped = sum('skipped' in line for line in lines)
  if skipped:
    rows['left out'] = f'{skipped} steps whose loss or gradient was not finite'
  return rows


def _diagnosed(lines: list[Line]) -> dict[str, str]:
  """Returns rows from the last diagnostics step, and of the noise of all."""
  seen = [line for line in lines if 'max_attention_logit' in line]
  if not seen:
    return {}
  logits = ', '.join(
    'not finite' if x is None else f'{x:.1f}'
    for x in seen[-1]['max_attention_logit']
  )
  rows = {'max attention logit': f'{logits} (first to last layer)'}
  scale = _noise_scale(seen)
  if scale is not None:
    per_step = lines[-1]['tokens'] / lines[-1]['step']
    rows['gradient noise'] = (
      f'critical batch about {scale:,.0f} tokens; a step has {per_step:,.0f}'
    )
  return rows


def _noise_scale(lines: list[Line]) -> float | None:
  """Returns the noise scale in tokens, None if the gradient drowns in noise.

  Trace and squared norm are averaged separately over the second half of the
  diagnostics steps: either is noisy, and their ratio is biased.
  """
  half = [
    line
    for line in lines[len(lines) // 2 :]
    if line['gradient_noise'] and not line.get('skipped')
  ]
  trace = math.fsum(line['gradient_noise']['trace'] for line in half)
  square = math.fsum(line['gradient_noise']['squared_norm'] for line in half)
  if square <= 0 or trace <= 0:
    return None
  length = half[-1]['tokens'] / half[-1]['step'] / half[-1]['batch_size']
  return trace / square * length


def _speed(lines: list[Line]) -> dict[str, str]:
  speed = statistics.median_high(line['tokens_per_second'] for line in lines)
  waited = max(line['waited_share'] for line in lines[len(lines) // 2 :])
  mfus = [line['mfu'] for line in lines if line['mfu'] is not None]
  mfu = f'{statistics.median_high(mfus):.1%}' if mfus else 'n/a'
  return {
    'speed': f'{speed:,.0f} tokens/s (median), MFU {mfu}, '
    f'at most {waited:.1%} of a step spent waiting for data',
    'peak memory': format_bytes(max(line['peak_bytes'] for line in lines)),
  }
