"""A small batch at first, a large one then: with which optimizer?"""

import math
from typing import NamedTuple

from matplotlib.figure import Figure

from examples.study import render, variants
from examples.study.contenders import ADAMW, KEPT, MERIT, MUON, Contender
from examples.study.differences import (
  Difference,
  difference,
  leaders,
  paired_difference,
  sentence,
)
from examples.study.experiments import (
  batch_scaling,
  tuned_initialization,
)
from examples.study.plans import Plan, Run, gather
from examples.study.points import Point, repeat
from examples.study.scales import Scale
from examples.study.tuning import select

TITLE = 'Small batch, then large'
CONTENDERS = (ADAMW, MERIT, MUON, KEPT)
"""Optimizers of the second phase."""
# So that no seed draws the windows of the first phase again.
_SEEDS_APART = 1000


class Outcome(NamedTuple):
  """What came out.

  Attributes:
    constant: Points of one batch throughout, by contender and batch size.
    again: AdamW at the small batch in the second phase too, a control.
    taken: Second phases at the large batch, with moments, by contender.
    fresh: The same without, each at its own learning rate.
  """

  constant: batch_scaling.Outcome
  again: Point
  taken: dict[str, Point]
  fresh: dict[str, Point]


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans the second phases, after what suits constant batches is known."""
  small, large = _ends(scale)
  constant = yield from gather(
    {
      (x.name, size): tuned_initialization.plan_best(scale, x, size)
      for x in CONTENDERS
      for size in (small, large)
    }
  )
  phases = {
    'again': _plan_phase(scale, constant, ADAMW, small),
    'taken': gather(
      {x.name: _plan_phase(scale, constant, x, large) for x in CONTENDERS}
    ),
    'fresh': gather(
      {
        x.name: _plan_phase(scale, constant, x, large, fresh_moments=True)
        for x in CONTENDERS
      }
    ),
  }
  found = yield from gather(phases)
  return Outcome(variants.judged(constant), **found)


def _ends(scale: Scale) -> tuple[int, int]:
  """Returns the smallest and the largest batch, sequences."""
  return scale.batch_sizes[0], scale.batch_sizes[-1]


def _plan_phase(
  scale: Scale,
  constant: variants.Outcome,
  contender: Contender,
  size: int,
  **changes: bool,
) -> Plan[Point]:
  """Plans to choose the peak rate of a second phase, and to judge it."""
  own = constant[contender.name, size]

  def run(learning_rate: float, seed: int) -> Run:
    return _run(scale, constant, own.best, size, learning_rate, seed, **changes)

  start = own.point.tuned.learning_rate
  tuned = yield from select(run, start, scale.tuning_seeds, 1)
  seeds = range(1, 1 + scale.seeds_at(scale.batch_sizes[-1]))
  losses = yield from repeat(run, tuned, seeds)
  return Point(contender.name, size, tuned, losses)


def _run(
  scale: Scale,
  constant: variants.Outcome,
  contender: Contender,
  size: int,
  learning_rate: float,
  seed: int,
  **changes: bool,
) -> Run:
  """Returns a second phase of half of the tokens."""
  small, _ = _ends(scale)
  adamw = constant[ADAMW.name, small]
  first_rate = adamw.point.tuned.learning_rate
  first = adamw.best.run(scale, small, first_rate, seed=seed + _SEEDS_APART)
  return contender.run(
    scale,
    size,
    learning_rate,
    seed=seed,
    steps=scale.num_steps(size, 0.5),
    first=first,
    **changes,
  )


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, and what a larger batch for the second half costs."""
  small, large = _ends(scale)
  stay = outcome.constant[ADAMW.name, small]
  return '\n\n'.join(
    [
      f'AdamW at batch {small} for half of the tokens, half-way down its '
      'schedule; then another optimizer or batch for the other half, with a '
      'warm-up and a cosine to zero of its own, whose peak is tuned. Weights '
      'are taken over (norms that are kept are those at the switch), and so '
      'are moments: the first one as Muon’s momentum, which has no second one; '
      'what Adam updates takes both. The second phase has other text. '
      'Warm-up, b1 and initial weights are those that suit an optimizer best '
      'at the batch throughout. Mean and standard deviation over seeds:',
      render.markdown(_rows(outcome, scale)),
      sentence(
        f'Another warm-up and cosine alone (AdamW, batch {small})',
        'going on',
        difference(outcome.again, stay),
      ),
      *(
        f'{name} from the middle on at batch {large}: '
        + _compare(outcome, name, large, stay)
        for name in outcome.taken
      ),
      _advice(outcome, scale),
    ]
  )


def _rows(outcome: Outcome, scale: Scale) -> list[dict[str, str]]:
  small, large = _ends(scale)
  stay = outcome.constant[ADAMW.name, small]
  points = {
    f'{x.name}, batch {size}': outcome.constant[x.name, size]
    for size in (small, large)
    for x in CONTENDERS
  }
  then = f'AdamW, batch {small}, then'
  points[f'{then} AdamW, batch {small} again'] = outcome.again
  for name, point in outcome.taken.items():
    points[f'{then} {name}, batch {large}'] = point
    points[f'{then} {name}, batch {large}, fresh moments'] = outcome.fresh[name]
  return [
    {
      'optimizer': name,
      'steps': f'{_num_steps(scale, point, " then " in name):,}',
      'loss': render.format_point(point),
      f'over AdamW, batch {small}': ''
      if point is stay
      else str(difference(point, stay)),
      'learning rate': render.format_learning_rate(point.tuned),
    }
    for name, point in points.items()
  ]


def _num_steps(scale: Scale, point: Point, has_two_phases: bool) -> int:
  """Returns the steps of a row of the table, those of both phases."""
  if not has_two_phases:
    return scale.num_steps(point.batch_size)
  small, _ = _ends(scale)
  first = scale.num_steps(small) // 2
  return first + scale.num_steps(point.batch_size, 0.5)


def _compare(outcome: Outcome, name: str, large: int, stay: Point) -> str:
  """Returns a second phase against all that it has to beat."""
  own = outcome.taken[name]
  others = {
    f'AdamW at batch {stay.batch_size} throughout': stay,
    f'{name} at batch {large} throughout': outcome.constant[name, large],
  }
  found = {x: difference(own, point) for x, point in others.items()}
  # They share the weights and the text of a seed.
  moments = paired_difference(own, outcome.fresh[name])
  found['the same with fresh moments'] = moments
  return ' '.join(sentence('It', other, x) for other, x in found.items())


def _advice(outcome: Outcome, scale: Scale) -> str:
  """Returns whether to change to the large batch, and how, in a sentence."""
  small, large = _ends(scale)
  found = leaders([*outcome.taken.values(), *outcome.fresh.values()])
  if not found:
    return (
      f'Do not change to batch {large} at half of the tokens: with each '
      'optimizer a seed diverged.'
    )
  best, stay = found[0], outcome.constant[ADAMW.name, small]
  names = ' or '.join(dict.fromkeys(x.name for x in found))
  saved = 1 - _num_steps(scale, best, True) / scale.num_steps(small)
  lowest = min(
    (outcome.constant[x.name, small] for x in CONTENDERS),
    key=lambda point: point.mean,
  )
  return (
    f'To change from batch {small} to {large} at half of the tokens, which '
    f'saves {saved:.0%} of the steps, go on with {names}. {best.name}, '
    f'{_moments(outcome, best)}, {_cost(difference(best, stay))}. All steps at '
    f'batch {small} '
    f'with {lowest.name} end at {render.format_loss(lowest.mean)}.'
  )


def _moments(outcome: Outcome, best: Point) -> str:
  """Returns what becomes of the moments in the best second phase."""
  taken, fresh = outcome.taken[best.name], outcome.fresh[best.name]
  is_taken = best is taken
  way = 'its moments taken over' if is_taken else 'its moments zero at first'
  found = paired_difference(*((taken, fresh) if is_taken else (fresh, taken)))
  if found.low <= 0 <= found.high:
    return f'{way} or not, which made no difference that was seen'
  return f'{way} (over the other way: {found})'


def _cost(found: Difference) -> str:
  """Returns what a change costs, by its loss over that of staying."""
  if math.isnan(found.high):
    return f'over staying at the small batch: {found}'
  if found.low > 0:
    return f'loses {found.mean:.3f} nats to staying at the small batch'
  if found.high < 0:
    return f'gains {-found.mean:.3f} nats over staying at the small batch'
  return f'has a loss like that of staying at the small batch ({found})'


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws each way over staying with AdamW at the small batch."""
  small, large = _ends(scale)
  stay = outcome.constant[ADAMW.name, small]
  found = {f'AdamW, batch {small} again': difference(outcome.again, stay)}
  for name, point in outcome.taken.items():
    found |= {
      f'{name}, batch {large} throughout': difference(
        outcome.constant[name, large], stay
      ),
      f'then {name}': difference(point, stay),
      f'then {name}, fresh moments': difference(outcome.fresh[name], stay),
    }
  result = render.draw_differences(found, ADAMW.name)
  # Names are long, and leave less room.
  result.axes[0].set_xlabel(f'loss over that of AdamW, batch {small}')
  return result
