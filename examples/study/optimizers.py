"""The optimizers of the study, and first guesses of their learning rates."""

import dataclasses
from typing import Any

from examples.gpt2.config import Config
from examples.gpt2.presets import resolve
from examples.study.chains import Chain
from examples.study.scales import Scale
from examples.study.trial import Trial


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optimizer of the study.

  Attributes:
    name: What tables call it.
    optimizer: The trainer's, which gives the betas too.
    start: First guess of the learning rate, for some hundred steps, before
      there was a rule.
    chain: Chain in its place.
    settings: Further arguments of :meth:`Scale.run`.
    few_steps: Those of scales of some hundred steps: the warm-up and the b1
      that suited it best in the experiment ``sensitivity``.
    rule: Name of the trainer's optimizer whose starting learning rate it takes,
      if there is one.
  """

  name: str
  optimizer: str
  start: float
  chain: Chain | None = None
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  few_steps: dict[str, Any] = dataclasses.field(default_factory=dict)
  rule: str = ''

  def rule_rate(self, scale: Scale, batch_size: int) -> float | None:
    """Returns the learning rate by the rule, None if the scale has none yet."""
    if scale.finds_rules or not self.rule:
      return None
    config = Config(
      **scale.settings,
      optimizer=self.rule,
      batch_size=batch_size,
      steps=scale.num_steps(batch_size),
    )
    return resolve(config).learning_rate

  def trial(
    self, scale: Scale, batch_size: int, learning_rate: float, **changes: Any
  ) -> Trial:
    """Returns a trial, with changes as for :meth:`Scale.run`."""
    settings = self.few_steps if scale.has_few_steps else {}
    settings = {'chain': self.chain} | settings | self.settings | changes
    return scale.run(self.optimizer, batch_size, learning_rate, **settings)


_LONG = dict(warmup_share=0.3, b1=0.8)
ADAMW = Optimizer('AdamW', 'adamw', 0.011, few_steps=_LONG, rule='adamw')
LAMB = Optimizer(
  'LAMB',
  'lamb',
  0.028,
  Chain(('adam corrected', 'decay', 'l2')),
  few_steps=_LONG,
  rule='lamb',
)
MERIT = Optimizer('MERIT', 'merit', 0.028, few_steps=_LONG, rule='merit')
MUON = Optimizer('Muon', 'muon', 0.028, few_steps=_LONG, rule='muon')
HYPERBALL = Optimizer(
  'Hyperball',
  'muon',
  0.06,
  Chain(('muon', 'l2', 'keep l2'), 'adam', 0.33),
  {'init_scale': 2.0},
  few_steps={'b1': 0.8},
  rule='muon-hyperball',
)
"""Muon's direction, and the norm of each hidden matrix kept, at twice the size
in proportion to the width: what the library's ``muon_hyperball`` does with the
trainer's settings, up to the rate of what Adam updates (0.33 instead of a
third) and the b1 (0.95 instead of 0.9)."""
WITH_RATIOS = dataclasses.replace(
  HYPERBALL,
  name='Hyperball, MERIT’s ratios',
  chain=Chain(('muon', 'merit', 'l2', 'keep l2'), 'adam', 0.33),
)
"""The same with MERIT's ratios in the chain."""
STACKED_LAMB = Optimizer('LAMB, a ratio for the stack', 'lamb', 0.028)
"""``optax.lamb``, for which the layers that are scanned are one array."""

PAPER = (ADAMW, LAMB, MERIT)
"""Those that the paper compares."""
COMPARED = (*PAPER, MUON, WITH_RATIOS)
"""Those that most experiments compare."""
ALL = (*COMPARED, HYPERBALL)
PAIRS = (
  (MERIT, ADAMW),
  (MERIT, LAMB),
  (LAMB, ADAMW),
  (MUON, ADAMW),
  (MUON, MERIT),
  (HYPERBALL, MUON),
  (WITH_RATIOS, MUON),
  (WITH_RATIOS, HYPERBALL),
)
"""Those whose losses are compared."""


def compared(scale: Scale) -> tuple[Optimizer, ...]:
  """Returns those that are compared at every batch of a scale.

  The scale that finds the rules compares Hyperball elsewhere, with warm-up and
  b1 tuned.
  """
  return COMPARED if scale.finds_rules else ALL
