"""Loss against batch size, with the size of the initial weights tuned too."""

from matplotlib.figure import Figure

from examples.study.analysis import figures
from examples.study.analysis.tables import (
  Tables,
  compare,
  pivot,
  select,
  tuned_loss_and_rate,
)
from examples.study.experiments.batch_scaling import largest_batches
from examples.study.optimizers import HYPERBALL, PAIRS
from examples.study.points import Point
from examples.study.render import panels
from examples.study.scales import Scale
from examples.study.tuning.plans import Plan
from examples.study.tuning.stages import compare as compare_all, initial_weights

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


def tables(points: list[Point]) -> Tables:
  """Returns losses, their differences, and what was tried."""
  chosen = select(points, role='best')
  names = [(x.name, y.name) for x, y in PAIRS]
  return {
    'losses': pivot(chosen, ['optimizer'], 'batch'),
    **compare(chosen, names, 'batch'),
    'largest batches': largest_batches(chosen),
    'tried': pivot(
      _by_size(points),
      ['batch', 'optimizer'],
      'variant',
      {'': tuned_loss_and_rate},
    ),
  }


def _by_size(points: list[Point]) -> list[Point]:
  tried = select(points, role='tried')
  own = [x for x in tried if x['optimizer'] != HYPERBALL.name]
  return sorted(own, key=lambda x: (x['batch'], x['variant']))


def figure(points: list[Point]) -> Figure:
  """Draws loss over batch, and over the size at the two largest ones."""
  sizes = sorted({x['batch'] for x in points})[-2:]
  result, ((left, *others),) = panels(1, 1 + len(sizes))
  figures.over_batches(left, select(points, role='best'))
  left.legend(fontsize=6)
  for size, axes in zip(sizes, others, strict=True):
    tried = select(_by_size(points), batch=size)
    figures.draw_lines(axes, tried, 'variant', lambda x: x.tuned.loss)
    axes.set_xlabel('standard deviation over 0.02 × √(768 / width)')
    axes.set_title(f'batch {size}, one seed')
  return result
