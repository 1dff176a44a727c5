"""The choice of a learning rate."""

from collections.abc import Callable, Sequence
import math
import statistics
from typing import TypeAlias

from examples.study.points import MARGIN, Tuned, is_unstable
from examples.study.trial import Result, Trial
from examples.study.tuning.plans import Plan

# Powers of √2 between the smallest and the largest rate of a tuning.
_WIDEST = 12

_Losses: TypeAlias = dict[int, dict[int, float]]
"""Losses by power of √2 and seed."""


def select(
  make_trial: Callable[[float, int], Trial],
  start: float,
  seeds: Sequence[int],
  stride: int,
  margin: float = MARGIN,
) -> Plan[Tuned]:
  """Plans to choose a learning rate by the mean over seeds.

  It begins on both sides of the start, and goes on by the same factor while the
  best is at an edge, over a factor of 64 at most. Then it tries neighbours by
  √2 and the other seeds, until the best and both its neighbours have all seeds.
  If the next larger rate is worse by more than a margin with one of the seeds,
  the next smaller one is taken.

  Args:
    make_trial: Function from a learning rate and a seed to the trial with them.
    start: A first guess.
    seeds: Seeds that choose the rate; they should be used for nothing else.
    stride: Factor between the first rates, as a power of √2.
    margin: Instability margin, nats.
  """
  results: list[Result] = []
  losses: _Losses = {}
  wanted = [(power, seeds[0]) for power in (-stride, 0, stride)]
  while wanted:
    found = yield [
      make_trial(_at(start, power), seed) for power, seed in wanted
    ]
    results += found
    for (power, seed), result in zip(wanted, found, strict=True):
      losses.setdefault(power, {})[seed] = result.loss
    wanted = _next_wanted(losses, seeds, stride, margin)
  results.sort(key=lambda x: x.learning_rate)
  return Tuned(tuple(results), _at(start, _choose(losses, margin)))


def _next_wanted(
  losses: _Losses, seeds: Sequence[int], stride: int, margin: float
) -> list[tuple[int, int]]:
  """Returns the powers and seeds to try next; none once all is known."""
  chosen, least, most = _choose(losses, margin), min(losses), max(losses)
  is_wide = most - least >= _WIDEST
  if chosen in (least, most) and not is_wide:
    return [(chosen - stride if chosen == least else chosen + stride, seeds[0])]
  if all(math.isinf(loss) for loss in losses[chosen].values()):
    return []
  return [
    (power, seed)
    for power in (chosen - 1, chosen, chosen + 1)
    if least <= power <= most
    for seed in seeds
    if seed not in losses.get(power, {})
  ]


def _choose(losses: _Losses, margin: float) -> int:
  """Returns the power with the smallest mean, or a stable one below."""

  def rank(power: int) -> tuple[float, int]:
    mean = statistics.mean(losses[power].values())
    # The first guess of equals, the smallest of those that diverged.
    return mean, power if math.isinf(mean) else abs(power)

  chosen = min(losses, key=rank)
  while chosen - 1 in losses and is_unstable(
    losses[chosen], losses.get(chosen + 1, {}), margin
  ):
    chosen -= 1
  return chosen


def _at(start: float, power: int) -> float:
  return round_rate(start * math.sqrt(2) ** power)


def round_rate(learning_rate: float) -> float:
  """Returns a learning rate with three digits."""
  return float(f'{learning_rate:.3g}')
