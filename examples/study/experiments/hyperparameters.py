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
_VARIED = (MERIT, KEPT)
"""Contenders whose rates are chosen for other widths and lengths as well."""

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
  if contender not in _VARIED:
    return {BATCH: batches}
  middle = scale.batch_sizes[len(scale.batch_sizes) // 2]
  start, full = batches[middle].learning_rate, num_steps(scale, middle)
  lengths = {x: round(x * full) for x in TOKEN_SHARES}
  axes = {
    WIDTH: {
      x: find_rate(scale, contender, middle, start=start, spread=1, width=x)
      for x in scale.widths
    },
    LENGTH: {
      share: find_rate(
        scale,
        contender,
        middle,
        start=scale_rate(start, full / steps),
        spread=1,
        steps=steps,
      )
      for share, steps in lengths.items()
    },
  }
  found = yield from gather({name: gather(x) for name, x in axes.items()})
  found[LENGTH][1.0] = batches[middle]
  return {BATCH: batches} | found


def num_steps(scale: Scale, batch_size: int, share: float = 1.0) -> int:
  """Returns the steps of a run on a share of the tokens of the scale."""
  return round(share * scale.run('adamw', batch_size, 1.0).config.steps)


def by_steps(
  axes: Mapping[str, Mapping[float, Tuned]], scale: Scale
) -> list[tuple[int, float]]:
  """Returns the rates of batch sizes and lengths by their steps."""
  middle = scale.batch_sizes[len(scale.batch_sizes) // 2]
  batches = [
    (num_steps(scale, int(size)), tuned.learning_rate)
    for size, tuned in axes[BATCH].items()
  ]
  lengths = [
    (num_steps(scale, middle, share), tuned.learning_rate)
    for share, tuned in axes.get(LENGTH, {}).items()
    if share != 1
  ]
  return sorted(batches + lengths)


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
  """Returns the rates by steps, and what a wrong one costs."""
  parts = [
    'Rates by the number of steps, whether batch or length sets it, and the '
    'line through their logarithms:',
    render.markdown([_row(outcome, x.name, scale) for x in CONTENDERS]),
    f'Loss over the best, at batch {scale.batch_size}, where the rate is wrong '
    'by a factor:',
    render.markdown(
      [
        _cost_row(x.name, outcome[x.name][BATCH][scale.batch_size])
        for x in CONTENDERS
      ]
    ),
  ]
  for contender in _VARIED:
    for name in (WIDTH, LENGTH):
      rows = [
        {
          f'{contender.name}, {name}': f'{x:g}',
          'learning rate': render.format_learning_rate(tuned),
          'loss': render.format_loss(tuned.loss),
          'by learning rate': render.format_losses(tuned.losses),
        }
        for x, tuned in sorted(outcome[contender.name][name].items())
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


_WRONG_BY = (0.25, 0.5, 2.0, 4.0)


def _cost_row(name: str, tuned: Tuned) -> dict[str, str]:
  return {'optimizer': name} | {
    f'{factor:g} ×': _cost(tuned, factor) for factor in _WRONG_BY
  }


def _cost(tuned: Tuned, factor: float) -> str:
  """Returns the excess loss at the rate nearest to a multiple, or ''."""
  wanted = factor * tuned.learning_rate
  rate = min(tuned.losses, key=lambda x: abs(np.log(x / wanted)))
  if abs(np.log(rate / wanted)) > 0.1:
    return ''
  return render.format_loss(tuned.losses[rate] - tuned.loss)


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws rates by steps, and losses by rate for widths and lengths."""
  result, all_axes = render.panels(1, 1 + len(_VARIED))
  first, *others = all_axes[0]
  for x in CONTENDERS:
    steps, rates = zip(*by_steps(outcome[x.name], scale), strict=True)
    first.loglog(steps, rates, 'o-', color=render.COLORS[x.name], label=x.name)
  for axis in (first.xaxis, first.yaxis):
    render.label_decades(axis)
  first.set_xlabel('steps')
  first.set_ylabel('learning rate')
  first.legend(fontsize=7)
  for contender, axes in zip(_VARIED, others, strict=True):
    widths = outcome[contender.name][WIDTH]
    for width, tuned in widths.items():
      render.draw_tuning(axes, tuned, f'width {width:g}')
    render.limit_losses(axes, widths.values())
    axes.set_title(contender.name, fontsize=9)
    axes.legend(fontsize=7)
  return result
