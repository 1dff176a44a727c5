"""Numbers as text, and figures, that all sections of the report share."""

from collections.abc import Iterable
import math
from typing import Any

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator, NullLocator  # noqa: E402

from examples.study.points import Point  # noqa: E402
from examples.study.tuning import Tuned  # noqa: E402

COLORS = {
  'AdamW': 'tab:blue',
  'LAMB': 'tab:orange',
  'MERIT': 'tab:green',
  'Muon': 'tab:red',
  'AdamW, QK-norm': 'tab:cyan',
}


def markdown(rows: list[dict[str, str]]) -> str:
  """Returns a table of rows that have the first one's keys."""
  lines = [list(rows[0]), ['---'] * len(rows[0])]
  lines += [list(row.values()) for row in rows]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def format_loss(loss: float) -> str:
  """Returns a loss as text."""
  if not math.isfinite(loss):
    return 'diverged'
  return f'{loss:.3f}' if loss < 100 else f'{loss:.0e}'


def format_losses(losses: dict[float, float]) -> str:
  """Returns losses as text, each after what it is the loss at."""
  return ', '.join(
    f'{x:g}: {format_loss(y)}' for x, y in sorted(losses.items())
  )


def format_logit(logit: float | None) -> str:
  """Returns an attention logit as text."""
  if logit is None or not math.isfinite(logit):
    return 'not finite'
  return f'{logit:,.0f}' if logit < 1e6 else f'{logit:.0e}'


def format_logits(logits: list[Any]) -> str:
  """Returns attention logits as text."""
  return ', '.join(map(format_logit, logits))


def format_point(point: Point) -> str:
  """Returns mean and standard deviation of a point, as far as there are."""
  if not math.isfinite(point.mean):
    failed = sum(not math.isfinite(loss) for loss in point.losses)
    return f'{failed} of {len(point.losses)} diverged'
  if math.isnan(point.std):
    return f'{point.mean:.3f} (one seed)'
  return f'{point.mean:.3f} ± {point.std:.3f}'


def format_learning_rate(tuned: Tuned) -> str:
  """Returns the best learning rate, marked if it is at the edge."""
  return f'{tuned.learning_rate:g}' + (' (edge)' if tuned.is_at_edge else '')


def panels(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
  """Returns a figure and its axes, shape (rows, columns)."""
  return plt.subplots(
    rows,
    columns,
    figsize=(0.6 + 3.4 * columns, 0.8 + 2.4 * rows),
    squeeze=False,
    layout='constrained',
    **options,
  )


def draw_tuning(axes: Any, tuned: Tuned, label: str, **options: Any) -> None:
  """Draws the loss over the learning rate, without runs that diverged."""
  finite = {x: y for x, y in tuned.losses.items() if math.isfinite(y)}
  axes.plot(finite.keys(), finite.values(), 'o-', ms=3, label=label, **options)
  axes.set_xscale('log')
  label_decades(axes.xaxis)
  axes.set_xlabel('learning rate')
  axes.set_ylabel('validation loss')


def label_decades(axis: Any) -> None:
  """Labels 1, 2 and 5 of each power of ten on a logarithmic axis."""
  axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axis.set_major_formatter('{x:g}')
  axis.set_minor_locator(NullLocator())


def limit_losses(axes: Any, tunings: Iterable[Tuned]) -> None:
  """Cuts the axis of losses a little above the best ones."""
  losses = [loss for tuned in tunings for loss in tuned.losses.values()]
  finite = sorted(filter(math.isfinite, losses))
  if finite:
    span = finite[len(finite) // 2] - finite[0] + 0.05
    axes.set_ylim(finite[0] - 0.1 * span, finite[0] + 3 * span)
