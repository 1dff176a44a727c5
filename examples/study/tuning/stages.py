"""What the comparison with everything tuned tunes, stage by stage.

First warm-up and b1, from the usual ones; then the standard deviation of the
initial weights.
"""

from collections.abc import Callable
import dataclasses
from typing import TypeAlias

from examples.gpt2.presets import OPTIMIZERS
from examples.study.optimizers import (
  COMPARED,
  HYPERBALL,
  WITH_RATIOS,
  Optimizer,
)
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning.cases import Case, find_rates
from examples.study.tuning.coordinates import (
  Coordinate,
  Search,
  Tunings,
  best,
  search,
  tune,
)
from examples.study.tuning.plans import Plan, gather

AS_IT_IS = 'as it is'
INITIAL_WEIGHTS = Coordinate(
  'init_scale', (1.0, 2.0, 4.0), 1.0, '{:g} ×', promising=0.02
)
"""Deviations of the initial weights, over that in proportion to the width;
larger ones want higher rates."""
_LONG_WARMUP = 0.3
_WARMUP = f'warm-up {_LONG_WARMUP:.0%}'
_B1 = (0.4, 0.6, 0.8, 0.9, 0.95)
# Those that are tried anyway.
_FIRST_B1 = (0.8, 0.9, 0.95)

Stage: TypeAlias = Callable[[Scale, Optimizer, int], Plan[Search]]
"""Plans to tune an optimizer at a batch size."""


def compare_all(stage: Stage, scale: Scale) -> Plan[list[Point]]:
  """Plans a stage for all optimizers at every batch.

  Hyperball takes all but the learning rate from that with MERIT's ratios.
  """
  found = yield from gather(
    {
      (x.name, size): stage(scale, x, size)
      for x in COMPARED
      for size in scale.batch_sizes
    }
  )
  plain = yield from gather(
    {
      (HYPERBALL.name, size): _without_ratios(
        scale, found[WITH_RATIOS.name, size]
      )
      for size in scale.batch_sizes
    }
  )
  return [point for x in (found | plain).values() for point in x.points]


def _without_ratios(scale: Scale, found: Search) -> Plan[Search]:
  """Plans Hyperball without MERIT's ratios, else as with them."""
  size, chain = found.point['batch'], found.best.chain
  parts = tuple(x for x in chain.parts if x != 'merit')
  optimizer = dataclasses.replace(
    found.best,
    name=HYPERBALL.name,
    chain=dataclasses.replace(chain, parts=parts),
  )
  case = Case(scale, optimizer, size)
  tuned = yield from case.find_rate(
    found.point.tuned.learning_rate, seeds=scale.tuning_seeds[:1]
  )
  point = yield from case.judge(tuned)
  return Search({'as with ratios': tuned}, optimizer, point)


def initial_weights(
  scale: Scale, optimizer: Optimizer, size: int
) -> Plan[Search]:
  """Plans to tune the initial weights, with the best warm-up and b1."""
  found = yield from warmup_and_b1(scale, optimizer, size)
  return (yield from search(scale, found, INITIAL_WEIGHTS))


def warmup_and_b1(
  scale: Scale, optimizer: Optimizer, size: int
) -> Plan[Search]:
  """Plans to tune warm-up and b1 of an optimizer at a batch size."""
  rates = yield from find_rates(scale, optimizer)
  optimizers = {AS_IT_IS: optimizer}
  tried = {AS_IT_IS: rates[size].of_seed(scale.tuning_seeds[0])}
  first = _with_others_rates if scale.is_large(size) else _one_change
  for propose in (first, _smaller_b1, _smaller_b1, _both):
    proposed = propose(optimizer, tried)
    tried |= yield from tune(scale, proposed, size, tried[best(tried)])
    optimizers |= proposed
  name = best(tried)
  point = yield from Case(scale, optimizers[name], size).judge(tried[name])
  return Search(tried, optimizers[name], point)


def _one_change(optimizer: Optimizer, tried: Tunings) -> dict[str, Optimizer]:
  """Returns what is tried of an optimizer at every batch, by name."""
  del tried  # Of no variant yet.
  found = {_WARMUP: optimizer.with_settings(warmup_share=_LONG_WARMUP)}
  return found | {
    name: optimizer.with_settings(b1=b1)
    for name, b1 in _names_of_b1(optimizer).items()
    if b1 in _FIRST_B1 and name != AS_IT_IS
  }


def _with_others_rates(
  optimizer: Optimizer, tried: Tunings
) -> dict[str, Optimizer]:
  """Returns the same, and other rates of what Adam updates beside Muon."""
  found = _one_change(optimizer, tried)
  if optimizer.optimizer == 'muon':
    for factor in (0.25, 4.0):
      found[f'rest at {factor:g} ×'] = optimizer.with_others_rate(factor)
  return found


def _smaller_b1(optimizer: Optimizer, tried: Tunings) -> dict[str, Optimizer]:
  """Returns the next smaller b1, if the smallest tried is the best."""
  names = _names_of_b1(optimizer)
  lowest = best({x: tried[x] for x in names if x in tried})
  smaller = [x for x in names if names[x] < names[lowest]]
  if not smaller or smaller[-1] in tried:
    return {}
  return {smaller[-1]: optimizer.with_settings(b1=names[smaller[-1]])}


def _both(optimizer: Optimizer, tried: Tunings) -> dict[str, Optimizer]:
  """Returns a long warm-up with the best b1, if each lowers the loss alone."""
  names = _names_of_b1(optimizer)
  lowest = best({x: tried[x] for x in names if x in tried})
  if lowest == AS_IT_IS or tried[_WARMUP].loss >= tried[AS_IT_IS].loss:
    return {}
  both = optimizer.with_settings(warmup_share=_LONG_WARMUP, b1=names[lowest])
  return {f'{_WARMUP} and {lowest}': both}


def _names_of_b1(optimizer: Optimizer) -> dict[str, float]:
  """Returns the values of b1 by name, the smallest first."""
  usual = OPTIMIZERS[optimizer.optimizer]['b1']
  return {AS_IT_IS if x == usual else f'b1 {x:g}': x for x in _B1}
