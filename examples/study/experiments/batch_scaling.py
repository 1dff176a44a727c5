"""Final loss against global batch, at equal tokens."""

from collections.abc import Sequence
import itertools
import math
from typing import Any

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import STACKED_LAMB, Contender, compared
from examples.study.differences import difference, sentence
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_point, find_rates, judge
from examples.study.scales import Scale

TITLE = 'Loss against batch size'
TOLERANCE = 0.02
"""Nats over its best that an optimizer may lose at its largest batch."""

Outcome = dict[tuple[str, int], Point]
"""Points by contender and batch size."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune all contenders at all batches."""
  found = yield from gather(
    {x.name: _plan_batches(scale, x) for x in compared(scale)}
  )
  outcome = {
    (name, size): point
    for name, points in found.items()
    for size, point in points.items()
  }
  if not scale.num_seeds:  # Runs are too dear for a comparison by the way.
    return outcome
  stacked = yield from find_point(scale, STACKED_LAMB, scale.batch_size)
  return outcome | {(stacked.name, stacked.batch_size): stacked}


def _plan_batches(scale: Scale, contender: Contender) -> Plan[dict[int, Point]]:
  rates = yield from find_rates(scale, contender)
  return (
    yield from gather(
      {
        size: judge(scale, contender, size, tuned, scale.seeds_at(size))
        for size, tuned in rates.items()
      }
    )
  )


def largest_batches(outcome: Outcome) -> dict[str, int]:
  """Returns each optimizer's largest batch that loses at most TOLERANCE.

  Losses are means over seeds; 0 if every batch diverged.
  """
  found = {}
  for name in names(outcome):
    losses = {x: point.mean for (y, x), point in outcome.items() if y == name}
    limit = min(losses.values()) + TOLERANCE
    good = [size for size, x in losses.items() if x <= limit < math.inf]
    found[name] = max(good, default=0)
  return found


def names(outcome: Outcome) -> list[str]:
  """Returns the names of those that are compared at every batch."""
  found = dict.fromkeys(name for name, _ in outcome)
  return [x for x in found if x != STACKED_LAMB.name]


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the tables, and the order at the largest batches."""
  largest = largest_batches(outcome)
  return '\n\n'.join(
    [
      'Mean and standard deviation over seeds:',
      render.markdown(loss_rows(outcome, scale)),
      *(_order(outcome, size) for size in scale.batch_sizes[-2:]),
      'Largest batch whose loss is within '
      f'{TOLERANCE:g} nats of the optimizer’s own best: '
      + ', '.join(f'{name} {size}' for name, size in largest.items())
      + '.',
      'All losses of the tuning, by learning rate:',
      render.markdown([_tuning_row(point) for point in outcome.values()]),
    ]
  )


def loss_rows(outcome: Outcome, scale: Scale) -> list[dict[str, str]]:
  """Returns the rows of a table of losses, a column for each batch."""
  return [
    {'optimizer': name}
    | {
      f'batch {size}': render.format_point(outcome[name, size])
      if (name, size) in outcome
      else ''
      for size in scale.batch_sizes
    }
    for name in dict.fromkeys(name for name, _ in outcome)
  ]


def _order(outcome: Outcome, size: int) -> str:
  points = [outcome[x, size] for x in names(outcome)]
  return f'Batch {size}: {in_order(points)}'


def in_order(points: Sequence[Point]) -> str:
  """Returns whether each point differs from the next best one."""
  ranked = sorted(points, key=lambda point: point.mean)
  return ' '.join(
    sentence(better.name, worse.name, difference(better, worse))
    for better, worse in itertools.pairwise(ranked)
  )


def _tuning_row(point: Point) -> dict[str, str]:
  return {
    'optimizer': point.name,
    'batch': str(point.batch_size),
    'learning rate': render.format_learning_rate(point.tuned),
    'by learning rate': render.format_losses(point.tuned.losses),
  }


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over batch, and over learning rate at one batch."""
  result, ((left, right),) = render.panels(1, 2)
  draw_losses(left, outcome, scale)
  left.set_title('tuned, equal tokens')
  tunings = {x: outcome[x, scale.batch_size].tuned for x in names(outcome)}
  for name, tuned in tunings.items():
    render.draw_tuning(right, tuned, name, color=render.COLORS[name])
  render.limit_losses(right, tunings.values())
  right.set_title(f'tuning at batch {scale.batch_size}')
  return result


def draw_losses(axes: Any, outcome: Outcome, scale: Scale) -> None:
  """Draws the loss over the batch size, with the deviation of seeds."""
  for name in names(outcome):
    points = [p for p in outcome.values() if p.name == name]
    drawn = [p for p in points if math.isfinite(p.mean)]
    axes.errorbar(
      [p.batch_size for p in drawn],
      [p.mean for p in drawn],
      [p.std for p in drawn],
      fmt='o-',
      capsize=3,
      color=render.COLORS[name],
      label=name,
    )
  axes.set_xscale('log', base=2)
  axes.set_xticks(scale.batch_sizes, map(str, scale.batch_sizes))
  axes.set_xlabel('global batch, sequences')
  axes.set_ylabel('validation loss')
  axes.legend(fontsize=8)
