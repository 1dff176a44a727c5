"""Tuning of a learning rate."""

from collections.abc import Callable
import dataclasses
import math
import statistics
from typing import TypeAlias

from examples.study.plans import Plan, Run

TUNING_SEEDS = (0, 100)
"""Seeds that choose a learning rate, and judge nothing."""
CLIFF = 0.1
"""Nats by which a loss must not rise at the next larger learning rate."""
# Powers of √2 between the smallest and the largest rate of a tuning.
_WIDEST = 12


@dataclasses.dataclass(frozen=True)
class Tuned:
  """The losses of a tuning.

  Attributes:
    losses: Final loss by learning rate, infinite where a run diverged.
  """

  losses: dict[float, float]

  @property
  def learning_rate(self) -> float:
    """The best learning rate."""
    return min(self.losses, key=self.losses.__getitem__)

  @property
  def loss(self) -> float:
    """The loss at the best learning rate."""
    return self.losses[self.learning_rate]

  @property
  def is_at_edge(self) -> bool:
    """Whether the best is the smallest or the largest that was tried."""
    return self.learning_rate in (min(self.losses), max(self.losses))


@dataclasses.dataclass(frozen=True)
class Selected(Tuned):
  """The losses of a tuning with several seeds, and what was chosen.

  Attributes:
    losses: Mean of the final losses over seeds by learning rate.
    choice: The learning rate chosen.
  """

  choice: float

  @property
  def learning_rate(self) -> float:
    """The learning rate chosen."""
    return self.choice


def select(
  make_run: Callable[[float, int], Run], start: float
) -> Plan[Selected]:
  """Plans to choose a learning rate by the mean over two seeds.

  It begins with half the start, the start and twice the start, and goes on by
  factors of 2 while the best is at an edge. Then it tries neighbours by √2 and
  the second seed, until the best and both its neighbours have both seeds. A
  rate is not chosen if the next larger one is much worse with one of the seeds.

  Args:
    make_run: Function from a learning rate and a seed to the run with them.
    start: A first guess.
  """
  # By the power of √2 that is the learning rate over the start, and seed.
  losses: _Losses = {}
  wanted = [(power, TUNING_SEEDS[0]) for power in (-2, 0, 2)]
  while wanted:
    results = yield [
      make_run(_at(start, power), seed) for power, seed in wanted
    ]
    for (power, seed), result in zip(wanted, results, strict=True):
      losses.setdefault(power, {})[seed] = result.loss
    wanted = _next_wanted(losses)
  return Selected(
    {
      _at(start, x): statistics.mean(losses[x].values()) for x in sorted(losses)
    },
    _at(start, _best(losses)),
  )


_Losses: TypeAlias = dict[int, dict[int, float]]


def _next_wanted(losses: _Losses) -> list[tuple[int, int]]:
  """Returns the powers and seeds to try next; none once all is known."""
  best, least, most = _best(losses), min(losses), max(losses)
  if best in (least, most) and most - least < _WIDEST:
    return [(best - 2 if best == least else best + 2, TUNING_SEEDS[0])]
  if all(math.isinf(loss) for loss in losses[best].values()):
    return []
  return [
    (power, seed)
    for power in (best - 1, best, best + 1)
    for seed in TUNING_SEEDS
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


def tune(
  make_run: Callable[[float], Run], start: float, budget: int
) -> Plan[Tuned]:
  """Plans to tune a learning rate.

  It begins with half the start, the start and twice the start, goes on by
  factors of 2 while the best is at an edge, then tries √2 to both sides of the
  best, and spends what is left on wider curves.

  Args:
    make_run: Function from a learning rate to the run with it.
    start: A first guess.
    budget: Number of runs, at least 3. All of them are used.
  """
  # By the power of √2 that is the learning rate over the start.
  losses: dict[int, float] = {}
  wanted = [-2, 0, 2]
  while wanted:
    results = yield [make_run(_at(start, power)) for power in wanted]
    losses |= {
      power: result.loss for power, result in zip(wanted, results, strict=True)
    }
    wanted = _next_powers(losses)[: budget - len(losses)]
  return Tuned({_at(start, power): losses[power] for power in sorted(losses)})


def _next_powers(losses: dict[int, float]) -> list[int]:
  """Returns which powers to try next, never empty."""
  least, most = min(losses), max(losses)
  # If all diverged, the first is the best: smaller ones come next.
  best = min(sorted(losses), key=losses.__getitem__)
  if best == least:
    return [least - 2]
  if best == most:
    return [most + 2]
  between = [power for power in (best - 1, best + 1) if power not in losses]
  if between:
    return between
  return [least - 2] if best - least < most - best else [most + 2]


def _at(start: float, power: int) -> float:
  """Returns a learning rate with three digits."""
  return float(f'{start * math.sqrt(2) ** power:.3g}')
