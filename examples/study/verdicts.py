"""Verdicts on claims: that one loss is lower, or that MERIT's values are."""

from collections.abc import Callable, Mapping
import math
from typing import TypeAlias

from examples.study.contenders import MERIT
from examples.study.differences import Difference, difference
from examples.study.points import Point

REPRODUCED, PARTLY, CONTRADICTED = 'reproduced', 'partly', 'contradicted'
ONE_SEED = 'no verdict of one seed'

Comparison: TypeAlias = Callable[[Point, Point], Difference]


def compare(
  first: Point, second: Point, comparison: Comparison = difference
) -> str:
  """Returns the verdict on the claim that the first loss is the lower one."""
  diverged = [
    [math.isinf(x) for x in point.losses] for point in (first, second)
  ]
  if any(map(any, diverged)):
    if len(first.losses) > 1 and all(diverged[0]) != all(diverged[1]):
      return CONTRADICTED if all(diverged[0]) else REPRODUCED
    return 'no verdict: seeds diverged'
  found = comparison(first, second)
  if math.isnan(found.high):
    return ONE_SEED
  if found.low <= 0 <= found.high:
    return f'no difference seen ({found.detectable:.3f} would have been)'
  # A loser whose learning rate is at the edge might do better.
  is_loser_at_edge = (first if found.mean > 0 else second).tuned.is_at_edge
  if is_loser_at_edge:
    return PARTLY
  return CONTRADICTED if found.mean > 0 else REPRODUCED


def judge_all(held: list[bool], failed: list[bool]) -> str:
  """Returns the verdict on a claim of several parts."""
  if all(held) and not any(failed):
    return REPRODUCED
  if any(held) and not all(failed):
    return PARTLY
  return CONTRADICTED if any(failed) else 'no difference seen'


def judge_smallest(
  values: Mapping[str, list[float]], is_larger: Callable[[float, float], bool]
) -> str:
  """Returns the verdict on the claim that MERIT has the smallest values.

  A difference counts if all values of the one are larger than all of the other.
  """
  own = values[MERIT.name]
  others = [x for name, x in values.items() if name != MERIT.name]

  def are_larger(x: list[float], y: list[float]) -> bool:
    return all(is_larger(i, j) for i in x for j in y)

  return judge_all(
    [are_larger(x, own) for x in others], [are_larger(own, x) for x in others]
  )
