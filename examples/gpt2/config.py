"""Settings of a training run: the flags, the presets and their checks."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal


class UsageError(ValueError):
  """A mistake in the settings or the data that the user can mend."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Trains a GPT-2 language model with MERIT, or with a peer to compare.

  A setting that is not given takes the value of the preset (sizes) or of the
  optimizer (learning rate, weight decay).
  """

  preset: Literal['demo', 'small', 'medium', 'large', 'xl'] = 'demo'
  """Model and run: demo takes minutes on two cores, the others are GPT-2's."""

  data: str = 'stdlib'
  """Text file, folder of text files, or folder with nanoGPT's train.bin and
  val.bin. 'stdlib' is the source text of Python's standard library."""

  out_dir: Path | None = None
  """Folder of the results. Default: one under runs/ that is named after preset,
  optimizer and a hash of all settings."""

  optimizer: Literal['merit', 'adamw', 'lamb'] = 'merit'
  """Optimizer of the weights."""

  learning_rate: float | None = None
  """Peak learning rate, after a linear warm-up and before a cosine to zero. The
  default is what did best on the demo; larger models want their own."""

  weight_decay: float | None = None
  """Weight decay of all parameters."""

  batch_size: int | None = None
  """Global batch size of a step, in sequences."""

  micro_batch_size: int | None = None
  """Sequences that all devices together process at once; gradients of a step
  are accumulated over micro-batches."""

  steps: int | None = None
  """Optimizer steps."""

  seed: int = 0
  """Seed of the weights and of the order of the data."""

  eval_every: int | None = None
  """Steps between evaluations."""

  eval_sequences: int | None = None
  """Sequences of validation text in an evaluation, at the most."""

  mesh: str = ''
  """Axes of the device mesh, such as 'fsdp=4,tensor=2'. Devices that are left
  form the axis 'data'."""

  vocab_size: int | None = None
  """Size of the byte-pair vocabulary that is trained on the text; 257 gives
  plain bytes and an end-of-text token. For train.bin: the number of token
  identifiers."""

  num_layers: int | None = None
  """Transformer blocks."""

  num_heads: int | None = None
  """Attention heads in a block."""

  width: int | None = None
  """Features of the residual stream."""

  context_length: int | None = None
  """Tokens in a sequence."""

  describe: bool = False
  """Print how MERIT sees each parameter, before the first step."""

  cache_dir: Path = Path('~/.cache/merit_optax')
  """Folder that keeps tokenizers and tokens, by the content of the text."""


_GPT2 = dict(
  context_length=1024, vocab_size=50257, eval_every=100, eval_sequences=1024
)

# The four GPT-2 sizes take about 20 tokens per parameter, at the global batch
# sizes of the paper (xl: our choice).
PRESETS: dict[str, dict[str, int]] = {
    'demo': dict(
        num_layers=4, num_heads=4, width=128, context_length=128,
        vocab_size=1024, batch_size=64, micro_batch_size=64, steps=400,
        eval_every=40, eval_sequences=512,
    ),
    'small': _GPT2 | dict(
        num_layers=12, num_heads=12, width=768, batch_size=1024,
        micro_batch_size=16, steps=2400,
    ),
    'medium': _GPT2 | dict(
        num_layers=24, num_heads=16, width=1024, batch_size=4096,
        micro_batch_size=8, steps=1700,
    ),
    'large': _GPT2 | dict(
        num_layers=36, num_heads=20, width=1280, batch_size=8192,
        micro_batch_size=8, steps=1850,
    ),
    'xl': _GPT2 | dict(
        num_layers=48, num_heads=25, width=1600, batch_size=8192,
        micro_batch_size=8, steps=3700,
    ),
}  # fmt: skip

# The learning rates are the best of four each on the demo preset.
OPTIMIZERS: dict[str, dict[str, float]] = {
  'merit': dict(learning_rate=3e-2, weight_decay=0.01),
  'adamw': dict(learning_rate=4e-3, weight_decay=0.1),
  'lamb': dict(learning_rate=2e-2, weight_decay=0.01),
}


def resolve(config: Config) -> Config:
  """Fills the settings that were not given, and checks them all.

  Args:
    config: Settings as the user gave them.

  Returns:
    The same settings, none of which is ``None`` but ``out_dir``.

  Raises:
    UsageError: If a setting is out of its range, or does not fit another.
  """
  defaults = PRESETS[config.preset] | OPTIMIZERS[config.optimizer]
  missing = {k: v for k, v in defaults.items() if getattr(config, k) is None}
  if 'batch_size' not in missing and 'micro_batch_size' in missing:
    missing['micro_batch_size'] = math.gcd(
      config.batch_size, defaults['micro_batch_size']
    )
  config = dataclasses.replace(config, **missing)
  _check_ranges(config)
  _check_divides('micro_batch_size', 'batch_size', config)
  _check_divides('num_heads', 'width', config)
  return config


def _check_ranges(config: Config) -> None:
  """Raises ``UsageError`` for a setting out of its range."""
  for name in PRESETS['demo']:
    _check(config, name, 'at least 1', getattr(config, name) >= 1)
  lr, decay = config.learning_rate, config.weight_decay
  _check(config, 'learning_rate', 'finite and above 0', 0 < lr < math.inf)
  _check(config, 'weight_decay', 'finite and at least 0', 0 <= decay < math.inf)
  _check(config, 'seed', 'in [0, 2**32)', 0 <= config.seed < 2**32)
  _check(
    config, 'vocab_size', 'in [257, 65536]', 257 <= config.vocab_size <= 65536
  )


def _check(config: Config, name: str, accepted: str, holds: bool) -> None:
  if not holds:
    raise UsageError(
      f'{flag(name)} must be {accepted}, got {getattr(config, name)}.'
    )


def _check_divides(divisor: str, dividend: str, config: Config) -> None:
  """Raises ``UsageError`` unless one setting divides another."""
  a, b = getattr(config, divisor), getattr(config, dividend)
  if b % a:
    raise UsageError(
      f'{flag(divisor)} must divide {flag(dividend)}, got {a} and {b}.'
    )


def flag(name: str) -> str:
  """Returns the command-line flag of a setting."""
  return '--' + name.replace('_', '-')


def identity(config: Config) -> dict[str, Any]:
  """Returns the settings that decide what a run computes, as JSON values."""
  fields = dataclasses.asdict(config)
  left_out = ('data', 'out_dir', 'cache_dir', 'describe')
  return {k: v for k, v in fields.items() if k not in left_out}


def digest(*parts: Any) -> str:
  """Returns a hash of JSON values, as hexadecimal digits."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
