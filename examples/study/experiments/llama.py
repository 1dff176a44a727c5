"""Whether the order of the optimizers holds with Llama's architecture."""

from matplotlib.figure import Figure

from examples.study.analysis import figures
from examples.study.analysis.tables import (
  Tables,
  compare,
  loss_and_rate,
  pivot,
  select,
  tuned_loss_and_rate,
)
from examples.study.optimizers import COMPARED, PAIRS, Optimizer
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.points import find_rate, judge
from examples.study.tuning.stages import initial_weights

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
  batch_size = scale.batch_sizes[-1]
  gpt2 = yield from initial_weights(scale, optimizer, batch_size)
  tunings = yield from gather(
    {
      size: find_rate(
        scale,
        gpt2.best,
        batch_size,
        start=gpt2.point.tuned.learning_rate,
        stride=1,
        architecture='llama',
        init_scale=size,
      )
      for size in _SIZES
    }
  )
  size = min(tunings, key=lambda x: tunings[x].loss)
  llama = yield from judge(
    scale,
    gpt2.best,
    batch_size,
    tunings[size],
    scale.seeds_at(batch_size),
    architecture='llama',
    init_scale=size,
  )
  own_size = gpt2.best.settings.get('init_scale', 1.0)
  best = [
    gpt2.point.labelled(model='GPT-2', size=own_size, role='best'),
    llama.labelled(model='Llama', size=size, role='best'),
  ]
  return best + [
    Point({**llama.labels, 'size': size, 'role': 'tried'}, tuned)
    for size, tuned in tunings.items()
  ]


def tables(points: list[Point]) -> Tables:
  """Returns the losses, and which differences both architectures show."""
  best = select(points, role='best')
  names = [(x.name, y.name) for x, y in PAIRS]
  return {
    'losses': pivot(best, ['optimizer'], 'model'),
    'learning rates': pivot(best, ['optimizer'], 'model', {'': loss_and_rate}),
    'initial weights': pivot(
      best, ['optimizer'], 'model', {'': lambda x: f'{x["size"]:g} ×'}
    ),
    **compare(best, names, 'model'),
    'tried with the Llama': pivot(
      select(points, role='tried'),
      ['optimizer'],
      'size',
      {'': tuned_loss_and_rate},
    ),
  }


def figure(points: list[Point]) -> Figure:
  """Draws the tunings, a panel for each architecture."""
  best = select(points, role='best')
  return figures.tunings(
    {model: select(best, model=model) for model in ('GPT-2', 'Llama')}
  )
