"""What the comparison with everything tuned tunes, stage by stage.

First warm-up and b1, from the usual ones; then the standard deviation of the
initial weights.
"""

from collections.abc import Callable
import dataclasses
from typing import TypeAlias

from examples.gpt2.presets import OPTIMIZERS
from examples.study.optimizers import ALL, HYPERBALL, WITH_RATIOS
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import coordinates
from examples.study.tuning.cases import Case, find_rates
from examples.study.tuning.coordinates import Cases, Variant, Variants, best
from examples.study.tuning.plans import Plan, gather_lists

AS_IT_IS = 'as it is'
INITIAL_WEIGHTS = coordinates.Coordinate(
  'init_scale', (1.0, 2.0, 4.0), '{:g} ×', promising=0.02
)
"""Deviations of the initial weights, over that in proportion to the width;
larger ones want higher rates."""
_LONG_WARMUP = 0.3
_WARMUP = f'warm-up {_LONG_WARMUP:.0%}'
_B1 = (0.4, 0.6, 0.8, 0.9, 0.95)
B1 = coordinates.Coordinate('b1', _B1)
# Those that are tried anyway.
_FIRST_B1 = (0.8, 0.9, 0.95)

Stage: TypeAlias = Callable[[Case], Plan[Variants]]
"""Plans to tune an optimizer at a batch size; returns what was tried last."""


def compare_all(stage: Stage, scale: Scale) -> Plan[list[Point]]:
  """Plans a stage for all optimizers at every batch."""
  return gather_lists(
    {
      (x.name, y): _plan_points(stage, Case(scale, x, y))
      for x in ALL
      for y in scale.batch_sizes
    }
  )


def _plan_points(stage: Stage, case: Case) -> Plan[list[Point]]:
  tried = yield from tune_stage(stage, case)
  name, found = best(tried)
  point = yield from found.evaluate()
  labels = case.labels | {'role': 'tried'}
  return [
    *(Point(labels | {'variant': x}, y.tuned) for x, y in tried.items()),
    point.labelled(role='best', variant=name),
  ]


def tune_stage(stage: Stage, case: Case) -> Plan[Variants]:
  """Plans a stage for an optimizer.

  Hyperball takes all but the learning rate from that with MERIT's ratios.
  """
  if case.optimizer != HYPERBALL:
    return (yield from stage(case))
  tried = yield from stage(dataclasses.replace(case, optimizer=WITH_RATIOS))
  _, found = best(tried)
  parts = HYPERBALL.chain.parts
  case = found.case.with_optimizer(name=HYPERBALL.name).with_chain(parts=parts)
  tuned = yield from case.find_rate(
    found.tuned.learning_rate, seeds=case.scale.tuning_seeds[:1]
  )
  return {'as with ratios': Variant(case, tuned)}


def initial_weights(case: Case) -> Plan[Variants]:
  """Plans to tune the initial weights, with the best warm-up and b1."""
  tried = yield from warmup_and_b1(case)
  _, found = best(tried)
  return (yield from coordinates.improve(found, INITIAL_WEIGHTS))


def warmup_and_b1(case: Case) -> Plan[Variants]:
  """Plans to tune warm-up and b1 of an optimizer at a batch size."""
  rates = yield from find_rates(case.scale, case.optimizer)
  usual = rates[case.batch_size].of_seed(case.scale.tuning_seeds[0])
  tried = {AS_IT_IS: Variant(case, usual)}
  for propose in (_one_change, _smaller_b1, _smaller_b1, _both):
    tried |= yield from coordinates.tune(propose(case, tried), tried)
  return tried


def _one_change(case: Case, tried: Variants) -> Cases:
  """Returns what is tried of an optimizer at every batch.

  At the two largest, also other rates of what Adam updates beside Muon.
  """
  del tried  # Of no variant yet.
  found = {_WARMUP: case.with_settings(warmup_share=_LONG_WARMUP)}
  for name, b1 in _names_of_b1(case).items():
    if b1 in _FIRST_B1 and name != AS_IT_IS:
      found[name] = case.with_settings(b1=b1)
  if case.is_large and case.optimizer.optimizer == 'muon':
    for factor in (0.25, 4.0):
      found[f'rest at {factor:g} ×'] = case.with_others_rate(factor)
  return found


def _smaller_b1(case: Case, tried: Variants) -> Cases:
  """Returns the next smaller b1, if the smallest tried is the best."""
  names = _names_of_b1(case)
  lowest = _best_b1(names, tried)
  smaller = [x for x in names if names[x] < names[lowest]]
  if not smaller or smaller[-1] in tried:
    return {}
  return {smaller[-1]: case.with_settings(b1=names[smaller[-1]])}


def _both(case: Case, tried: Variants) -> Cases:
  """Returns a long warm-up with the best b1, if each lowers the loss alone."""
  names = _names_of_b1(case)
  lowest = _best_b1(names, tried)
  losses = {x: tried[x].tuned.loss for x in (_WARMUP, AS_IT_IS)}
  if lowest == AS_IT_IS or losses[_WARMUP] >= losses[AS_IT_IS]:
    return {}
  both = case.with_settings(warmup_share=_LONG_WARMUP, b1=names[lowest])
  return {f'{_WARMUP} and {lowest}': both}


def _names_of_b1(case: Case) -> dict[str, float]:
  """Returns the values of b1 by name, the smallest first."""
  usual = OPTIMIZERS[case.optimizer.optimizer]['b1']
  return {AS_IT_IS if x == usual else f'b1 {x:g}': x for x in _B1}


def _best_b1(names: dict[str, float], tried: Variants) -> str:
  name, _ = best({x: tried[x] for x in names if x in tried})
  return name
