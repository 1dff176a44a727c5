"""Whether the order of the optimizers holds with Llama's architecture."""

import dataclasses

from examples.study.analysis import tables as t
from examples.study.optimizers import COMPARED, Optimizer
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, gather, initial_weights

TITLE = 'Llama'
TEXT = """\
The largest batch. RMSNorm, rotary positions, SwiGLU, no biases; layers, width,
vocabulary and tied head are those of the GPT-2; a layer has about as many
parameters. Warm-up and b1 are those that suit an optimizer best with GPT-2 at
this batch. Learning rate and standard deviation of the initial weights (1 or
2 × that in proportion to the width) are chosen for each architecture, those of
the Llama by the mean of two seeds."""
_SIZES = (1.0, 2.0)
"""Deviations of Llama's initial weights, over that in proportion to width."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to choose Llama's rates and sizes, from the rates of GPT-2."""
  found = yield from gather({x.name: _plan_pair(scale, x) for x in COMPARED})
  return [point for points in found.values() for point in points]


def _plan_pair(scale: Scale, optimizer: Optimizer) -> Plan[list[Point]]:
  """Plans the points of an optimizer with both architectures."""
  usual = Case(scale, optimizer, scale.batch_sizes[-1])
  gpt2 = yield from initial_weights(usual)
  cases = {
    x: gpt2.best.with_settings(architecture='llama', init_scale=x)
    for x in _SIZES
  }
  start = gpt2.learning_rate
  tunings = yield from gather({x: y.find_rate(start) for x, y in cases.items()})
  size = min(tunings, key=lambda x: tunings[x].loss)
  llama = yield from cases[size].evaluate(tunings[size])
  llama = llama.labelled(model='Llama', size=size, role='best')
  own_size = gpt2.best.optimizer.settings.get('init_scale', 1.0)
  return [
    gpt2.point.labelled(model='GPT-2', size=own_size, role='best'),
    llama,
    *(
      dataclasses.replace(llama, tuned=y, fresh=()).labelled(
        size=x, role='tried'
      )
      for x, y in tunings.items()
    ),
  ]


def tables(points: list[Point]) -> t.Tables:
  """Returns the losses, and which differences both architectures show."""
  best, tried = (t.select(points, role=x) for x in ('best', 'tried'))
  rows = ['optimizer']
  return {
    **t.losses(best, 'model'),
    'learning rates': t.pivot(best, rows, 'model', {'': t.rate}),
    'initial weights': t.pivot(best, rows, 'model', {'': t.label('size')}),
    'tried with the Llama': t.pivot(
      tried, rows, 'size', {'': t.tuned_loss_and_rate}
    ),
  }
