"""MERIT's best learning rate against width, batch size and number of steps."""

from typing import Any

from matplotlib.figure import Figure

from examples.study.plans import Plan, together
from examples.study.render import (
  draw_tuning,
  limit_losses,
  markdown,
  panels,
  shown,
  shown_rate,
)
from examples.study.scales import DECAY, Scale
from examples.study.tuning import Tuned, tune

TITLE = 'Learning rate of MERIT'
TOKEN_SHARES = (0.5, 1.0, 2.0)
"""Lengths of training over that of the scale."""

Outcome = dict[str, dict[float, Tuned]]
"""Losses by what is varied, and its value."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune MERIT along each axis, around a middle batch size."""
  middle = scale.batch_sizes[-2]
  axes: dict[str, dict[float, Any]] = {
    'width': {x: _tune(scale, middle, width=x) for x in scale.widths},
    'batch size': {x: _tune(scale, x) for x in scale.batch_sizes},
    'training length': {
      x: _tune(scale, middle, token_share=x) for x in TOKEN_SHARES
    },
  }
  plans = [plan for axis in axes.values() for plan in axis.values()]
  tuned = iter((yield from together(*plans)))
  return {name: {x: next(tuned) for x in axis} for name, axis in axes.items()}


def _tune(scale: Scale, batch_size: int, **changes: Any) -> Plan[Tuned]:
  is_varied = bool(changes)
  return tune(
    lambda rate: scale.run('merit', batch_size, rate, **changes),
    scale.rates['merit'],
    max(3, scale.budget - 2) if is_varied else scale.budget,
  )


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns tables of losses by learning rate."""
  parts = [
    f'MERIT, weight decay {DECAY:g}, one seed. Batch {scale.batch_sizes[-2]}, '
    'where the batch is not varied.'
  ]
  for name, axis in outcome.items():
    rows = [
      {
        name: f'{x:g}',
        'best rate': shown_rate(tuned),
        'loss': shown(tuned.losses[tuned.rate]),
        'by learning rate': ', '.join(
          f'{rate:g}: {shown(loss)}' for rate, loss in tuned.losses.items()
        ),
      }
      for x, tuned in axis.items()
    ]
    parts.append(markdown(rows))
  return '\n\n'.join(parts)


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over learning rate along each axis."""
  del scale
  result, (row,) = panels(1, len(outcome))
  for (name, axis), axes in zip(outcome.items(), row, strict=True):
    for x, tuned in axis.items():
      draw_tuning(axes, tuned, f'{x:g}')
    limit_losses(axes, [y for x in axis.values() for y in x.losses.values()])
    axes.set_title(name)
    axes.legend()
  return result
