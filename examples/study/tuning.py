"""Tuning of a learning rate with a fixed number of runs."""

from collections.abc import Callable
import dataclasses
import math

from examples.study.plans import Plan, Run


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
