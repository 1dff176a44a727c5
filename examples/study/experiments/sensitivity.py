"""Loss against batch size, with warm-up and b1 tuned for each optimizer too."""

from examples.study.analysis import tables as t
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Plan, compare_all, warmup_and_b1

TITLE = 'Warm-up and b1 tuned too'
TEXT = """\
Each optimizer with the warm-up and the b1 that suit it best at a batch, and
with the learning rate for these (Hyperball: as with MERIT’s ratios, but for the
learning rate; these two are compared seed by seed). As it is: a warm-up of
10 %; b1 of 0.9, with Muon and Hyperball 0.95; the rest, which Adam updates, at
a third of the rate with Hyperball, and at the rate of the hidden matrices with
Muon. What was tried has losses of one seed, and in brackets the learning rate,
which is tuned for each (at the smaller batches only if it is at most 0.005
worse at the rate of the best one)."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to tune warm-up and b1 at every batch."""
  return compare_all(warmup_and_b1, scale)


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  best, tried = (t.select(points, role=x) for x in ('best', 'tried'))
  return {
    **t.losses(best),
    'chosen': t.pivot(best, ['optimizer'], 'batch', {'': t.label('variant')}),
    'tried': t.pivot(
      tried, ['optimizer', 'variant'], 'batch', {'': t.tuned_loss_and_rate}
    ),
  }
