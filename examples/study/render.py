"""Numbers as text, and figures, that all sections of the report share."""

from collections.abc import Iterable, Mapping
import math
from typing import Any

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator, NullLocator  # noqa: E402

from examples.study.contenders import WITH_SIMPLER  # noqa: E402
from examples.study.differences import Difference  # noqa: E402
from examples.study.points import Point  # noqa: E402
from examples.study.tuning import Tuned  # noqa: E402

COLORS = dict(
  zip(
    (x.name for x in WITH_SIMPLER),
    ('tab:blue', 'tab:orange', 'tab:green', 'tab:red', 'tab:purple', 'hotpink'),
    strict=True,
  )
)
"""Colors by contender."""


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


def format_point(point: Point) -> str:
  """Returns mean and standard deviation of a point, as far as there are."""
  if not math.isfinite(point.mean):
    failed = sum(not math.isfinite(loss) for loss in point.losses)
    return f'{failed} of {len(point.losses)} diverged'
  if math.isnan(point.std):
    return f'{point.mean:.3f} (one seed)'
  form = '.3f' if point.mean >= 0.01 else '.4f'
  return f'{point.mean:{form}} ± {point.std:{form}}'


def format_with_rate(point: Point) -> str:
  """Returns the losses of a point as text, and the learning rate."""
  return f'{format_point(point)} ({format_learning_rate(point.tuned)})'


def format_learning_rate(tuned: Tuned) -> str:
  """Returns the learning rate chosen, marked if it is at the edge.

  A better one that was not chosen since it is before a cliff is named.
  """
  text = f'{tuned.learning_rate:g}' + (' (edge)' if tuned.is_at_edge else '')
  if tuned.before_cliff is None:
    return text
  return f'{text}; {tuned.before_cliff:g} is before a cliff'


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


def draw_tunings(
  panel_tunings: Mapping[str, Mapping[str, Tuned]], *, sharey: bool = True
) -> Figure:
  """Returns a figure of losses over learning rates.

  Args:
    panel_tunings: Tunings of contenders by the title of a panel, and by name.
    sharey: Whether the panels have the same axis of losses.
  """
  result, (row,) = panels(1, len(panel_tunings), sharey=sharey)
  for (title, tunings), axes in zip(panel_tunings.items(), row, strict=True):
    for name, tuned in tunings.items():
      draw_tuning(axes, tuned, name, color=COLORS[name])
    axes.set_title(title)
  for axes, tunings in zip(row, panel_tunings.values(), strict=True):
    shown = panel_tunings.values() if sharey else [tunings]
    limit_losses(axes, [tuned for x in shown for tuned in x.values()])
  legend_below(result, row[0])
  return result


def legend_below(figure: Figure, axes: Any) -> None:
  """Puts the labels of one panel below all of them, where no line is."""
  handles, labels = axes.get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside lower center', ncols=len(labels))


def draw_differences(
  differences: Mapping[str, Difference], baseline: str, **options: Any
) -> Figure:
  """Returns a figure of bars with intervals; those that diverged have none.

  Args:
    differences: From the baseline, by name.
    baseline: Its name.
    **options: Of the bars.
  """
  result, ((axes,),) = panels(1, 1)
  result.set_size_inches(8, 0.8 + 0.3 * len(differences))
  found = [
    x if math.isfinite(x.mean) else Difference(*[math.nan] * 4)
    for x in differences.values()
  ]
  axes.barh(list(differences), [x.mean for x in found], alpha=0.7, **options)
  axes.errorbar(
    [x.mean for x in found],
    list(differences),
    xerr=[x.high - x.mean for x in found],
    fmt='none',
    capsize=3,
    color='black',
  )
  axes.invert_yaxis()
  axes.axvline(0, color='0.5', lw=1)
  axes.set_xlabel(
    f'validation loss over that of {baseline}, with 95 % intervals'
  )
  return result
