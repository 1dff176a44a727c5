"""MERIT's best learning rate against width, batch size and number of steps."""

from typing import Any

from examples.study.plans import Plan, together
from examples.study.scales import Scale
from examples.study.tuning import Tuned, tune

TOKEN_SHARES = (0.5, 1.0, 2.0)
"""Lengths of training over that of the scale."""


def plan(scale: Scale) -> Plan[dict[str, dict[float, Tuned]]]:
  """Plans to tune MERIT along each axis, around a middle batch size.

  Returns the losses by what is varied (``'width'``, ``'batch size'``,
  ``'training length'``) and its value.
  """
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
