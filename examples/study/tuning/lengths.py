"""Learning rates for other lengths of training, at one batch."""

from examples.study.optimizers import Optimizer
from examples.study.points import Tuned
from examples.study.scales import Scale
from examples.study.tuning.cases import Case, scale_rate
from examples.study.tuning.plans import Plan, gather

SHARES = (0.5, 2.0)
"""Lengths of training over that of the scale."""


def find_length_rates(
  scale: Scale, optimizer: Optimizer, tuned: Tuned
) -> Plan[dict[float, Tuned]]:
  """Plans to choose rates for other lengths, from the one at equal tokens.

  Returns:
    Tunings by length over that of the scale, the given one among them.
  """
  size = scale.middle_batch
  cases = {
    x: Case(scale, optimizer, size).with_settings(
      steps=scale.num_steps(size, x)
    )
    for x in SHARES
  }
  found = yield from gather(
    {
      share: case.find_rate(scale_rate(tuned.learning_rate, 1 / share))
      for share, case in cases.items()
    }
  )
  return dict(sorted((found | {1.0: tuned}).items()))
