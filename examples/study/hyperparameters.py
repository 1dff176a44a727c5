"""MERIT's best learning rate against width, batch size and number of steps."""

from typing import Any

from matplotlib.figure import Figure
import numpy as np

from examples.study import render
from examples.study.plans import Plan, gather
from examples.study.scales import DECAY, LEARNING_RATES, Scale
from examples.study.tuning import Tuned, tune

TITLE = 'Learning rate of MERIT'
TOKEN_SHARES = (0.5, 1.0, 2.0)
"""Lengths of training over that of the scale."""

Outcome = dict[str, dict[float, Tuned]]
"""Losses by what is varied, and its value."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune MERIT along each axis, around a middle batch size."""
  middle = scale.batch_sizes[-2]
  axes = {
    'width': {x: _tune(scale, middle, width=x) for x in scale.widths},
    'batch size': {x: _tune(scale, x) for x in scale.batch_sizes},
    'training length': {
      x: _tune(scale, middle, token_share=x) for x in TOKEN_SHARES
    },
  }
  return gather({name: gather(x) for name, x in axes.items()})


def _tune(scale: Scale, batch_size: int, **changes: Any) -> Plan[Tuned]:
  is_varied = bool(changes)
  return tune(
    lambda rate: scale.run('merit', batch_size, rate, **changes),
    LEARNING_RATES['merit'],
    max(3, scale.budget - 2) if is_varied else scale.budget,
  )


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns tables of losses by learning rate."""
  at_1000, power = fit_learning_rate(outcome, scale)
  best = ', '.join(
    f'{steps:g}: {tuned.learning_rate:g}'
    for steps, tuned in by_steps(outcome, scale)
  )
  parts = [
    f'MERIT, weight decay {DECAY:g}, one seed. Batch {scale.batch_sizes[-2]}, '
    'where the batch is not varied.',
    'Best learning rate by the number of steps, whether batch or length sets '
    f'it: {best}. The line through their logarithms is {at_1000:.2g} × '
    f'(steps / 1000)^{power:.2f}.',
  ]
  for name, axis in outcome.items():
    rows = [
      {
        name: f'{x:g}',
        'best learning rate': render.format_learning_rate(tuned),
        'loss': render.format_loss(tuned.loss),
        'by learning rate': render.format_losses(tuned.losses),
      }
      for x, tuned in axis.items()
    ]
    parts.append(render.markdown(rows))
  return '\n\n'.join(parts)


def by_steps(outcome: Outcome, scale: Scale) -> list[tuple[int, Tuned]]:
  """Returns the tunings of batch sizes and lengths by their steps."""
  middle = scale.batch_sizes[-2]
  batches = [(x, 1.0, tuned) for x, tuned in outcome['batch size'].items()]
  lengths = [
    (middle, share, tuned)
    for share, tuned in outcome['training length'].items()
  ]
  steps = [
    (scale.run('merit', int(size), 1.0, token_share=share).config.steps, tuned)
    for size, share, tuned in batches + lengths
  ]
  return sorted(steps, key=lambda pair: pair[0])


def fit_learning_rate(outcome: Outcome, scale: Scale) -> tuple[float, float]:
  """Fits the best learning rate as a power of the number of steps.

  Returns:
    That at 1000 steps, and the exponent.
  """
  steps, tuned = zip(*by_steps(outcome, scale), strict=True)
  power, offset = np.polyfit(
    np.log(np.array(steps) / 1000), np.log([x.learning_rate for x in tuned]), 1
  )
  return float(np.exp(offset)), float(power)


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over learning rate along each axis, and the best by steps."""
  result, (row,) = render.panels(1, len(outcome) + 1)
  _draw_fit(row[-1], outcome, scale)
  for (name, axis), axes in zip(outcome.items(), row[:-1], strict=True):
    for x, tuned in axis.items():
      render.draw_tuning(axes, tuned, f'{x:g}')
    render.limit_losses(axes, axis.values())
    axes.set_title(name)
    axes.legend()
  return result


def _draw_fit(axes: Any, outcome: Outcome, scale: Scale) -> None:
  steps, tuned = zip(*by_steps(outcome, scale), strict=True)
  rates = [x.learning_rate for x in tuned]
  at_1000, power = fit_learning_rate(outcome, scale)
  axes.loglog(steps, rates, 'o', color=render.COLORS['MERIT'])
  axes.loglog(
    steps,
    at_1000 * (np.array(steps) / 1000) ** power,
    '--',
    color='0.5',
    label=f'{at_1000:.2g} × (steps / 1000)^{power:.2f}',
  )
  for axis in (axes.xaxis, axes.yaxis):
    render.label_decades(axis)
  axes.set_xlabel('steps')
  axes.set_ylabel('best learning rate')
  axes.set_title('batch and length')
  axes.legend()
