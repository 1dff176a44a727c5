"""Loss against batch size, with the size of the initial weights tuned too."""

from examples.study.analysis import tables as t
from examples.study.optimizers import HYPERBALL
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Plan, compare_all, initial_weights

TITLE = 'Initial weights tuned too'
TEXT = """\
As above, and each optimizer with the standard deviation of the initial weights
that suits it best at a batch, embeddings included: 1, 2 or 4 × that in
proportion to the width, the next one on either side of the best so far
(Hyperball: as with MERIT’s ratios, but for the learning rate). What was tried
has losses of one seed, and the learning rate, which is chosen for each size (at
the smaller batches only if a size is at most 0.02 worse at the rate of the best
one)."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to tune the initial weights at every batch."""
  return compare_all(initial_weights, scale)


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  cells = {'': t.tuned_loss_and_rate}
  return {
    **t.losses(t.select(points, role='best')),
    'tried': t.pivot(_tried(points), ['batch', 'optimizer'], 'variant', cells),
  }


def _tried(points: list[Point]) -> list[Point]:
  tried = t.select(points, role='tried')
  own = [x for x in tried if x['optimizer'] != HYPERBALL.name]
  return sorted(own, key=lambda x: (x['batch'], x['variant']))
