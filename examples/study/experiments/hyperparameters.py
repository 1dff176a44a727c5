"""The best learning rate against width, batch size and number of steps."""

from collections.abc import Mapping

from matplotlib.figure import Figure
import numpy as np

from examples.study import render
from examples.study.contenders import CONTENDERS, KEPT, MERIT, Contender
from examples.study.plans import Plan, gather
from examples.study.points import find_rate, find_rates, scale_rate
from examples.study.scales import Scale
from examples.study.tuning import Tuned

TITLE = 'Learning rates'
TOKEN_SHARES = (0.5, 2.0)
"""Lengths of training over that of the scale."""
_WIDENED = (MERIT, KEPT)
"""Contenders whose rates are chosen for other widths as well."""

Outcome = dict[str, dict[str, dict[float, Tuned]]]
"""Tunings by contender, what is varied, and its value."""
BATCH, WIDTH, LENGTH = 'batch size', 'width', 'training length'


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose rates along each axis."""
  return gather({x.name: _plan_axes(scale, x) for x in CONTENDERS})


def _plan_axes(
  scale: Scale, contender: Contender
) -> Plan[dict[str, dict[float, Tuned]]]:
  batches = yield from find_rates(scale, contender)
  middle = middle_batch(scale)
  tuned, full = batches[middle], scale.num_steps(middle)
  width = scale.run('adamw', middle, 1.0).config.width
  widths = scale.widths if contender in _WIDENED else ()
  axes = {
    WIDTH: {
      x: find_rate(
        scale, contender, middle, start=tuned.learning_rate, stride=1, width=x
      )
      for x in widths
      if x != width
    },
    LENGTH: {
      share: find_rate(
        scale,
        contender,
        middle,
        start=scale_rate(tuned.learning_rate, 1 / share),
        stride=1,
        steps=round(share * full),
      )
      for share in TOKEN_SHARES
    },
  }
  found = yield from gather({name: gather(x) for name, x in axes.items()})
  for name, value in ((WIDTH, width), (LENGTH, 1.0)):
    found[name] = dict(sorted((found[name] | {value: tuned}).items()))
  return {BATCH: batches} | found


def middle_batch(scale: Scale) -> int:
  """Returns the batch at which widths and lengths are varied."""
  return scale.batch_sizes[len(scale.batch_sizes) // 2]


def by_steps(
  axes: Mapping[str, Mapping[float, Tuned]], scale: Scale
) -> list[tuple[int, float]]:
  """Returns the rates of batch sizes and lengths by their steps."""
  batches = [
    (scale.num_steps(int(size)), tuned.learning_rate)
    for size, tuned in axes[BATCH].items()
  ]
  return sorted([*batches, *_by_length(axes, scale)])


def _by_length(
  axes: Mapping[str, Mapping[float, Tuned]], scale: Scale
) -> list[tuple[int, float]]:
  return [
    (scale.num_steps(middle_batch(scale), share), tuned.learning_rate)
    for share, tuned in axes[LENGTH].items()
  ]


def power_of_length(
  axes: Mapping[str, Mapping[float, Tuned]], scale: Scale
) -> float:
  """Returns with which power of the steps the rate moves, at one batch."""
  return fit_rate(_by_length(axes, scale))[1]


def fit_rate(rates: list[tuple[int, float]]) -> tuple[float, float]:
  """Fits rates as a power of the number of steps.

  Args:
    rates: Pairs of steps and learning rate.

  Returns:
    The rate at 1000 steps, and the exponent.
  """
  steps, values = np.array(rates).T
  power, offset = np.polyfit(np.log(steps / 1000), np.log(values), 1)
  return float(np.exp(offset)), float(power)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the rates by steps, widths and lengths."""
  parts = [
    'Rates by the number of steps, whether batch or length sets it, and the '
    'line through their logarithms:',
    render.markdown([_row(outcome, x.name, scale) for x in CONTENDERS]),
    f'Widths and lengths at batch {middle_batch(scale)}; weights start in '
    'proportion to each width.',
  ]
  for name in (WIDTH, LENGTH):
    rows = [
      {
        'optimizer': x.name,
        name: f'{value:g}',
        'learning rate': render.format_learning_rate(tuned),
        'loss': render.format_loss(tuned.loss),
        'by learning rate': render.format_losses(tuned.losses),
      }
      for x in CONTENDERS
      for value, tuned in outcome[x.name][name].items()
      if name != WIDTH or x in _WIDENED
    ]
    parts.append(render.markdown(rows))
  return '\n\n'.join(parts)


def _row(outcome: Outcome, name: str, scale: Scale) -> dict[str, str]:
  rates = by_steps(outcome[name], scale)
  at_1000, power = fit_rate(rates)
  return {
    'optimizer': name,
    'steps: rate': ', '.join(f'{steps}: {rate:g}' for steps, rate in rates),
    'line': f'{at_1000:.2g} × (steps / 1000)^{power:.2f}',
  }


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws rates by steps, and losses by rate for widths and lengths."""
  result, all_axes = render.panels(1, 1 + len(_WIDENED))
  first, *others = all_axes[0]
  for x in CONTENDERS:
    points = by_steps(outcome[x.name], scale)
    steps, rates = np.array(points).T
    color = render.COLORS[x.name]
    first.loglog(steps, rates, 'o', color=color, label=x.name)
    at_1000, power = fit_rate(points)
    first.loglog(steps, at_1000 * (steps / 1000) ** power, color=color, lw=0.8)
  for axis in (first.xaxis, first.yaxis):
    render.label_decades(axis)
  first.set_xlabel('steps')
  first.set_ylabel('learning rate')
  first.set_ylim(top=10 * first.get_ylim()[1])  # Leaves room for the legend.
  first.legend(fontsize=7, loc='upper right')
  for contender, axes in zip(_WIDENED, others, strict=True):
    widths = outcome[contender.name][WIDTH]
    for width, tuned in widths.items():
      render.draw_tuning(axes, tuned, f'width {width:g}')
    render.limit_losses(axes, widths.values())
    axes.set_title(contender.name, fontsize=9)
    axes.legend(fontsize=7)
  return result
