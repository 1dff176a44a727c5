"""Tables of closed experiments, made of stored cells and trials.

Each experiment is a file of JSON lines. The first has its title, and what was
run. Each other one is a cell of a table: the row and the column, the statistic,
and the keys of the trials that it is computed from.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import math
from pathlib import Path
import statistics
from typing import Any, TypeAlias

from examples.study.analysis.intervals import Difference, contrast
from examples.study.analysis.tables import (
  Tables,
  format_detectable,
  format_loss,
  format_number,
  format_sample,
)

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob('*.jsonl'))
"""The closed experiments, by the names that their commands had."""

Records: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Stored trials by their keys."""


def read(name: str, records: Records) -> tuple[str, str, Tables]:
  """Returns title and text of a closed experiment, and its tables."""
  lines = (FOLDER / f'{name}.jsonl').read_text().splitlines()
  head, *cells = map(json.loads, lines)
  found: dict[str, dict[str, dict[str, str]]] = {}
  for cell in cells:
    table = found.setdefault(cell['table'], {})
    row = table.setdefault(json.dumps(cell['row']), dict(cell['row']))
    row[cell['column']] = cell['form'].format(_compute(cell, records))
  tables = {
    name: _filled(list(table.values())) for name, table in found.items()
  }
  return head['title'], head['text'], tables


def _filled(rows: list[dict[str, str]]) -> list[dict[str, str]]:
  """Returns the rows with all columns, empty where they have none."""
  columns = dict.fromkeys(column for row in rows for column in row)
  return [{x: row.get(x, '') for x in columns} for row in rows]


def _compute(cell: Mapping[str, Any], records: Records) -> str:
  """Returns the text of a statistic, empty if the cell has none."""
  if 'statistic' not in cell:
    return ''
  samples = {
    sign: [
      [_value(records[x], cell['of']) for x in keys] for keys in cell[sign]
    ]
    for sign in ('plus', 'minus')
  }
  return STATISTICS[cell['statistic']](samples['plus'], samples['minus'])


def _value(record: Mapping[str, Any], of: Sequence[Sequence[str]]) -> Any:
  """Returns what a trial found, or a product of such numbers.

  ``of`` has the names on the way to each; of a list, the last value is taken.
  """
  factors = []
  for path in of:
    value: Any = record
    for name in path:
      value = value[name]
    factors.append(value[-1] if isinstance(value, list) else value)
  return factors[0] if len(factors) == 1 else math.prod(factors)


_Samples: TypeAlias = list[list[Any]]


def _paired(plus: _Samples, minus: _Samples) -> Difference:
  (first,), (second,) = plus, minus
  pairs = zip(first, second, strict=True)
  return contrast([[one - other for one, other in pairs]], [])


def _factor(plus: _Samples, minus: _Samples) -> str:
  """Returns the factor between two samples, by their logarithms."""
  logarithms = [[[math.log(x) for x in y] for y in z] for z in (plus, minus)]
  mean, low, high, detectable = map(math.exp, contrast(*logarithms))
  text = f'{mean:.3g} × [{low:.3g}, {high:.3g}]'
  if low <= 1 <= high:
    text += f', {detectable:.3g} × detectable'
  return text


def _rows(group: str, plus: _Samples) -> str:
  """Returns what became of a group of rows, as medians over seeds."""
  (measured,) = plus
  rows = [x[group] for x in measured]
  growths = zip(*(x['growth'] for x in rows), strict=True)
  low, middle, high = map(statistics.median, growths)
  over = statistics.median(
    x[group]['norm'] / x['common']['norm'] for x in measured
  )
  moved = statistics.median(x['moved'] for x in rows)
  return (
    f'{middle:.3g} [{low:.3g}, {high:.3g}], {over:.3g} of live rows, moved '
    f'{moved:.3g}'
  )


STATISTICS: dict[str, Callable[[_Samples, _Samples], str]] = {
  'mean': lambda plus, _: format_loss(statistics.mean(plus[0])),
  'share': lambda plus, _: f'{statistics.mean(plus[0]):.1%}',
  'losses': lambda plus, _: format_sample(plus[0]),
  'numbers': lambda plus, _: format_sample(plus[0], format_number),
  'difference': lambda *x: str(contrast(*x)),
  'detectable': lambda *x: format_detectable(contrast(*x)),
  'paired': lambda *x: str(_paired(*x)),
  'paired detectable': lambda *x: format_detectable(_paired(*x)),
  'factor': _factor,
  'never rows': lambda plus, _: _rows('never', plus),
  'rare rows': lambda plus, _: _rows('rare', plus),
}
"""Texts of samples, by name. Means of those added and of those subtracted are
compared; pairs, seed by seed."""
