"""The best learning rate against width, batch size and number of steps."""

from typing import Any

from matplotlib.figure import Figure

from examples.study.analysis import tables as t
from examples.study.analysis.lengths import fit_power
from examples.study.optimizers import COMPARED, MERIT, WITH_RATIOS, Optimizer
from examples.study.points import Point, Tuned
from examples.study.render import COLORS, label_decades, panels
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, find_rates, gather, gather_lists

TITLE = 'Learning rates'
TEXT = """\
The rates chosen of a grid by √2, by the number of steps, whether the batch sets
it (varied: batch) or half and twice the tokens at one batch (varied: length),
and the line through their logarithms. Widths and lengths are varied at one
batch; weights start in proportion to each width."""
_WIDENED = (MERIT, WITH_RATIOS)
"""Optimizers whose rates are chosen for other widths as well."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to choose rates along each axis."""
  return gather_lists({x.name: _plan_axes(scale, x) for x in COMPARED})


def _plan_axes(scale: Scale, optimizer: Optimizer) -> Plan[list[Point]]:
  batches = yield from find_rates(scale, optimizer)
  case = Case(scale, optimizer, scale.middle_batch)
  usual = batches[case.batch_size]
  plans: dict[str, Plan[dict[Any, Tuned]]] = {
    'length': case.find_length_rates(usual),
    'width': _find_width_rates(case, usual),
  }
  found = yield from gather(plans)
  return [
    Point(
      {
        'optimizer': optimizer.name,
        'varied': axis,
        'value': value,
        'steps': tuned.results[0].steps,
      },
      tuned,
    )
    for axis, tunings in {'batch': batches, **found}.items()
    for value, tuned in tunings.items()
  ]


def _find_width_rates(case: Case, tuned: Tuned) -> Plan[dict[int, Tuned]]:
  """Plans to choose rates for other widths, from the one of the scale."""
  if case.optimizer not in _WIDENED:
    return {}
  own = case.trial(1.0, seed=0).config.width
  found = yield from gather(
    {
      x: case.with_settings(width=x).find_rate(tuned.learning_rate)
      for x in case.scale.widths
      if x != own
    }
  )
  return dict(sorted((found | {own: tuned}).items()))


def tables(points: list[Point]) -> t.Tables:
  """Returns the rates by steps, widths and lengths."""
  rates = {'': lambda x: f'{x.tuned.learning_rate:g}'}
  cells = {
    'learning rate': t.rate,
    'loss': lambda x: t.format_loss(x.tuned.loss),
    'by learning rate': t.by_rate,
  }
  by_axis = {x: t.select(points, varied=x) for x in ('width', 'length')}
  return {
    'rates by steps': t.pivot(
      _by_steps(points), ['optimizer', 'varied'], 'steps', rates
    ),
    'lines': [
      {'optimizer': name, 'learning rate': _line(points, name)}
      for name in t.values(points, 'optimizer')
    ],
    **{
      f'{axis}s': t.pivot(found, ['optimizer', 'value'], cells=cells)
      for axis, found in by_axis.items()
    },
  }


def _by_steps(points: list[Point]) -> list[Point]:
  found = [x for x in points if x['varied'] != 'width']
  return sorted(found, key=lambda x: x['steps'])


def _fit(points: list[Point], name: str) -> tuple[float, float]:
  own = t.select(_by_steps(points), optimizer=name)
  return fit_power((x['steps'], x.tuned.learning_rate) for x in own)


def _line(points: list[Point], name: str) -> str:
  at_1000, power = _fit(points, name)
  return f'{at_1000:.2g} × (steps / 1000)^{power:.2f}'


def figure(points: list[Point]) -> Figure:
  """Draws rates by steps, and the lines through their logarithms."""
  result, ((axes,),) = panels(1, 1)
  result.set_size_inches(6, 3.5)
  for name in t.values(points, 'optimizer'):
    own = t.select(_by_steps(points), optimizer=name)
    steps = [x['steps'] for x in own]
    rates = [x.tuned.learning_rate for x in own]
    at_1000, power = _fit(points, name)
    line = [at_1000 * (x / 1000) ** power for x in steps]
    axes.loglog(steps, rates, 'o', color=COLORS[name], label=name)
    axes.loglog(steps, line, color=COLORS[name], lw=0.8)
  for axis in (axes.xaxis, axes.yaxis):
    label_decades(axis)
  axes.set_xlabel('steps')
  axes.set_ylabel('learning rate')
  axes.legend(fontsize=7)
  return result
