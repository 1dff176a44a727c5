"""Sizes of the study: models, batches, tokens."""

import dataclasses
import math
from typing import Any

from examples.gpt2.config import Config
from examples.gpt2.presets import resolve
from examples.study.plans import Run

DECAY = 0.01
"""Weight decay with which learning rates are tuned."""
LEARNING_RATES = {'adamw': 4e-3, 'lamb': 2e-2, 'merit': 2e-2, 'muon': 1e-2}
"""First guesses, by optimizer."""
_DIAGNOSTICS_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Scale:
  """What all runs of a study share.

  Attributes:
    settings: Settings of the trainer.
    tokens: Tokens of a run, for every batch size.
    batch_sizes: Global batches, sequences, the smallest first.
    widths: Widths of the residual stream, of which learning rates are compared.
    budget: Runs to tune a learning rate.
    seeds: Runs at a tuned point.
    steps: Steps of every run, whatever its tokens; None for all.
  """

  settings: dict[str, Any]
  tokens: int
  batch_sizes: tuple[int, ...]
  widths: tuple[int, ...]
  budget: int = 7
  seeds: int = 3
  steps: int | None = None

  @property
  def init_std(self) -> float:
    """Standard deviation in GPT-2 small's proportion to the width."""
    width = self.run('adamw', self.largest_batch, 1.0).config.width
    return float(f'{0.02 * math.sqrt(768 / width):.3g}')

  @property
  def largest_batch(self) -> int:
    """Sequences of the largest global batch."""
    return self.batch_sizes[-1]

  def run(
    self,
    optimizer: str,
    batch_size: int,
    learning_rate: float,
    *,
    arm: str = '',
    with_diagnostics: bool = False,
    attention: str = 'softmax',
    token_share: float = 1.0,
    **changes: Any,
  ) -> Run:
    """Returns a run.

    Args:
      optimizer: Name of the optimizer.
      batch_size: Global batch, sequences.
      learning_rate: Peak learning rate.
      arm: Name of the study's own optimizer, if it is to replace that.
      with_diagnostics: Whether to measure attention and updates.
      attention: Of the :class:`Run`.
      token_share: Tokens of the run over those of the scale.
      **changes: Settings of the trainer.
    """
    settings = self.settings | {'weight_decay': DECAY} | changes
    config = resolve(
      Config(
        **settings,
        optimizer=optimizer,
        batch_size=batch_size,
        learning_rate=learning_rate,
      )
    )
    per_step = batch_size * config.context_length
    steps = self.steps or round(self.tokens * token_share / per_step)
    every = max(1, steps // _DIAGNOSTICS_STEPS) if with_diagnostics else 0
    config = dataclasses.replace(
      config, steps=steps, eval_every=steps, watch_every=every
    )
    return Run(config, arm, with_diagnostics, attention)


_OPEN_WEB_TEXT = dict(
  data='openwebtext', eval_sequences=4096, checkpoint_every=100
)

SCALES = {
  # A run takes about a minute on one core.
  'nano': Scale(
    settings=dict(
      vocab_size=257, num_layers=3, num_heads=4, width=64, context_length=64,
      micro_batch_size=8, unroll=3, eval_sequences=2048, checkpoint_every=10**6,
    ),
    tokens=2_500_000,
    batch_sizes=(16, 32, 64, 128),
    widths=(32, 64, 128),
  ),
  # For one GPU.
  'micro': Scale(
    settings=dict(
      vocab_size=4096, num_layers=6, num_heads=6, width=384, context_length=256,
      micro_batch_size=64, unroll=6, eval_sequences=1024, dtype='bfloat16',
      checkpoint_every=10**6,
    ),
    tokens=40_000_000,
    batch_sizes=(64, 128, 256, 512),
    widths=(192, 384, 768),
    budget=3,
    seeds=1,
  ),
  'small': Scale(
    settings=dict(preset='small', **_OPEN_WEB_TEXT),
    tokens=2_500_000_000,
    batch_sizes=(128, 256, 512, 1024),
    widths=(384, 768, 1536),
  ),
  'medium': Scale(
    settings=dict(preset='medium', **_OPEN_WEB_TEXT),
    tokens=7_000_000_000,
    batch_sizes=(512, 1024, 2048, 4096),
    widths=(512, 1024, 2048),
  ),
}  # fmt: skip
