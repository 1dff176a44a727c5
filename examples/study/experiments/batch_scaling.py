"""Final loss against global batch, at equal tokens."""

from matplotlib.figure import Figure

from examples.study.analysis import figures
from examples.study.analysis.tables import (
  TUNING,
  Rows,
  Tables,
  compare,
  pivot,
  select,
  values,
)
from examples.study.optimizers import PAIRS, STACKED_LAMB, Optimizer, compared
from examples.study.points import Point
from examples.study.render import panels
from examples.study.scales import Scale
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.points import find_point, find_rates, judge

TITLE = 'Loss against batch size'
TEXT = """\
The usual settings: a warm-up of 10 %, a b1 of 0.9 (with Muon and Hyperball
0.95), initial weights in proportion to the width (with Hyperball twice that).
Learning rates are chosen for each optimizer and batch; mean and standard
deviation over fresh seeds."""
TOLERANCE = 0.02
"""Nats over its best that an optimizer may lose at its largest batch."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to tune all optimizers at all batches."""
  found = yield from gather(
    {x.name: _plan_batches(scale, x) for x in compared(scale)}
  )
  points = [point for by_size in found.values() for point in by_size.values()]
  if not scale.num_seeds:  # Runs are too dear for a comparison by the way.
    return points
  return [
    *points,
    (yield from find_point(scale, STACKED_LAMB, scale.batch_size)),
  ]


def _plan_batches(scale: Scale, optimizer: Optimizer) -> Plan[dict[int, Point]]:
  rates = yield from find_rates(scale, optimizer)
  points = yield from gather(
    {
      size: judge(scale, optimizer, size, tuned, scale.seeds_at(size))
      for size, tuned in rates.items()
    }
  )
  rules = {size: optimizer.rule_rate(scale, size) for size in points}
  return {
    size: point.labelled(rule=rules[size]) if rules[size] else point
    for size, point in points.items()
  }


def tables(points: list[Point]) -> Tables:
  """Returns losses, their differences, and the tuning."""
  everywhere = _at_every_batch(points)
  names = [(x.name, y.name) for x, y in PAIRS]
  found = {
    'losses': pivot(points, ['optimizer'], 'batch'),
    **compare(everywhere, names, 'batch'),
    'largest batches': largest_batches(everywhere),
    'tuning': pivot(points, ['optimizer', 'batch'], cells=TUNING),
  }
  ruled = [x for x in points if 'rule' in x.labels]
  if ruled:
    found['rates over the rules'] = pivot(
      ruled, ['optimizer'], 'batch', {'rate': _over_rule}
    )
  return found


def _at_every_batch(points: list[Point]) -> list[Point]:
  return [x for x in points if x['optimizer'] != STACKED_LAMB.name]


def _over_rule(point: Point) -> str:
  return f'{point.tuned.learning_rate / point["rule"]:.2g} ×'


def largest_batches(points: list[Point]) -> Rows:
  """Returns each optimizer's largest batch that loses at most TOLERANCE."""
  rows = []
  for name in values(points, 'optimizer'):
    own = select(points, optimizer=name)
    limit = min(x.mean for x in own) + TOLERANCE
    good = [x['batch'] for x in own if x.mean <= limit]
    rise = own[-1].mean - own[0].mean
    rows.append(
      {
        'optimizer': name,
        f'largest batch within {TOLERANCE:g} of its best': f'{max(good)}',
        f'batch {own[-1]["batch"]} minus {own[0]["batch"]}': f'{rise:+.3f}',
      }
    )
  return rows


def figure(points: list[Point]) -> Figure:
  """Draws loss over batch, and over learning rate at one batch."""
  result, ((left, right),) = panels(1, 2)
  figures.over_batches(left, _at_every_batch(points))
  left.set_title('tuned, equal tokens')
  size = points[-1]['batch']
  figures.draw_tunings(right, select(_at_every_batch(points), batch=size))
  right.set_title(f'tuning at batch {size}')
  left.legend(fontsize=6)
  return result
