"""Sizes of the study: models, batches, tokens."""

import dataclasses
import functools
from typing import Any

from examples.gpt2.config import Config, Optimizer
from examples.gpt2.model.config import proportional_init_std
from examples.gpt2.presets import resolve
from examples.study.chains import Chain
from examples.study.trial import Trial

DECAY = 0.01
"""Weight decay of all runs, but where it is varied."""
_DIAGNOSTICS_STEPS = 20


# Compared by identity, so that trials can be cached.
@dataclasses.dataclass(frozen=True, eq=False)
class Scale:
  """What all runs of a study share.

  Attributes:
    settings: Settings of the trainer.
    tokens: Tokens of a run, for every batch size.
    batch_sizes: Global batches, sequences, the smallest first.
    batch_size: The one of experiments that do not vary it.
    widths: Widths of the residual stream, of which learning rates are compared.
    tuning_seeds: Seeds that choose learning rates, and nothing else.
    num_seeds: Fresh seeds of each result; 0 for the loss of the tuning.
    stride: Factor between the first rates of a tuning, as a power of √2.
    on_one_core: Whether a run takes a CPU core, so that several run at once.
    finds_rules: Whether it found the rules for starting learning rates, so that
      its own first guesses are older.
    has_few_steps: Whether runs have some hundred steps, and optimizers thus
      another warm-up and b1.
    steps: Steps of every run, whatever its tokens; None for all.
  """

  settings: dict[str, Any]
  tokens: int
  batch_sizes: tuple[int, ...]
  batch_size: int
  widths: tuple[int, ...]
  tuning_seeds: tuple[int, ...] = (0, 100)
  num_seeds: int = 3
  stride: int = 2
  on_one_core: bool = False
  finds_rules: bool = False
  has_few_steps: bool = False
  steps: int | None = None

  @property
  def few_batch_sizes(self) -> list[int]:
    """The smallest, the middle and the largest batch, each once."""
    sizes = self.batch_sizes
    return sorted({sizes[0], self.middle_batch, sizes[-1]})

  @property
  def middle_batch(self) -> int:
    """The batch at which widths and lengths are varied."""
    return self.batch_sizes[len(self.batch_sizes) // 2]

  @property
  def many_seeds(self) -> int:
    """Seeds that show a third of Hyperball's lead, if there are several."""
    return 8 if self.num_seeds > 1 else self.num_seeds

  def num_steps(self, batch_size: int, share: float = 1.0) -> int:
    """Returns the steps of a run on a share of the tokens of the scale."""
    return round(share * self.run('adamw', batch_size, 1.0).config.steps)

  # Plans ask for a trial many times, and scales live as long as the program.
  @functools.cache  # noqa: B019
  def run(
    self,
    optimizer: Optimizer,
    batch_size: int,
    learning_rate: float,
    *,
    chain: Chain | None = None,
    with_diagnostics: bool = False,
    init_scale: float = 1.0,
    steps: int | None = None,
    **changes: Any,
  ) -> Trial:
    """Returns a trial.

    ``init_scale`` is the standard deviation of initial weights over that in
    proportion to width; ``steps`` are those that make the tokens of the scale
    by default; and ``changes`` are settings of the trainer.
    """
    steps = self.steps or steps
    settings = self.settings | {'weight_decay': DECAY} | changes
    config = resolve(
      Config(
        **settings,
        optimizer=optimizer,
        batch_size=batch_size,
        learning_rate=learning_rate,
        steps=steps,
      )
    )
    steps = steps or round(self.tokens / (batch_size * config.context_length))
    every = max(1, steps // _DIAGNOSTICS_STEPS) if with_diagnostics else 0
    config = dataclasses.replace(
      config,
      init_std=proportional_init_std(config.width, init_scale),
      steps=steps,
      eval_every=steps,
      diagnostics_every=every,
    )
    return Trial(config, chain, with_diagnostics)


_OPEN_WEB_TEXT = dict(
  data='openwebtext', eval_sequences=4096, checkpoint_every=100
)

SCALES = {
  # A run takes about a minute on one core.
  'nano': Scale(
    settings=dict(
      vocab_size=257, num_layers=3, num_heads=4, width=64, context_length=64,
      micro_batch_size=8, eval_sequences=2048, checkpoint_every=10**6,
    ),
    tokens=2_500_000,
    batch_sizes=(16, 32, 64, 128, 256),
    batch_size=128,
    widths=(32, 64, 128),
    on_one_core=True,
    finds_rules=True,
  ),
  # Thirteen times the parameters of nano, to see what carries over.
  'mini': Scale(
    settings=dict(
      vocab_size=2048, num_layers=4, num_heads=6, width=192, context_length=128,
      micro_batch_size=8, eval_sequences=1024, checkpoint_every=50,
    ),
    tokens=6_000_000,
    batch_sizes=(128, 512),
    batch_size=128,
    widths=(96, 192, 384),
    tuning_seeds=(0,),
    num_seeds=0,
    stride=1,
    on_one_core=True,
    has_few_steps=True,
  ),
  # For one GPU.
  'micro': Scale(
    settings=dict(
      vocab_size=4096, num_layers=6, num_heads=6, width=384, context_length=256,
      micro_batch_size=64, eval_sequences=1024, dtype='bfloat16',
      checkpoint_every=10**6,
    ),
    tokens=40_000_000,
    batch_sizes=(64, 128, 256, 512),
    batch_size=256,
    widths=(192, 384, 768),
    tuning_seeds=(0,),
    num_seeds=1,
  ),
  'small': Scale(
    settings=dict(preset='small', **_OPEN_WEB_TEXT),
    tokens=2_500_000_000,
    batch_sizes=(128, 256, 512, 1024),
    batch_size=1024,
    widths=(384, 768, 1536),
  ),
  'medium': Scale(
    settings=dict(preset='medium', **_OPEN_WEB_TEXT),
    tokens=7_000_000_000,
    batch_sizes=(512, 1024, 2048, 4096),
    batch_size=4096,
    widths=(512, 1024, 2048),
  ),
}  # fmt: skip
