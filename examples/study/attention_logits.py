"""Attention logits over training, at tuned learning rates and beyond."""

from examples.study.plans import Plan, Result, together
from examples.study.points import PAPER, find_point, run_at
from examples.study.scales import Scale

FACTORS = (1, 2, 4)
"""Multiples of the tuned learning rate."""


def plan(scale: Scale) -> Plan[dict[tuple[str, int], Result]]:
  """Plans runs at the largest batch.

  Returns the results by contender and factor.
  """
  points = yield from together(
    *(find_point(scale, name, scale.largest_batch) for name in PAPER)
  )
  pairs = [(point, factor) for point in points for factor in FACTORS]
  results = yield [run_at(scale, point, factor) for point, factor in pairs]
  names = [(point.name, factor) for point, factor in pairs]
  return dict(zip(names, results, strict=True))
