"""Tables of points, as ``data/experiments.json`` describes them."""

from collections.abc import Callable
import statistics
from typing import Any

from scipy import stats

from examples.study.analysis import lengths
from examples.study.analysis.data import Point, Points, select, values

Rows = list[dict[str, str]]
"""Rows of a table: cells by the name of the column."""


def make_table(spec: dict[str, Any], points: Points) -> Rows:
  """Returns a table.

  Args:
    spec: Its description. ``'cell'`` names what a cell shows; ``'rows'`` and
      ``'columns'`` are labels; ``'only'`` has the values of labels to show;
      ``'pairs'`` are optimizers, the second subtracted from the first.
    points: The points of the experiment.
  """
  points = without_tried(points)
  if 'pairs' in spec:
    return _differences(points, spec['pairs'], spec['columns'])
  if spec['cell'] in _WHOLE:
    return _WHOLE[spec['cell']](points)
  for label, allowed in spec.get('only', {}).items():
    points = [x for x in points if x.labels[label] in allowed]
  cell = _CELLS[spec['cell']]
  return _pivot(points, spec['rows'], spec['columns'], cell)


def without_tried(points: Points) -> Points:
  """Returns the points that are shown, not those that only tuned."""
  return [x for x in points if 'tried' not in x.labels]


def _pivot(
  points: Points, rows: list[str], columns: str, cell: Callable[[Point], str]
) -> Rows:
  if columns in ('steps', 'value'):
    points = sorted(points, key=lambda x: float(x.labels[columns]))
  headers = dict.fromkeys(_header(x, columns) for x in points)
  found: dict[tuple[str, ...], dict[str, str]] = {}
  for name in dict.fromkeys(tuple(x.labels[y] for y in rows) for x in points):
    found[name] = dict(zip(rows, name, strict=True)) | dict.fromkeys(
      headers, ''
    )
  for point in points:
    row = found[tuple(point.labels[y] for y in rows)]
    header = _header(point, columns)
    if row[header]:
      raise ValueError(f'Two points of {row}, {header}.')
    row[header] = cell(point)
  return list(found.values())


def _header(point: Point, label: str) -> str:
  value = point.labels[label]
  if label == 'batch':
    return f'batch {value} ({point.labels["batch tokens"]:,} tokens)'
  return value if isinstance(value, str) else f'{label} {value:g}'


def _differences(points: Points, pairs: list[list[str]], columns: str) -> Rows:
  headers = dict.fromkeys(_header(x, columns) for x in points)
  rows = []
  for pair in pairs:
    row = {'difference': ' − '.join(pair)} | dict.fromkeys(headers, '')
    for value in values(points, columns):
      both = [select(points, optimizer=x, **{columns: value}) for x in pair]
      if all(both):
        (first,), (second,) = both
        row[_header(first, columns)] = format_difference(first, second)
    rows.append(row)
  return rows


def interval(first: Point, second: Point) -> tuple[float, float, float]:
  """Returns the difference of mean losses, and its interval of 95 % (Welch)."""
  found = stats.ttest_ind(first.losses, second.losses, equal_var=False)
  low, high = found.confidence_interval(0.95)
  return first.mean - second.mean, float(low), float(high)


def format_difference(first: Point, second: Point) -> str:
  """Returns the difference with its interval as text."""
  mean, low, high = interval(first, second)
  return f'{mean:+z.3f} [{low:+z.3f}, {high:+z.3f}]'


def _loss(point: Point) -> str:
  if len(point.losses) == 1:
    return f'{point.mean:.3f}'
  return f'{point.mean:.3f} ± {statistics.stdev(point.losses):.3f}'


def _logit(point: Point) -> str:
  """Returns the largest logit of all seeds."""
  logit = max(x.logit for x in point.fresh if x.logit is not None)
  return f'{logit:,.0f}' if logit < 1e6 else f'{logit:.0e}'


def _chosen(point: Point) -> str:
  settings = point.labels['chosen']
  rate = f'rate={point.rate:g}'
  return f'{rate}, {settings}' if '=' in settings else rate


def _share(point: Point) -> str:
  return f'{max(x.clipped or 0.0 for x in point.fresh):.1%}'


_CELLS: dict[str, Callable[[Point], str]] = {
  'loss': _loss,
  'rate': lambda x: f'{x.rate:g}',
  'tuned': lambda x: f'{x.mean:.3f} ({x.rate:g})',
  'chosen': _chosen,
  'logit': _logit,
  'loss and logit': lambda x: f'{x.mean:.3f} ({_logit(x)})',
  'loss and share': lambda x: f'{x.mean:.3f} ({_share(x)})',
}


def cost(point: Point, points: Points) -> float:
  """Returns the loss minus that of the same optimizer at the best rate."""
  name = point.labels['optimizer']
  (best,) = select(points, optimizer=name, factor=1.0)
  return point.mean - best.mean


def _costs(points: Points) -> Rows:
  wrong = [x for x in points if x.labels['factor'] != 1]
  return _pivot(
    wrong, ['optimizer'], 'factor', lambda x: f'{cost(x, points):+z.3f}'
  )


def _steps(points: Points) -> Rows:
  """Returns the steps that end at the target, of each seed and their mean."""
  rows = []
  for name in values(points, 'optimizer'):
    row = {'optimizer': name}
    for batch in values(points, 'batch'):
      lengths_tried = select(points, optimizer=name, batch=batch)
      steps = lengths.steps_by_seed(lengths_tried)
      each = ', '.join(f'{x:,.0f}' for x in steps)
      header = _header(lengths_tried[0], 'batch')
      row[header] = f'{statistics.mean(steps):,.0f} ({each})'
    rows.append(row)
  return rows


def _tokens(points: Points) -> Rows:
  """Returns Muon's tokens over those of Hyperball for the same loss."""
  muon, hyperball = (
    select(points, optimizer=f'{x}, rest tuned') for x in ('Muon', 'Hyperball')
  )
  steps_for = lengths.steps_by_loss(hyperball)
  row = {'': 'Muon, rest tuned over Hyperball, rest tuned'}
  for first, second in zip(muon, hyperball, strict=True):
    own = first.fresh[0].steps
    mean, low, high = (
      own / steps_for(second.mean + x) for x in interval(first, second)
    )
    row[first.labels['tokens']] = f'{mean:.2f} [{low:.2f}, {high:.2f}]'
  return [row]


_WHOLE: dict[str, Callable[[Points], Rows]] = {
  'costs': _costs,
  'steps': _steps,
  'tokens': _tokens,
}
"""Tables that are not one cell for each point."""


def tuning_trials(spec: dict[str, Any], found: dict[str, Points]) -> Rows:
  """Returns how many trials chose the settings of each row of a table.

  Args:
    spec: ``'rows'`` has by row the rows whose settings it began with, and
      ``'experiments'`` where these were tuned.
    found: Points by experiment.
  """
  points = [x for name in spec['experiments'] for x in found[name]]
  rows = []
  for name, begun in spec['rows'].items():
    row = {'optimizer': name}
    for shown in select(without_tried(found['relatives']), optimizer=name):
      batch = shown.labels['batch']
      own = [
        x
        for y in (name, *begun)
        for x in select(points, optimizer=y, batch=batch)
      ]
      keys = {trial.key for x in own for trial in x.tuning}
      row[_header(shown, 'batch')] = str(len(keys))
    rows.append(row)
  return rows


def markdown(rows: Rows) -> str:
  """Returns a table of rows that have the first one's keys."""
  head, *lines = [' | '.join(x) for x in (rows[0], *(y.values() for y in rows))]
  ruler = '---|' * len(rows[0])
  return '\n'.join([f'| {head} |', f'|{ruler}', *(f'| {x} |' for x in lines)])
