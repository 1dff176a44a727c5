"""The optimizers of the study, and first guesses of their learning rates."""

import dataclasses
from typing import Any

from examples.gpt2 import config
from examples.study.chains import Chain


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
  optimizer: config.Optimizer
  start: float
  chain: Chain | None = None
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  few_steps: dict[str, Any] = dataclasses.field(default_factory=dict)
  rule: config.Optimizer | None = None


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
