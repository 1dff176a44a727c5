"""Figures of points."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from typing import Any

from matplotlib.figure import Figure

from examples.study.analysis.intervals import Difference, difference
from examples.study.analysis.tables import select, values
from examples.study.points import Point
from examples.study.render import COLORS, label_decades, legend_below, panels


def finite(values: Iterable[float]) -> list[float]:
  """Returns NaN, which is not drawn, in place of what is not finite."""
  return [x if math.isfinite(x) else math.nan for x in values]


def draw_lines(
  axes: Any,
  points: Iterable[Point],
  x: str,
  y: Callable[[Point], float] = lambda point: point.mean,
  by: str = 'optimizer',
) -> None:
  """Draws a line of points for each optimizer, over the values of a label.

  With the standard deviation of seeds, where the mean is drawn.
  """
  points = list(points)
  has_bars = any(y(point) == point.mean for point in points)
  for name in values(points, by):
    drawn = select(points, **{by: name})
    axes.errorbar(
      [point[x] for point in drawn],
      finite(map(y, drawn)),
      finite(point.std for point in drawn) if has_bars else None,
      fmt='o-',
      ms=4,
      capsize=3,
      color=COLORS.get(name),
      label=name if isinstance(name, str) else f'{by} {name:g}',
    )
  axes.set_xlabel(x)
  axes.set_ylabel('validation loss')


def over_batches(axes: Any, points: Iterable[Point]) -> None:
  """Draws the loss over the batch size, with the deviation of seeds."""
  points = list(points)
  draw_lines(axes, points, 'batch')
  sizes = values(points, 'batch')
  axes.set_xscale('log', base=2)
  axes.set_xticks(sizes, map(str, sizes))
  axes.set_xlabel('global batch, sequences')


def draw_tunings(
  axes: Any, points: Iterable[Point], by: str = 'optimizer'
) -> None:
  """Draws losses over learning rates, and cuts off those far above."""
  points = list(points)
  for point in points:
    losses = point.tuned.losses
    name = point[by]
    axes.plot(
      list(losses),
      finite(losses.values()),
      'o-',
      ms=3,
      color=COLORS.get(name),
      label=name if isinstance(name, str) else f'{by} {name:g}',
    )
  found = [y for x in points for y in x.tuned.losses.values()]
  ordered = sorted(filter(math.isfinite, found))
  if ordered:
    span = ordered[len(ordered) // 2] - ordered[0] + 0.05
    axes.set_ylim(ordered[0] - 0.1 * span, ordered[0] + 3 * span)
  axes.set_xscale('log')
  label_decades(axes.xaxis)
  axes.set_xlabel('learning rate')
  axes.set_ylabel('validation loss')


def tunings(groups: Mapping[str, Sequence[Point]]) -> Figure:
  """Returns a figure of losses over learning rates, a panel for each group."""
  figure, (row,) = panels(1, len(groups))
  for (title, points), axes in zip(groups.items(), row, strict=True):
    draw_tunings(axes, points)
    axes.set_title(title)
  legend_below(figure, row[0])
  return figure


def bars(
  differences: Mapping[str, Difference], baseline: str, **options: Any
) -> Figure:
  """Returns a figure of differences with intervals.

  Args:
    differences: From the baseline, by name.
    baseline: Its name.
    **options: Of the bars.
  """
  figure, ((axes,),) = panels(1, 1)
  figure.set_size_inches(8, 0.8 + 0.3 * len(differences))
  means = finite(x.mean for x in differences.values())
  axes.barh(list(differences), means, alpha=0.7, **options)
  axes.errorbar(
    means,
    list(differences),
    xerr=finite(x.high - x.mean for x in differences.values()),
    fmt='none',
    capsize=3,
    color='black',
  )
  axes.invert_yaxis()
  axes.axvline(0, color='0.5', lw=1)
  axes.set_xlabel(
    f'validation loss minus that of {baseline}, with 95 % intervals'
  )
  return figure


def batches(
  points: Sequence[Point],
  others: Mapping[str, Sequence[Point]] | None = None,
  x: str = 'variant',
) -> Figure:
  """Returns a figure of losses over batches, and of what was tried.

  Args:
    points: Points of optimizers at each batch.
    others: Points that were tried, by the title of a panel.
    x: Label of what was tried.
  """
  others = others or {}
  figure, ((left, *panels_),) = panels(1, 1 + len(others))
  over_batches(left, points)
  left.legend(fontsize=6)
  for (title, tried), axes in zip(others.items(), panels_, strict=True):
    draw_lines(axes, tried, x, lambda point: point.tuned.loss)
    axes.tick_params('x', rotation=90)
    axes.set_title(title, fontsize=9)
  return figure


def draw_lead(
  axes: Any, points: Iterable[Point], first: str, second: str
) -> None:
  """Draws the loss of one optimizer minus that of another over the batch."""
  by_key = {(point['optimizer'], point['batch']): point for point in points}
  sizes = list(dict.fromkeys(size for _, size in by_key))
  found = [difference(by_key[first, x], by_key[second, x]) for x in sizes]
  # Before there is data, since there may be none.
  axes.set_xscale('log', base=2)
  axes.errorbar(
    sizes,
    finite(x.mean for x in found),
    finite(x.high - x.mean for x in found),
    fmt='o-',
    capsize=4,
    color=COLORS[first],
  )
  axes.axhline(0, color=COLORS[second])
  axes.set_xticks(sizes, map(str, sizes))
  axes.set_xlabel('global batch, sequences')
  axes.set_title(f'{first} minus {second}, with 95 % intervals', fontsize=9)
