"""The choice of a learning rate."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import statistics
from typing import TypeAlias

from examples.study.plans import Plan, Run

CLIFF = 0.1
"""Nats by which a loss must not rise at the next larger learning rate, where
seeds deviate by much less than that."""
# Powers of √2 between the smallest and the largest rate of a tuning.
_WIDEST = 12


@dataclasses.dataclass(frozen=True)
class Tuned:
  """The losses of a tuning, and what was chosen.

  Attributes:
    by_seed: Final losses by learning rate, the smallest first, and by seed;
      infinite where a run diverged.
    learning_rate: The learning rate chosen.
    cliff: Nats by which a loss must not rise at the next larger rate.
  """

  by_seed: Mapping[float, Mapping[int, float]]
  learning_rate: float
  cliff: float = CLIFF

  @property
  def losses(self) -> dict[float, float]:
    """Mean over the seeds that were run, by learning rate."""
    return {x: statistics.mean(y.values()) for x, y in self.by_seed.items()}

  @property
  def loss(self) -> float:
    """The loss at the learning rate chosen."""
    return self.losses[self.learning_rate]

  @property
  def before_cliff(self) -> float | None:
    """A better learning rate that was not chosen, since it is before a cliff.

    None if the one chosen is the best, or was chosen by further seeds.
    """
    best = min(self.losses, key=self.losses.__getitem__)
    larger = [rate for rate in self.by_seed if rate > best]
    if best <= self.learning_rate or not larger:
      return None
    losses, next_losses = self.by_seed[best], self.by_seed[min(larger)]
    return best if _is_cliff(losses, next_losses, self.cliff) else None

  @property
  def is_at_edge(self) -> bool:
    """Whether the one chosen is the smallest or the largest that was tried."""
    return self.learning_rate in (min(self.by_seed), max(self.by_seed))


def select(
  make_run: Callable[[float, int], Run],
  start: float,
  seeds: Sequence[int],
  stride: int,
  cliff: float = CLIFF,
) -> Plan[Tuned]:
  """Plans to choose a learning rate by the mean over seeds.

  It begins on both sides of the start, and goes on by the same factor while the
  best is at an edge, over a factor of 64 at most. Then it tries neighbours by
  √2 and the other seeds, until the best and both its neighbours have all seeds.
  If the next larger rate is much worse with one of the seeds, the next smaller
  one is taken.

  Args:
    make_run: Function from a learning rate and a seed to the run with them.
    start: A first guess.
    seeds: Seeds that choose the rate; they should judge nothing.
    stride: Factor between the first rates, as a power of √2.
    cliff: Nats by which a loss must not rise at the next larger rate.
  """
  # By the power of √2 that is the learning rate over the start, and seed.
  losses: _Losses = {}
  wanted = [(power, seeds[0]) for power in (-stride, 0, stride)]
  while wanted:
    results = yield [
      make_run(_at(start, power), seed) for power, seed in wanted
    ]
    for (power, seed), result in zip(wanted, results, strict=True):
      losses.setdefault(power, {})[seed] = result.loss
    wanted = _next_wanted(losses, seeds, stride, cliff)
  return Tuned(
    {_at(start, x): losses[x] for x in sorted(losses)},
    _at(start, _choose(losses, cliff)),
    cliff,
  )


_Losses: TypeAlias = dict[int, dict[int, float]]


def _next_wanted(
  losses: _Losses, seeds: Sequence[int], stride: int, cliff: float
) -> list[tuple[int, int]]:
  """Returns the powers and seeds to try next; none once all is known."""
  chosen, least, most = _choose(losses, cliff), min(losses), max(losses)
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


def _choose(losses: _Losses, cliff: float) -> int:
  """Returns the power with the smallest mean, or one below a cliff."""

  def rank(power: int) -> tuple[float, int]:
    mean = statistics.mean(losses[power].values())
    # The first guess of equals, the smallest of those that diverged.
    return mean, power if math.isinf(mean) else abs(power)

  chosen = min(losses, key=rank)
  while chosen - 1 in losses and _is_cliff(
    losses[chosen], losses.get(chosen + 1, {}), cliff
  ):
    chosen -= 1
  return chosen


def _is_cliff(
  losses: Mapping[int, float], larger: Mapping[int, float], cliff: float
) -> bool:
  """Returns whether a larger learning rate is much worse with some seed."""
  return any(
    larger.get(seed, -math.inf) > x + cliff for seed, x in losses.items()
  )


def _at(start: float, power: int) -> float:
  return round_rate(start * math.sqrt(2) ** power)


def round_rate(learning_rate: float) -> float:
  """Returns a learning rate with three digits."""
  return float(f'{learning_rate:.3g}')
