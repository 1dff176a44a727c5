"""Whether the order of the optimizers holds with Llama's architecture."""

import math

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import CONTENDERS, Contender
from examples.study.differences import Difference, difference
from examples.study.experiments import batch_scaling, sensitivity
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_point
from examples.study.scales import Scale

TITLE = 'Llama'
GPT2, LLAMA = 'GPT-2', 'Llama'

Outcome = dict[tuple[str, str], Point]
"""Points by architecture and contender, at the largest batch."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose Llama's rates, from those of GPT-2."""
  found = yield from gather({x.name: _plan_pair(scale, x) for x in CONTENDERS})
  return {
    (architecture, name): point
    for architecture in (GPT2, LLAMA)
    for name, points in found.items()
    for point in (points[architecture],)
  }


def _plan_pair(scale: Scale, contender: Contender) -> Plan[dict[str, Point]]:
  size = scale.batch_sizes[-1]
  gpt2 = yield from sensitivity.plan_best(scale, contender, size)
  point = yield from find_point(
    scale,
    gpt2.best,
    size,
    num_seeds=batch_scaling.num_seeds(scale, size),
    start=gpt2.point.tuned.learning_rate,
    stride=1,
    architecture='llama',
  )
  return {GPT2: gpt2.point, LLAMA: point}


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, and which differences both architectures show."""
  rows = [
    {'optimizer': x.name}
    | {
      name: render.format_with_rate(outcome[name, x.name])
      for name in (GPT2, LLAMA)
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
      'vocabulary and tied head as they are, so that a layer has about as '
      'many parameters. Warm-up and b1 are those that suit an optimizer best '
      'with GPT-2 at this batch; learning rates are chosen for each '
      'architecture, the norms that are kept are those that suit GPT-2. Mean '
      'and standard deviation over seeds, and the learning rate:',
      render.markdown(rows),
      *(
        f'{architecture}: {_compare(outcome, architecture)}'
        for architecture in (GPT2, LLAMA)
      ),
      _order(outcome),
    ]
  )


def _compare(outcome: Outcome, architecture: str) -> str:
  """Returns whether each optimizer differs from the next best one."""
  points = [outcome[architecture, x.name] for x in CONTENDERS]
  return batch_scaling.in_order(points)


def _order(outcome: Outcome) -> str:
  """Returns which pairs of optimizers differ alike, or the other way."""
  means = {x.name: outcome[LLAMA, x.name].mean for x in CONTENDERS}
  finite = {name: x for name, x in means.items() if math.isfinite(x)}
  names = sorted(finite, key=finite.__getitem__)
  if len(names) < 2:
    return f'Of the order with {LLAMA} nothing is known: seeds diverged.'
  pairs = [(x, y) for i, x in enumerate(names) for y in names[i + 1 :]]
  signs = {
    pair: [
      _sign(difference(*(outcome[architecture, name] for name in pair)))
      for architecture in (GPT2, LLAMA)
    ]
    for pair in pairs
  }
  decided = [x for x, (first, second) in signs.items() if first and second]
  turned = [x for x in decided if signs[x][0] != signs[x][1]]
  text = (
    f'{LLAMA}, the lowest loss first: {" < ".join(names)}. Of {len(pairs)} '
    f'pairs, {len(decided)} differ beyond the noise of seeds with both '
    'architectures'
  )
  if not decided:
    return f'{text}, so that nothing is known of the order.'
  if turned:
    listed = '; '.join(f'{x} before {y}' for x, y in turned)
    return (
      f'{text}, and some the other way round ({LLAMA}: {listed}): choose the '
      'optimizer anew for a Llama.'
    )
  return (
    f'{text}, all of them in the same direction: what is best for {GPT2} may '
    f'be taken for a {LLAMA}.'
  )


def _sign(found: Difference) -> int:
  """Returns the sign of a difference, 0 where none was seen."""
  return (found.low > 0) - (found.high < 0)


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the tunings, a panel for each architecture."""
  del scale
  return render.draw_tunings(
    {
      architecture: {
        x.name: outcome[architecture, x.name].tuned for x in CONTENDERS
      }
      for architecture in (GPT2, LLAMA)
    },
    sharey=False,
  )
