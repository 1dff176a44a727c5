"""Whether the order of the optimizers holds with Llama's architecture."""

from examples.study.analysis import tables as t
from examples.study.optimizers import COMPARED, Optimizer
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import (
  Case,
  Plan,
  best,
  gather,
  gather_lists,
  initial_weights,
)
from examples.study.tuning.coordinates import Variant

TITLE = 'Llama'
TEXT = """\
The largest batch. RMSNorm, rotary positions, SwiGLU, no biases; layers, width,
vocabulary and tied head are those of the GPT-2; a layer has about as many
parameters. Warm-up and b1 are those that suit an optimizer best with GPT-2 at
this batch. Learning rate and standard deviation of the initial weights (over
that in proportion to the width 1, 2 or 4 × with GPT-2, 1 or 2 × with the Llama)
are chosen for each architecture, those of the Llama by the mean of two
seeds."""
_SIZES = (1.0, 2.0)
"""Deviations of Llama's initial weights, over that in proportion to width."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to choose Llama's rates and sizes, from the rates of GPT-2."""
  return gather_lists({x.name: _plan_pair(scale, x) for x in COMPARED})


def _plan_pair(scale: Scale, optimizer: Optimizer) -> Plan[list[Point]]:
  """Plans the points of an optimizer with both architectures."""
  usual = Case(scale, optimizer, scale.batch_sizes[-1])
  _, gpt2 = best((yield from initial_weights(usual)))
  cases = {
    x: gpt2.case.with_settings(architecture='llama', init_scale=x)
    for x in _SIZES
  }
  start = gpt2.tuned.learning_rate
  tunings = yield from gather({x: y.find_rate(start) for x, y in cases.items()})
  tried = {x: Variant(cases[x], y) for x, y in tunings.items()}
  size, llama = best(tried)
  points = yield from gather(
    {'GPT-2': gpt2.evaluate(), 'Llama': llama.evaluate()}
  )
  own_size = gpt2.case.optimizer.settings.get('init_scale', 1.0)
  labels = usual.labels | {'model': 'Llama', 'role': 'tried'}
  return [
    points['GPT-2'].labelled(model='GPT-2', size=own_size, role='best'),
    points['Llama'].labelled(model='Llama', size=size, role='best'),
    *(Point(labels | {'size': x}, y.tuned) for x, y in tried.items()),
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
