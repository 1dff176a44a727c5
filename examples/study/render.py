"""Tables as Markdown, and what all figures share."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from examples.study.optimizers import ALL

COLORS = dict(
  zip(
    (x.name for x in ALL),
    ('tab:blue', 'tab:orange', 'tab:green', 'tab:red', 'tab:purple', 'hotpink'),
    strict=True,
  )
)
"""Colors by optimizer."""


def markdown(rows: list[dict[str, str]]) -> str:
  """Returns a table of rows that have the first one's keys."""
  lines = [list(rows[0]), ['---'] * len(rows[0])]
  lines += [list(row.values()) for row in rows]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def panels(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
  """Returns a figure and its axes, shape (rows, columns)."""
  size = 0.6 + 3.4 * columns, 0.8 + 2.4 * rows
  figure = Figure(size, layout='constrained')
  return figure, figure.subplots(rows, columns, squeeze=False, **options)


def label_decades(axis: Any) -> None:
  """Labels 1, 2 and 5 of each power of ten on a logarithmic axis."""
  axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axis.set_major_formatter('{x:g}')
  axis.set_minor_locator(NullLocator())
