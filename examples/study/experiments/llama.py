"""Whether the order of the optimizers holds with Llama's architecture."""

from typing import NamedTuple

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import CONTENDERS, Contender
from examples.study.differences import leaders
from examples.study.experiments import batch_scaling, tuned_initialization
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_rate, judge
from examples.study.scales import Scale
from examples.study.tuning import Tuned

TITLE = 'Llama'
GPT2, LLAMA = 'GPT-2', 'Llama'
_SIZES = (1.0, 2.0)
"""Deviations of Llama's initial weights, over that in proportion to width."""


class Outcome(NamedTuple):
  """What came out at the largest batch.

  Attributes:
    points: Points by architecture and contender.
    sizes: Sizes of the initial weights that were chosen, likewise.
    tunings: Losses of Llama by learning rate, by contender and size.
  """

  points: dict[tuple[str, str], Point]
  sizes: dict[tuple[str, str], float]
  tunings: dict[tuple[str, float], Tuned]


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose Llama's rates and sizes, from the rates of GPT-2."""
  found = yield from gather({x.name: _plan_pair(scale, x) for x in CONTENDERS})
  outcome = Outcome({}, {}, {})
  for pair in found.values():
    for merged, part in zip(outcome, pair, strict=True):
      merged.update(part)
  return outcome


def _plan_pair(scale: Scale, contender: Contender) -> Plan[Outcome]:
  """Plans what comes out of a contender."""
  batch_size = scale.batch_sizes[-1]
  gpt2 = yield from tuned_initialization.plan_best(scale, contender, batch_size)
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
  point = yield from judge(
    scale,
    gpt2.best,
    batch_size,
    tunings[size],
    scale.seeds_at(batch_size),
    architecture='llama',
    init_scale=size,
  )
  name = contender.name
  return Outcome(
    {(GPT2, name): gpt2.point, (LLAMA, name): point},
    {(GPT2, name): gpt2.best.init_scale, (LLAMA, name): size},
    {(name, size): tuned for size, tuned in tunings.items()},
  )


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, and which differences both architectures show."""
  rows = [
    {'optimizer': x.name}
    | {
      name: render.format_with_rate(outcome.points[name, x.name])
      for name in (GPT2, LLAMA)
    }
    | {
      f'{name}’s initial weights': f'{outcome.sizes[name, x.name]:g} ×'
      for name in (GPT2, LLAMA)
    }
    | {
      f'Llama at {size:g} ×, tuning': render.format_loss(
        outcome.tunings[x.name, size].loss
      )
      for size in _SIZES
    }
    for x in CONTENDERS
  ]
  config = scale.run(
    'adamw', scale.batch_sizes[-1], 1.0, architecture='llama'
  ).config
  return '\n\n'.join(
    [
      f'Batch {config.batch_size}. RMSNorm, rotary positions, SwiGLU with '
      f'{config.mlp_width} hidden features, no biases; layers, width, '
      'vocabulary and tied head are those of the GPT-2; a layer has about '
      'as many parameters. Warm-up and b1 are those that suit an optimizer '
      'best with GPT-2 at this batch. Learning rate and standard deviation of '
      'the initial weights, over that in proportion to the width, are chosen '
      'for each architecture. Mean and standard deviation over seeds, and the '
      'learning rate; at the right, the mean of the two seeds that chose '
      'Llama’s deviation:',
      render.markdown(rows),
      *(
        f'{architecture}: {_compare(outcome, architecture)}'
        for architecture in (GPT2, LLAMA)
      ),
      _advice(outcome),
    ]
  )


def _compare(outcome: Outcome, architecture: str) -> str:
  """Returns whether each optimizer differs from the next best one."""
  points = [outcome.points[architecture, x.name] for x in CONTENDERS]
  return batch_scaling.in_order(points)


def _advice(outcome: Outcome) -> str:
  """Returns whether what is best for GPT-2 is best for a Llama too."""
  best = {
    architecture: [
      x.name
      for x in leaders(
        [outcome.points[architecture, y.name] for y in CONTENDERS]
      )
    ]
    for architecture in (GPT2, LLAMA)
  }
  if not all(best.values()):
    return 'Of what carries over nothing is known: with each a seed diverged.'
  text = 'Lowest loss, and all that are not detectably higher: '
  text += '; '.join(f'{x} {", ".join(names)}' for x, names in best.items())
  lost = [x for x in best[GPT2] if x not in best[LLAMA]]
  if lost:
    return f'{text}. Choose the optimizer again for a Llama.'
  return (
    f'{text}. What is best for {GPT2} is best for this {LLAMA} too; choose '
    'learning rate and initial weights again.'
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the tunings, a panel for each architecture."""
  del scale
  return render.draw_tunings(
    {
      architecture: {
        x.name: outcome.points[architecture, x.name].tuned for x in CONTENDERS
      }
      for architecture in (GPT2, LLAMA)
    },
    sharey=False,
  )
