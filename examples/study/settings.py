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
  architecture: Literal['gpt2', 'llama'] = 'gpt2'
  """Llama's blocks have RMSNorm, RoPE, SwiGLU and no biases."""
  dtype: Literal['float32', 'bfloat16'] = 'bfloat16'
  """dtype of activations, and of the products of Muon."""
  remat: Literal['none', 'dots', 'full'] = 'none'
  """What the backward pass computes again."""
  unroll: int = 6
  """Layers that are compiled one by one: all of them on GPUs."""
  mesh: str = ''
  """Devices that parameters are split over, such as fsdp=8."""

  data: str = 'runs/corpus'
  """Folder of tokens. stdlib: the source of Python's standard library."""
  results: Path = Path('examples/study/data/gpu.jsonl')
  """File of the trials."""
  rules: tuple[RuleName, ...] = ('merit', 'muon', 'adamw', 'lamb')
  """Rules to compare."""
  b1: float = 0.8
  """Decay rate of the first moment, and of Muon's momentum."""
  eps: float = 1e-8
  """What Adam adds to the root of the second moment, in every rule."""
  warmup: float = 0.3
  """Share of the steps in which the learning rate rises."""
  tokens: int = 61_865_984
  """Tokens of each trial: smaller batches take more steps."""
  batches: tuple[int, ...] = (262_144,)
  """Tokens of a step. Each rule's learning rate is chosen at each of them."""
  powers: tuple[float, ...] = (-1, 0, 1)
  """Rates to try, with seed 0: a rule's middle rate times these powers of two,
  and more while the lowest or highest is best."""
  extensions: int = 4
  """Rates to add at most while an edge is best."""
  near: float = 0.0
  """Rates whose loss with seed 0 is within this of the chosen one's are taken
  with the other seeds too."""
  at: tuple[float, ...] = ()
  """Rates that seeds are trained at, as powers of two, instead of a chosen one:
  seed 0 then chooses nothing."""
  seeds: tuple[int, ...] = (1, 2)
  """Seeds of the trials with the chosen rate: of initial weights and of the
  order of the data."""
  micro_batch: int = 32_768
  """Tokens whose gradient a device computes at once."""
  eval_tokens: int = 524_288
  """Tokens to validate on."""
  logit_sequences: int = 64
  """Sequences, spread over all to validate on, whose attention logits are
  measured in every second step."""
  minutes: float = 60 * 24
  """No trial starts that would end later than this."""

  def steps_at(self, batch_tokens: int) -> int:
    """Returns the number of steps of a trial."""
    return self.tokens // batch_tokens


PRESETS = {
  'gpu': ('12M parameters at 0.26M tokens a step, for one GPU.', Settings()),
  'ladder': (
    '0.12M parameters at 1k to 64k tokens a step, for two cores and hours.',
    Settings(
      num_layers=2, num_heads=2, width=64, context_length=64, vocab_size=256,
      dtype='float32', unroll=1, data='stdlib', tokens=27 * 65_536,
      rules=(
        'merit', 'merit-l2', 'lamb', 'adamw', 'muon', 'merit-all', 'lamb-all',
      ),
      batches=(65_536, 4_096, 16_384, 1_024), powers=(-2, -1, 0, 1, 2),
      seeds=(1, 2, 3), micro_batch=2_048, eval_tokens=131_072,
      logit_sequences=16, results=Path('examples/study/data/ladder.jsonl'),
    ),
  ),
  'paper': (
    'GPT-2 small with 20 tokens a parameter, all parameters by one rule.',
    Settings(
      num_layers=12, num_heads=12, width=768, context_length=1024,
      vocab_size=50_304, data='openwebtext', unroll=12,
      tokens=2_400 * 1_048_576,
      rules=('merit-all', 'lamb-all', 'adamw-all'), b1=0.9, warmup=0.1,
      batches=(1_048_576,), seeds=(1,), eval_tokens=1_048_576,
      results=Path('runs/paper.jsonl'),
    ),
  ),
  'laptop': (
    '0.03M parameters, for two cores.',
    Settings(
      num_layers=2, num_heads=2, width=32, context_length=32, vocab_size=256,
      dtype='float32', unroll=1, data='stdlib', tokens=160 * 4_096,
      batches=(4_096,), powers=(0, 1, 2), seeds=(1, 2, 3, 4, 5),
      micro_batch=4_096, eval_tokens=131_072,
      results=Path('runs/laptop.jsonl'),
    ),
  ),
  'dry-run': (
    'Everything at toy sizes: a minute on two cores.',
    Settings(
      num_layers=2, num_heads=2, width=16, context_length=16, vocab_size=256,
      dtype='float32', unroll=1, data='stdlib', tokens=12 * 256,
      batches=(256, 1_024), powers=(-1, 0, 1), seeds=(1,), micro_batch=256,
      eval_tokens=1_024, logit_sequences=8, results=Path('runs/dry.jsonl'),
    ),
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run: its rule, its learning rate as a power of two, seed and batch."""

  rule: RuleName
  power: float
  """The peak is the middle rate of the rule times 2**power."""
  seed: int
  """0 for the trials that choose a learning rate."""
  batch_tokens: int

  def rate(self, settings: Settings) -> float:
    """Returns the peak of the learning rate."""
    steps = settings.steps_at(self.batch_tokens)
    middle = RULES[self.rule].middle_rate(steps, settings.width)
    return float(f'{middle * 2.0**self.power:.3g}')
