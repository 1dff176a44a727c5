"""Tables of points: what is in a cell, and which cells there are."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import statistics
from typing import Any, TypeAlias

from examples.study.analysis.intervals import (
  Difference,
  difference,
  paired_difference,
)
from examples.study.optimizers import HYPERBALL, PAIRS, WITH_RATIOS
from examples.study.points import Point

Rows: TypeAlias = list[dict[str, str]]
"""Rows of a table: cells by the name of the column."""
Tables: TypeAlias = dict[str, Rows]
"""Tables by name."""


def select(points: Iterable[Point], **labels: Any) -> list[Point]:
  """Returns the points that have some labels."""
  return [
    point
    for point in points
    if all(point.labels.get(name) == x for name, x in labels.items())
  ]


def values(points: Iterable[Point], label: str) -> list[Any]:
  """Returns the values of a label, each once, in order."""
  return list(dict.fromkeys(point[label] for point in points))


def format_loss(loss: float) -> str:
  """Returns a loss as text."""
  if not math.isfinite(loss):
    return 'diverged'
  return f'{loss:.3f}' if loss < 100 else f'{loss:.0e}'


def format_sample(
  sample: Sequence[float], form: Callable[[float], str] = format_loss
) -> str:
  """Returns mean and standard deviation of a sample, as far as there are."""
  mean = statistics.mean(sample)
  if not math.isfinite(mean):
    failed = [x for x in sample if not math.isfinite(x)]
    return f'{len(failed)} of {len(sample)} diverged'
  if len(sample) < 2:
    return f'{form(mean)} (one seed)'
  # Losses of some image models are a thousandth themselves.
  if form is format_loss and mean < 0.01:
    form = '{:.4f}'.format
  return f'{form(mean)} ± {form(statistics.stdev(sample))}'


def format_number(x: float) -> str:
  """Returns a number with three digits, or as a whole one."""
  return f'{x:,.0f}' if x >= 100 else f'{x:.3g}'


def loss(point: Point) -> str:
  """Returns mean and standard deviation over seeds as text."""
  return format_sample(point.losses)


def rate(point: Point) -> str:
  """Returns the learning rate chosen, marked if it is at the edge.

  A better one that was not chosen since it is unstable is named. If it is the
  only one that was tried, nothing was tuned.
  """
  tuned = point.tuned
  if len(tuned.by_seed) == 1:
    return f'{tuned.learning_rate:g}, not tuned'
  text = f'{tuned.learning_rate:g}' + (' (edge)' if tuned.is_at_edge else '')
  if tuned.unstable_rate is None:
    return text
  return f'{text}; {tuned.unstable_rate:g} is unstable'


def tuned_loss_and_rate(point: Point) -> str:
  """Returns the loss of the tuning as text, and the learning rate."""
  return f'{format_loss(point.tuned.loss)} ({rate(point)})'


def label(name: str) -> Callable[[Point], str]:
  """Returns the cell with the value of a label."""
  return lambda point: _format_label(point[name])


def by_rate(point: Point) -> str:
  """Returns the losses of the tuning as text, each after its rate."""
  return ', '.join(
    f'{x:g}: {format_loss(y)}' for x, y in point.tuned.losses.items()
  )


TUNING = {'learning rate': rate, 'by learning rate': by_rate}
"""Cells of a table of tunings."""


def pivot(
  points: Iterable[Point],
  rows: Sequence[str],
  columns: str | None = None,
  cells: Mapping[str, Callable[[Point], str]] | None = None,
) -> Rows:
  """Returns a table with a row for each value of some labels.

  Args:
    points: The points.
    rows: Labels of a row.
    columns: Label with a column for each value; by default columns are those of
      ``cells``.
    cells: What is shown of a point, by name; the losses by default.
  """
  found: dict[tuple[str, ...], dict[str, str]] = {}
  headers = list(rows)
  for point in points:
    key = tuple(_format_label(point[name]) for name in rows)
    row = found.setdefault(key, dict(zip(rows, key, strict=True)))
    for name, cell in (cells or {'loss': loss}).items():
      header = _column(columns, point[columns]) if columns else name
      if header in row:
        raise ValueError(f'Two points of {row}: name what tells them apart.')
      headers.append(header)
      row[header] = cell(point)
  return [
    {x: row.get(x, '') for x in dict.fromkeys(headers)}
    for row in found.values()
  ]


def _format_label(value: Any) -> str:
  return value if isinstance(value, str) else f'{value:g}'


def _column(label: str, value: Any) -> str:
  return value if isinstance(value, str) else f'{label} {value:g}'


def losses(points: Iterable[Point], columns: str = 'batch') -> Tables:
  """Returns losses of optimizers, and the differences of ``PAIRS``."""
  points = list(points)
  names = [(x.name, y.name) for x, y in PAIRS]
  return {
    'losses': pivot(points, ['optimizer'], columns),
    **compare(points, names, columns),
  }


def compare(
  points: Iterable[Point], pairs: Iterable[tuple[str, str]], across: str
) -> Tables:
  """Returns differences of losses with their intervals.

  Hyperball with MERIT's ratios and without are compared seed by seed.

  Args:
    points: The points.
    pairs: Names of optimizers, the second subtracted from the first.
    across: Label whose values are the columns.

  Returns:
    A table ``'differences'``, and ``'detectable differences'`` with those that
    80 % of such experiments would have detected.
  """
  found = by_cell(points, across)
  columns = {y: _column(across, y) for _, y in found}
  rows, detectable = [], []
  for pair in pairs:
    compared = {
      column: _difference(found[pair[0], value], found[pair[1], value])
      for value, column in columns.items()
      if all((x, value) in found for x in pair)
    }
    if not compared:
      continue
    name = {'difference': f'{pair[0]} − {pair[1]}'}
    empty = dict.fromkeys(columns.values(), '')
    texts = {column: str(x) for column, x in compared.items()}
    limits = {column: format_detectable(x) for column, x in compared.items()}
    rows.append(name | empty | texts)
    if any(limits.values()):
      detectable.append(name | empty | limits)
  return {'differences': rows, 'detectable differences': detectable}


def searched(
  points: Iterable[Point], pairs: Iterable[tuple[str, str]]
) -> Tables:
  """Returns losses, their differences, and the values that were tried.

  The points are those of :func:`examples.study.tuning.coordinates.improve_all`.
  """
  points = list(points)
  found = select(points, role='best')
  return {
    'losses': pivot(found, ['optimizer'], 'batch'),
    **compare(found, pairs, 'batch'),
    'chosen': pivot(
      [x for x in found if x['chosen']],
      ['batch', 'optimizer'],
      cells={'values': label('chosen'), 'learning rate': rate},
    ),
    'tried': pivot(
      select(points, role='tried'),
      ['batch', 'optimizer', 'setting', 'value'],
      cells={'loss': tuned_loss_and_rate},
    ),
  }


def by_cell(
  points: Iterable[Point], across: str
) -> dict[tuple[str, Any], Point]:
  """Returns points by optimizer and the value of a label."""
  found: dict[tuple[str, Any], Point] = {}
  for point in points:
    cell = point['optimizer'], point[across]
    if cell in found:
      raise ValueError(f'Two points of {cell}: give them labels that differ.')
    found[cell] = point
  return found


def _difference(first: Point, second: Point) -> Difference:
  is_paired = {first['optimizer'], second['optimizer']} == {
    HYPERBALL.name,
    WITH_RATIOS.name,
  }
  return (paired_difference if is_paired else difference)(first, second)


def format_detectable(found: Difference) -> str:
  """Returns the smallest difference that is seen in 80 % of cases."""
  return '' if math.isnan(found.detectable) else f'{found.detectable:.3f}'
