"""Whether the order of the optimizers holds with Llama's architecture."""

from typing import NamedTuple

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import CONTENDERS, Contender
from examples.study.differences import leaders
from examples.study.experiments import batch_scaling, sensitivity
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_rate, judge
from examples.study.scales import Scale

TITLE = 'Llama'
GPT2, LLAMA = 'GPT-2', 'Llama'
_SIZES = (1.0, 2.0)
"""Deviations of Llama's first weights, over that in proportion to the width;
those of GPT-2 were chosen by the experiments `initialization` and
`compositions`."""


class Outcome(NamedTuple):
  """What came out at the largest batch.

  Attributes:
    points: Points by architecture and contender.
    sizes: Sizes of Llama's first weights that were chosen, out of _SIZES, by
      contender.
  """

  points: dict[tuple[str, str], Point]
  sizes: dict[str, float]


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose Llama's rates and sizes, from the rates of GPT-2."""
  found = yield from gather({x.name: _plan_pair(scale, x) for x in CONTENDERS})
  points = {
    (architecture, name): point
    for architecture in (GPT2, LLAMA)
    for name, (pair, _) in found.items()
    for point in (pair[architecture],)
  }
  return Outcome(points, {name: size for name, (_, size) in found.items()})


def _plan_pair(
  scale: Scale, contender: Contender
) -> Plan[tuple[dict[str, Point], float]]:
  """Plans both points, and the size of Llama's first weights."""
  batch_size = scale.batch_sizes[-1]
  gpt2 = yield from sensitivity.plan_best(scale, contender, batch_size)
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
    batch_scaling.num_seeds(scale, batch_size),
    architecture='llama',
    init_scale=size,
  )
  return {GPT2: gpt2.point, LLAMA: point}, size


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, and which differences both architectures show."""
  rows = [
    {'optimizer': x.name}
    | {
      name: render.format_with_rate(outcome.points[name, x.name])
      for name in (GPT2, LLAMA)
    }
    | {'Llama’s first weights': f'{outcome.sizes[x.name]:g} ×'}
    for x in CONTENDERS
  ]
  config = scale.run(
    'adamw', scale.batch_sizes[-1], 1.0, architecture='llama'
  ).config
  return '\n\n'.join(
    [
      f'Batch {config.batch_size}. RMSNorm, rotary positions, SwiGLU with '
      f'{config.mlp_width} hidden features, no biases; layers, width, '
      'vocabulary and tied head as they are, so that a layer has about as '
      'many parameters. Warm-up and b1 are those that suit an optimizer best '
      'with GPT-2 at this batch; learning rates are chosen for each '
      'architecture, and so is whether weights start at once or twice their '
      'proportion to the width (GPT-2: at once, or twice where norms are '
      'kept). Mean and standard deviation over seeds, and the learning rate:',
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
  text = 'The lowest loss, and all that may be as good, by what could be seen: '
  text += '; '.join(f'{x} {", ".join(names)}' for x, names in best.items())
  lost = [x for x in best[GPT2] if x not in best[LLAMA]]
  if lost:
    return f'{text}. Choose the optimizer again for a Llama.'
  return f'{text}. What is best for {GPT2} may be taken for a {LLAMA}.'


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
