"""The best learning rate against width, batch size and number of steps."""

from matplotlib.figure import Figure

from examples.study.analysis import figures
from examples.study.analysis.lengths import fit_power
from examples.study.analysis.tables import (
  TUNING,
  Rows,
  Tables,
  format_loss,
  pivot,
  select,
  values,
)
from examples.study.optimizers import COMPARED, MERIT, WITH_RATIOS, Optimizer
from examples.study.points import Point, Tuned
from examples.study.render import COLORS, label_decades, panels
from examples.study.scales import Scale
from examples.study.tuning.lengths import find_length_rates, middle_batch
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.points import find_rate, find_rates

TITLE = 'Learning rates'
TEXT = """\
The best rates of a grid by √2, by the number of steps, whether the batch sets
it (varied: batch) or half and twice the tokens at one batch (varied: length),
and the line through their logarithms. Widths and lengths are varied at one
batch; weights start in proportion to each width."""
_WIDENED = (MERIT, WITH_RATIOS)
"""Optimizers whose rates are chosen for other widths as well."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to choose rates along each axis."""
  found = yield from gather({x.name: _plan_axes(scale, x) for x in COMPARED})
  return [point for points in found.values() for point in points]


def _plan_axes(scale: Scale, optimizer: Optimizer) -> Plan[list[Point]]:
  batches = yield from find_rates(scale, optimizer)
  middle = middle_batch(scale)
  own_width = scale.run('adamw', middle, 1.0).config.width
  widths = scale.widths if optimizer in _WIDENED else ()
  found = yield from gather(
    {
      'length': find_length_rates(scale, optimizer, batches[middle]),
      'width': gather(
        {
          x: find_rate(
            scale,
            optimizer,
            middle,
            start=batches[middle].learning_rate,
            stride=1,
            width=x,
          )
          for x in widths
          if x != own_width
        }
      ),
    }
  )
  axes = {'batch': batches} | found
  if widths:
    axes['width'] = {**axes['width'], own_width: batches[middle]}
  return [
    _point(optimizer, axis, value, tuned)
    for axis, tunings in axes.items()
    for value, tuned in sorted(tunings.items())
  ]


def _point(
  optimizer: Optimizer, axis: str, value: float, tuned: Tuned
) -> Point:
  return Point(
    {
      'optimizer': optimizer.name,
      'varied': axis,
      'value': value,
      'steps': tuned.results[0].steps,
    },
    tuned,
  )


def tables(points: list[Point]) -> Tables:
  """Returns the rates by steps, widths and lengths."""
  by_steps = _by_steps(points)
  tuning = {
    'learning rate': TUNING['learning rate'],
    'loss': lambda x: format_loss(x.tuned.loss),
    'by learning rate': TUNING['by learning rate'],
  }
  return {
    'rates by steps': pivot(
      by_steps,
      ['optimizer', 'varied'],
      'steps',
      {'': lambda x: f'{x.tuned.learning_rate:g}'},
    ),
    'lines': _lines(by_steps),
    **{
      f'{axis}s': pivot(
        select(points, varied=axis), ['optimizer', 'value'], cells=tuning
      )
      for axis in ('width', 'length')
    },
  }


def _by_steps(points: list[Point]) -> list[Point]:
  found = [x for x in points if x['varied'] != 'width']
  return sorted(found, key=lambda x: x['steps'])


def _fit(points: list[Point]) -> tuple[float, float]:
  return fit_power((x['steps'], x.tuned.learning_rate) for x in points)


def _lines(points: list[Point]) -> Rows:
  rows = []
  for name in (x.name for x in COMPARED):
    at_1000, power = _fit(select(points, optimizer=name))
    line = f'{at_1000:.2g} × (steps / 1000)^{power:.2f}'
    rows.append({'optimizer': name, 'learning rate': line})
  return rows


def figure(points: list[Point]) -> Figure:
  """Draws rates by steps, and losses by rate for each width."""
  result, ((first, *others),) = panels(1, 1 + len(_WIDENED))
  for name in values(points, 'optimizer'):
    own = select(_by_steps(points), optimizer=name)
    steps = [x['steps'] for x in own]
    rates = [x.tuned.learning_rate for x in own]
    at_1000, power = _fit(own)
    line = [at_1000 * (x / 1000) ** power for x in steps]
    first.loglog(steps, rates, 'o', color=COLORS[name], label=name)
    first.loglog(steps, line, color=COLORS[name], lw=0.8)
  for axis in (first.xaxis, first.yaxis):
    label_decades(axis)
  first.set_xlabel('steps')
  first.set_ylabel('learning rate')
  first.set_ylim(top=10 * first.get_ylim()[1])  # Leaves room for the legend.
  first.legend(fontsize=7, loc='upper right')
  for optimizer, axes in zip(_WIDENED, others, strict=True):
    widths = select(points, optimizer=optimizer.name, varied='width')
    figures.draw_tunings(axes, widths, by='value')
    axes.set_title(f'{optimizer.name}, by width', fontsize=9)
    axes.legend(fontsize=7)
  return result
