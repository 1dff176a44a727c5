"""Sizes, batches and learning rates of the experiments."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from examples.study.rules import RULES

if TYPE_CHECKING:
  RuleName: TypeAlias = str
else:
  RuleName = Literal[tuple(RULES)]


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compares optimizers at large batches."""

  num_layers: int = 6
  num_heads: int = 6
  width: int = 384
  """Features of the residual stream."""
  context_length: int = 256
  """Tokens in a sequence."""
  vocab_size: int = 4096
  qk_norm: bool = False
  """Whether each query and key goes through an RMSNorm."""
  llama: bool = False
  """Whether blocks are Llama's: RMSNorm, RoPE, SwiGLU, no biases."""
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
  rules: tuple[RuleName, ...] = ('merit', 'muon', 'adamw', 'lamb')
  """Rules to compare."""
  steps: int = 236
  """Steps of each trial."""
  tokens: int = 0
  """Tokens of each trial, instead of steps: smaller batches take more steps."""
  tuning_batch: int = 32_768
  """Tokens of a step where learning rates are chosen, with seed 0."""
  powers: tuple[int, ...] = (-2, -1, 0, 1, 2)
  """Rates to try there: a rule's middle rate times these powers of two, and at
  most four more while the lowest or highest is best."""
  batches: tuple[int, ...] = (1_048_576,)
  """Tokens of a step of the trials that take the chosen rates."""
  near: tuple[int, ...] = (0, 1)
  """Rates of these trials: the chosen one times these powers of two."""
  seeds: tuple[int, ...] = (1,)
  """Seeds of these trials, of initial weights and of the order of the data."""
  micro_batch: int = 32_768
  """Tokens whose gradient is computed at once."""
  eval_tokens: int = 524_288
  """Tokens to validate on."""
  minutes: float = 60 * 24
  """No trial starts that would end later than this."""

  def steps_at(self, batch_tokens: int) -> int:
    """Returns the number of steps of a trial."""
    return self.tokens // batch_tokens if self.tokens else self.steps


PRESETS = {
  'gpu': ('12M parameters, for one GPU.', Settings()),
  'small': (
    'GPT-2 small with 20 tokens a parameter, as in the paper.',
    Settings(
      num_layers=12, num_heads=12, width=768, context_length=1024,
      vocab_size=50_304, data=Path('openwebtext'), steps=2_400,
      tuning_batch=65_536, near=(0,),
      results=Path('runs/large_batch_small.jsonl'),
    ),
  ),
  'laptop': (
    '0.03M parameters, for two cores.',
    Settings(
      num_layers=2, num_heads=2, width=32, context_length=32, vocab_size=256,
      dtype='float32', unroll=False, data=None, steps=160, tuning_batch=4_096,
      batches=(4_096,), powers=(0, 1, 2), near=(0,), seeds=(1, 2, 3, 4, 5),
      micro_batch=4_096, eval_tokens=131_072,
      results=Path('runs/large_batch_laptop.jsonl'),
    ),
  ),
  'dry-run': (
    'Everything at toy sizes: a minute on two cores.',
    Settings(
      num_layers=2, num_heads=2, width=16, context_length=16, vocab_size=256,
      dtype='float32', unroll=False, data=None, steps=12, tuning_batch=256,
      batches=(1_024,), micro_batch=256, eval_tokens=1_024,
      results=Path('runs/large_batch_dry.jsonl'),
    ),
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run: its rule, its learning rate as a power of two, seed and batch."""

  rule: RuleName
  power: int
  """The peak is the middle rate of the rule times 2**power."""
  seed: int
  batch_tokens: int

  def rate(self, settings: Settings) -> float:
    """Returns the peak of the learning rate of hidden matrices."""
    steps = settings.steps_at(self.batch_tokens)
    middle = RULES[self.rule].middle_rate(steps, settings.width)
    return float(f'{middle * 2.0**self.power:.3g}')
