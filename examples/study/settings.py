"""Sizes, batches and learning rates of the large-batch comparison."""

import dataclasses
import math
from pathlib import Path
from typing import Literal, TypeAlias, get_args

Rule: TypeAlias = Literal['merit', 'muon', 'adamw', 'lamb']


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compares optimizers at a large batch."""

  num_layers: int = 6
  num_heads: int = 6
  width: int = 384
  """Features of the residual stream."""
  context_length: int = 256
  """Tokens in a sequence."""
  vocab_size: int = 4096
  dtype: Literal['float32', 'bfloat16'] = 'bfloat16'
  """dtype of activations, and of the products of Muon."""
  remat: bool = False
  """Whether to compute each block again in the backward pass."""
  unroll: bool = True
  """Whether to compile each layer, which makes steps on GPUs faster."""
  fsdp: int = 1
  """Devices that parameters are split over; the others split the batch only."""

  data: Path | None = Path('runs/corpus')
  """Folder of train.bin and val.bin. None: Python's standard library."""
  results: Path = Path('examples/study/data/large_batch.jsonl')
  """File of the trials."""
  rules: tuple[Rule, ...] = get_args(Rule)
  """Rules to compare."""
  steps: int = 236
  """Steps of each trial."""
  small_batch: int = 32_768
  """Tokens of a step in stage A."""
  large_batch: int = 1_048_576
  """Tokens of a step in stage B; 0: only stage A."""
  micro_batch: int = 32_768
  """Tokens whose gradient is computed at once."""
  eval_tokens: int = 524_288
  """Tokens to validate on."""
  minutes: float = 60 * 24
  """No trial starts that would end later than this."""


PRESETS = {
  'gpu': ('12M parameters, for one GPU.', Settings()),
  'small': (
    'GPT-2 small with 20 tokens a parameter, as in the paper.',
    Settings(
      num_layers=12, num_heads=12, width=768, context_length=1024,
      vocab_size=50_304, data=Path('openwebtext'), steps=2_400,
      small_batch=65_536, results=Path('runs/large_batch_small.jsonl'),
    ),
  ),
  'nano': (
    '0.03M parameters, stage A only: an hour on two busy cores.',
    Settings(
      num_layers=2, num_heads=2, width=32, context_length=32, vocab_size=256,
      dtype='float32', unroll=False, data=None, large_batch=0,
      micro_batch=8_192, eval_tokens=131_072,
      results=Path('runs/large_batch_nano.jsonl'),
    ),
  ),
  'dry-run': (
    'Everything at toy sizes: a minute on two cores.',
    Settings(
      num_layers=2, num_heads=2, width=16, context_length=16, vocab_size=256,
      dtype='float32', unroll=False, data=None, steps=12, small_batch=256,
      large_batch=1_024, micro_batch=256, eval_tokens=1_024,
      results=Path('runs/large_batch_dry.jsonl'),
    ),
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run: its rule, its learning rate as a power of two, seed and batch."""

  rule: Rule
  power: int
  """The peak is the middle rate of the rule times 2**power."""
  seed: int
  batch_tokens: int

  def rate(self, settings: Settings) -> float:
    """Returns the peak of the learning rate of hidden matrices."""
    root = math.sqrt(settings.steps)
    middle = {
      'merit': 0.35 / root,
      'muon': 0.5 / root,
      'adamw': 1 / settings.width,
      'lamb': 0.45 / root,
    }
    return float(f'{middle[self.rule] * 2.0**self.power:.3g}')
