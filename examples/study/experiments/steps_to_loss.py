"""Steps to a loss against global batch: where a larger batch stops paying."""

import math
import statistics

from examples.study.analysis import tables as t
from examples.study.analysis.lengths import (
  CLOSE,
  fit_power,
  known_mean,
  steps_by_seed,
  steps_to,
)
from examples.study.optimizers import COMPARED, PAPER, Optimizer
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import (
  Case,
  Plan,
  best,
  find_rates,
  gather,
  gather_lists,
  warmup_and_b1,
)
from examples.study.tuning.coordinates import Variant

TITLE = 'Steps to a loss'
TEXT = """\
Steps of a complete run (warm-up and cosine) that ends at a loss, by
interpolation between runs of up to five lengths: the mean of two seeds, and
each of them. Where the loss lies beyond the shortest or longest run, within
0.04 of its loss, a slope of 0.35 per factor of e is assumed. The loss is the
highest of AdamW, LAMB and MERIT at one batch, rounded up. Warm-up and b1 are
those that suit an optimizer best at the batch and at equal tokens. The learning
rate of a length follows the power of the steps that fits the rates chosen for
other lengths."""
_SEEDS = (1, 2)
_MOST_TRIES = 4
"""Lengths of training beside that of equal tokens."""
_SHORTEST, _LONGEST = 1 / 16, 4.0
"""Lengths of training over that of equal tokens, at the ends."""
_ROUNDED_TO = 0.05


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans runs whose length is chosen until they end at the target."""
  sizes = scale.batch_sizes[::2]
  found = yield from gather(
    {
      (x.name, size): warmup_and_b1(Case(scale, x, size))
      for x in COMPARED
      for size in (*sizes, scale.batch_size)
    }
  )
  variants = {key: best(tried)[1] for key, tried in found.items()}
  powers = yield from gather({x.name: _power(scale, x) for x in COMPARED})
  points = yield from gather(
    {x.name: variants[x.name, scale.batch_size].evaluate() for x in PAPER}
  )
  target = choose_target([x.mean for x in points.values()])
  return (
    yield from gather_lists(
      {
        key: _find_steps(variant, target, powers[key[0]])
        for key, variant in variants.items()
        if key[1] in sizes
      }
    )
  )


def _power(scale: Scale, optimizer: Optimizer) -> Plan[float]:
  """Plans to find with which power of the steps the rate moves."""
  rates = yield from find_rates(scale, optimizer)
  size = scale.middle_batch
  case = Case(scale, optimizer, size)
  tunings = yield from case.find_length_rates(rates[size])
  _, power = fit_power(
    (scale.num_steps(size, share), tuned.learning_rate)
    for share, tuned in tunings.items()
  )
  return power


def choose_target(losses: list[float]) -> float:
  """Returns the highest loss, rounded up."""
  highest = max(filter(math.isfinite, losses), default=math.inf)
  if math.isinf(highest):
    return highest
  return round(math.ceil(highest / _ROUNDED_TO) * _ROUNDED_TO, 2)


def _find_steps(
  variant: Variant, target: float, power: float
) -> Plan[list[Point]]:
  """Plans to find the length of training that ends at the target."""
  case, tuned = variant
  seeds = _SEEDS[: case.scale.num_seeds] or case.scale.tuning_seeds
  full = case.scale.num_steps(case.batch_size)
  found: dict[int, Point] = {}
  steps: int | None = full
  while steps is not None:
    rate = tuned.learning_rate * (steps / full) ** power
    found[steps] = yield from case.run_seeds(rate, seeds, steps=steps)
    means = {x: point.mean for x, point in found.items()}
    steps = _next_steps(means, target, full)
  return [found[x].labelled(target=target, steps=x) for x in sorted(found)]


def _next_steps(
  means: dict[int, float], target: float, full: int
) -> int | None:
  """Returns the next length of training to try, None if that will do."""
  if (
    len(means) > _MOST_TRIES
    or math.isinf(target)
    or min(abs(x - target) for x in means.values()) <= CLOSE
  ):
    return None
  found = steps_to(means, target, reach=math.inf)
  steps = round(min(max(found, _SHORTEST * full), _LONGEST * full))
  return None if steps in means else steps


def tables(points: list[Point]) -> t.Tables:
  """Returns the steps, and how many times the tokens a larger batch costs."""
  found = steps_by_seed(points)
  first, *others = sizes = t.values(points, 'batch')
  tokens = {(name, x): x * known_mean(y) for (name, x), y in found.items()}
  names = t.values(points, 'optimizer')
  return {
    f'steps to a loss of {points[0]["target"]:g}': [
      {'optimizer': name}
      | {f'batch {x}': _format(found[name, x]) for x in sizes}
      for name in names
    ],
    f'tokens over those at batch {first}': [
      {'optimizer': name}
      | {
        f'batch {x}': f'{tokens[name, x] / tokens[name, first]:.1f} ×'
        for x in others
      }
      for name in names
    ],
  }


def _format(by_seed: list[float]) -> str:
  if math.isnan(known_mean(by_seed)):
    return 'not known'
  each = ', '.join(f'{x:,.0f}' for x in by_seed)
  return f'{statistics.mean(by_seed):,.0f} ({each})'
