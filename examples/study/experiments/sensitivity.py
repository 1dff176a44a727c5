"""Loss against batch size, with warm-up and b1 tuned for each optimizer too."""

from matplotlib.figure import Figure

from examples.study.analysis import figures
from examples.study.analysis.tables import (
  Tables,
  compare,
  pivot,
  select,
  tuned_loss_and_rate,
)
from examples.study.optimizers import PAIRS
from examples.study.points import Point
from examples.study.render import panels
from examples.study.scales import Scale
from examples.study.tuning.plans import Plan
from examples.study.tuning.stages import compare as compare_all, warmup_and_b1

TITLE = 'Warm-up and b1 tuned too'
TEXT = """\
Each optimizer with the warm-up and the b1 that suit it best at a batch, and
with the learning rate for these (Hyperball: as with MERIT’s ratios, but for the
learning rate; these two are compared seed by seed). As it is: a warm-up of
10 %; b1 of 0.9, with Muon and Hyperball 0.95; the rest, which Adam updates, at
a third of the rate with Hyperball, and at the rate of the hidden matrices with
Muon. What was tried has losses of one seed, and the learning rate, chosen for
each, in brackets."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to tune warm-up and b1 at every batch."""
  return compare_all(warmup_and_b1, scale)


def tables(points: list[Point]) -> Tables:
  """Returns losses, their differences, and what was tried."""
  chosen = select(points, role='best')
  names = [(x.name, y.name) for x, y in PAIRS]
  return {
    'losses': pivot(chosen, ['optimizer'], 'batch'),
    **compare(chosen, names, 'batch'),
    'chosen': pivot(
      chosen, ['optimizer'], 'batch', {'': lambda x: x['variant']}
    ),
    'tried': pivot(
      select(points, role='tried'),
      ['optimizer', 'variant'],
      'batch',
      {'': tuned_loss_and_rate},
    ),
  }


def figure(points: list[Point]) -> Figure:
  """Draws loss over batch, and what each variant changes at the largest one."""
  result, ((left, right),) = panels(1, 2)
  figures.over_batches(left, select(points, role='best'))
  left.legend(fontsize=6)
  size = points[-1]['batch']
  tried = select(points, role='tried', batch=size)
  figures.draw_lines(right, tried, 'variant', lambda x: x.tuned.loss)
  right.tick_params('x', rotation=90)
  right.set_title(f'batch {size}, one seed')
  return result
