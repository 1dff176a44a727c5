"""Figures of points."""

from collections.abc import Callable, Iterable, Sequence
import math
from typing import Any

from examples.study.analysis.intervals import difference
from examples.study.analysis.logits import costs
from examples.study.analysis.tables import by_cell, select, values
from examples.study.points import Point
from examples.study.render import COLORS


def _finite(values: Iterable[float]) -> list[float]:
  """Returns NaN, which is not drawn, in place of what is not finite."""
  return [x if math.isfinite(x) else math.nan for x in values]


def draw_lines(
  axes: Any,
  points: Iterable[Point],
  x: str,
  y: Callable[[Point], float] | None = None,
) -> None:
  """Draws a line for each optimizer over the values of a label.

  By default, of the mean loss with the standard deviation of seeds.
  """
  points = list(points)
  for name in values(points, 'optimizer'):
    drawn = select(points, optimizer=name)
    axes.errorbar(
      [point[x] for point in drawn],
      _finite(map(y or (lambda point: point.mean), drawn)),
      None if y else _finite(point.std for point in drawn),
      fmt='o-',
      ms=4,
      capsize=3,
      color=COLORS.get(name),
      label=name,
    )
  axes.set_xlabel(x)
  axes.set_ylabel('validation loss')


def label_batches(axes: Any, points: Iterable[Point]) -> None:
  """Labels an axis of batch sizes."""
  sizes = values(points, 'batch')
  axes.set_xscale('log', base=2)
  axes.set_xticks(sizes, map(str, sizes))
  axes.set_xlabel('global batch, sequences')


def draw_difference(
  axes: Any, points: Iterable[Point], first: str, second: str, **style: str
) -> None:
  """Draws the loss of one optimizer minus that of another over the batch."""
  cells = by_cell(points, 'batch')
  sizes = list(dict.fromkeys(size for _, size in cells))
  found = [difference(cells[first, x], cells[second, x]) for x in sizes]
  axes.errorbar(
    sizes,
    _finite(x.mean for x in found),
    _finite(x.high - x.mean for x in found),
    fmt='o-',
    capsize=4,
    **style,
  )


def draw_costs(axes: Any, points: Sequence[Point]) -> None:
  """Draws what factors of the learning rate cost, but for what diverged."""
  found = costs(points)
  factors = values(points, 'factor')
  draw_lines(
    axes, points, 'factor', lambda x: found[x['optimizer'], x['factor']]
  )
  axes.set_xscale('log', base=2)
  axes.set_xticks(factors, [f'{x:g} ×' for x in factors])
  axes.set_xlabel('learning rate over the one chosen')
  axes.set_ylabel('loss over that of the one chosen, up to 0.5')
  size = points[0]['batch']
  axes.set_title(f'batch {size}, usual warm-up and b1', fontsize=9)
  axes.set_ylim(top=0.5)


def draw_logits(axes: Any, points: Iterable[Point]) -> None:
  """Draws the largest logit over the steps, a line for each seed."""
  for point in points:
    name = point['optimizer']
    for result in point.fresh:
      logits = [
        math.nan if None in layers else max(layers)
        for layers in result.diagnostics['max_attention_logit']
      ]
      label = name if result is point.fresh[0] else None
      steps = result.diagnostics['step']
      axes.plot(steps, logits, color=COLORS[name], label=label, lw=1.1)
  axes.set_yscale('symlog', linthresh=1.0)
  axes.set_xlabel('step')
