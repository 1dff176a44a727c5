"""Final loss against global batch, at equal tokens."""

from examples.study.plans import Plan, together
from examples.study.points import PAPER, Point, find_point
from examples.study.scales import Scale

RIVALS = ('Muon', 'AdamW, QK-norm')
TOLERANCE = 0.02
"""Nats over its best that an optimizer may lose at its largest batch."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all batches for the paper's optimizers, the two largest for rivals.

  Returns the points, by contender and then by batch size.
  """
  pairs = [(name, size) for name in PAPER for size in scale.batch_sizes]
  pairs += [(name, size) for name in RIVALS for size in scale.batch_sizes[-2:]]
  points = yield from together(
    *(find_point(scale, name, size) for name, size in pairs)
  )
  return points


def largest_batches(points: list[Point]) -> dict[str, int]:
  """Returns each optimizer's largest batch that loses no more than TOLERANCE.

  Args:
    points: Points of the paper's optimizers; others are left out.
  """
  found = {}
  for name in PAPER:
    own = [point for point in points if point.name == name]
    best = min(point.mean for point in own)
    good = [point for point in own if point.mean <= best + TOLERANCE]
    found[name] = max(point.batch_size for point in good)
  return found
