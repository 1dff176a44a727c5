"""The optimizers of the study, and first guesses of their learning rates."""

import dataclasses
from typing import Any

from examples.gpt2.config import Config
from examples.gpt2.presets import resolve
from examples.study.plans import Run
from examples.study.scales import Scale


@dataclasses.dataclass(frozen=True)
class Contender:
  """An optimizer of the study.

  Attributes:
    name: What the report calls it.
    optimizer: The trainer's, which gives the betas too.
    start: First guess of the learning rate, for some hundred steps, before
      there was a rule.
    arm: Chain in its place (see :mod:`examples.study.arms`).
    settings: Further arguments of :meth:`Scale.run`.
    few_steps: Those of scales of some hundred steps: the warm-up and the b1
      that suited it best in the experiment ``sensitivity``.
    rule: The trainer's optimizer whose starting learning rate it takes, if
      there is one.
  """

  name: str
  optimizer: str
  start: float
  arm: str = ''
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  few_steps: dict[str, Any] = dataclasses.field(default_factory=dict)
  rule: str = ''

  @property
  def init_scale(self) -> float:
    """Deviation of initial weights over the one in proportion to the width."""
    return self.settings.get('init_scale', 1.0)

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

  def run(
    self, scale: Scale, batch_size: int, learning_rate: float, **changes: Any
  ) -> Run:
    """Returns a run, with changes as for :meth:`Scale.run`."""
    settings = self.few_steps if scale.has_few_steps else {}
    settings = {'arm': self.arm} | settings | self.settings | changes
    return scale.run(self.optimizer, batch_size, learning_rate, **settings)


_LONG = dict(warmup_share=0.3, b1=0.8)
ADAMW = Contender('AdamW', 'adamw', 0.011, few_steps=_LONG, rule='adamw')
LAMB = Contender(
  'LAMB',
  'lamb',
  0.028,
  'adam corrected > decay > l2',
  few_steps=_LONG,
  rule='lamb',
)
MERIT = Contender('MERIT', 'merit', 0.028, few_steps=_LONG, rule='merit')
MUON = Contender('Muon', 'muon', 0.028, few_steps=_LONG, rule='muon')
KEPT = Contender(
  'Muon, MERIT’s ratios, norms kept',
  'muon',
  0.06,
  'muon > merit > l2 > keep l2; adam 0.33',
  {'init_scale': 2.0},
  few_steps={'b1': 0.8},
  rule='muon-hyperball',
)
"""The best of ``compositions``: MERIT's ratios on Muon's direction, and the l2
norm of each matrix kept, at twice the size in proportion to the width."""
SIMPLER = dataclasses.replace(
  KEPT, name='Muon, norms kept', arm='muon > l2 > keep l2; adam 0.33'
)
"""Norms kept without MERIT's ratios, the trainer's ``muon-hyperball``."""
STACKED_LAMB = Contender('LAMB, a ratio for the stack', 'lamb', 0.028)
"""``optax.lamb``, for which the layers that are scanned are one array."""

PAPER = (ADAMW, LAMB, MERIT)
"""Those that the paper compares."""
CONTENDERS = (*PAPER, MUON, KEPT)
"""Those that most experiments compare."""
WITH_SIMPLER = (*CONTENDERS, SIMPLER)


def compared(scale: Scale) -> tuple[Contender, ...]:
  """Returns those that are compared at every batch of a scale.

  The scale that finds the rules compares the simpler chain elsewhere, with
  warm-up and b1 tuned.
  """
  return CONTENDERS if scale.finds_rules else WITH_SIMPLER
