"""The choice of a learning rate."""

from collections.abc import Callable, Sequence
import dataclasses
import math
import statistics
from typing import TypeAlias

from examples.study.plans import Plan, Run

CLIFF = 0.1
"""Nats by which a loss must not rise at the next larger learning rate."""
# Powers of √2 between the smallest and the largest rate of a tuning.
_WIDEST = 12


@dataclasses.dataclass(frozen=True)
class Tuned:
  """The losses of a tuning, and what was chosen.

  Attributes:
    losses: Mean of the final losses over seeds by learning rate, infinite where
      a run diverged.
    learning_rate: The learning rate chosen.
  """

  losses: dict[float, float]
  learning_rate: float

  @property
  def loss(self) -> float:
    """The loss at the learning rate chosen."""
    return self.losses[self.learning_rate]

  @property
  def is_at_edge(self) -> bool:
    """Whether that is the smallest or the largest that was tried."""
    return self.learning_rate in (min(self.losses), max(self.losses))


def select(
  make_run: Callable[[float, int], Run],
  start: float,
  seeds: Sequence[int],
  spread: int,
) -> Plan[Tuned]:
  """Plans to choose a learning rate by the mean over seeds.

  It begins on both sides of the start, and goes on by the same factor while the
  best is at an edge. Then it tries neighbours by √2 and the other seeds, until
  the best and both its neighbours have all seeds. A rate is not chosen if the
  next larger one is much worse with one of the seeds.

  Args:
    make_run: Function from a learning rate and a seed to the run with them.
    start: A first guess.
    seeds: Seeds that choose the rate; they should judge nothing.
    spread: Factor between the first rates, as a power of √2.
  """
  # By the power of √2 that is the learning rate over the start, and seed.
  losses: _Losses = {}
  wanted = [(power, seeds[0]) for power in (-spread, 0, spread)]
  while wanted:
    results = yield [
      make_run(_at(start, power), seed) for power, seed in wanted
    ]
    for (power, seed), result in zip(wanted, results, strict=True):
      losses.setdefault(power, {})[seed] = result.loss
    wanted = _next_wanted(losses, seeds, spread)
  return Tuned(
    {
      _at(start, x): statistics.mean(losses[x].values()) for x in sorted(losses)
    },
    _at(start, _best(losses)),
  )


_Losses: TypeAlias = dict[int, dict[int, float]]


def _next_wanted(
  losses: _Losses, seeds: Sequence[int], spread: int
) -> list[tuple[int, int]]:
  """Returns the powers and seeds to try next; none once all is known."""
  best, least, most = _best(losses), min(losses), max(losses)
  if best in (least, most) and most - least < _WIDEST:
    return [(best - spread if best == least else best + spread, seeds[0])]
  if all(math.isinf(loss) for loss in losses[best].values()):
    return []
  return [
    (power, seed)
    for power in (best - 1, best, best + 1)
    for seed in seeds
    if seed not in losses.get(power, {})
  ]


def _best(losses: _Losses) -> int:
  """Returns the power with the smallest mean that is not before a cliff."""

  def is_before_cliff(power: int) -> bool:
    larger = losses.get(power + 1, {})
    return any(
      larger.get(seed, -math.inf) > loss + CLIFF
      for seed, loss in losses[power].items()
    )

  def rank(power: int) -> tuple[float, int]:
    mean = statistics.mean(losses[power].values())
    # The first guess of equals, the smallest of those that diverged.
    return mean, power if math.isinf(mean) else abs(power)

  powers = [x for x in losses if not is_before_cliff(x)]
  return min(powers, key=rank) if powers else min(losses)


def _at(start: float, power: int) -> float:
  """Returns a learning rate with three digits."""
  return float(f'{start * math.sqrt(2) ** power:.3g}')
