"""Points: trials that make a cell of a table, with what the cell is about.

A stored point is a line of JSON with its labels and the keys of its trials;
their numbers are in the lines of the trials themselves.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
import statistics
from typing import Any

from examples.study.trial import Result

MARGIN = 0.1
"""Instability margin: nats by which the loss may rise at the next larger
learning rate, where seeds deviate by much less than that."""


@dataclasses.dataclass(frozen=True)
class Tuned:
  """The trials of a tuning, and the learning rate that was chosen.

  Attributes:
    results: What came out, with seeds that are used for nothing else.
    learning_rate: The learning rate chosen.
  """

  results: tuple[Result, ...]
  learning_rate: float

  @functools.cached_property
  def by_seed(self) -> dict[float, dict[int, float]]:
    """Losses by learning rate, the smallest first, and by seed."""
    found: dict[float, dict[int, float]] = {}
    for x in sorted(self.results, key=lambda x: x.learning_rate):
      found.setdefault(x.learning_rate, {})[x.seed] = x.loss
    return found

  @property
  def losses(self) -> dict[float, float]:
    """Mean over the seeds that were run, by learning rate."""
    return {x: statistics.mean(y.values()) for x, y in self.by_seed.items()}

  @property
  def loss(self) -> float:
    """The loss at the learning rate chosen."""
    return self.losses[self.learning_rate]

  @property
  def unstable_rate(self) -> float | None:
    """A better learning rate that was not chosen, since it is unstable.

    None if the one chosen is the best, or was chosen by further seeds.
    """
    best = min(self.losses, key=self.losses.__getitem__)
    larger = [rate for rate in self.by_seed if rate > best]
    if best <= self.learning_rate or not larger:
      return None
    losses, next_losses = self.by_seed[best], self.by_seed[min(larger)]
    return best if is_unstable(losses, next_losses) else None

  @property
  def is_at_edge(self) -> bool:
    """Whether the one chosen is the smallest or the largest that was tried."""
    return self.learning_rate in (min(self.by_seed), max(self.by_seed))

  def of_seed(self, seed: int) -> 'Tuned':
    """Returns the trials of one seed alone."""
    kept = tuple(x for x in self.results if x.seed == seed)
    return dataclasses.replace(self, results=kept)


def is_unstable(
  losses: Mapping[int, float],
  larger: Mapping[int, float],
  margin: float = MARGIN,
) -> bool:
  """Returns whether the next larger rate is worse by more than a margin.

  Losses are by seed, and those of one seed are enough.
  """
  return any(
    larger.get(seed, -math.inf) > x + margin for seed, x in losses.items()
  )


@dataclasses.dataclass(frozen=True)
class Point:
  """What came out of an optimizer under some conditions.

  Attributes:
    labels: What it is about, such as ``'optimizer'`` and ``'batch'``.
    tuned: What chose its learning rate, if anything did.
    fresh: Results of seeds that took no part in the tuning.
  """

  labels: Mapping[str, Any]
  tuned: Tuned | None = None
  fresh: tuple[Result, ...] = ()

  def __getitem__(self, name: str) -> Any:
    return self.labels[name]

  def labelled(self, **labels: Any) -> 'Point':
    """Returns the same with further labels."""
    return dataclasses.replace(self, labels={**self.labels, **labels})

  @property
  def results(self) -> tuple[Result, ...]:
    """Results of all its trials."""
    return (*(self.tuned.results if self.tuned else ()), *self.fresh)

  @property
  def losses(self) -> tuple[float, ...]:
    """Losses of fresh seeds; that of the tuning if there are none."""
    if self.fresh or self.tuned is None:
      return tuple(x.loss for x in self.fresh)
    return (self.tuned.loss,)

  @property
  def mean(self) -> float:
    """Mean over seeds."""
    return statistics.mean(self.losses)

  @property
  def std(self) -> float:
    """Standard deviation over seeds, NaN for one or where one diverged."""
    is_known = len(self.losses) > 1 and math.isfinite(self.mean)
    return statistics.stdev(self.losses) if is_known else math.nan

  @property
  def line(self) -> dict[str, Any]:
    """JSON values: what is stored."""
    line: dict[str, Any] = {'labels': dict(self.labels)}
    if self.tuned is not None:
      line['learning_rate'] = self.tuned.learning_rate
      line['tuning'] = [x.key for x in self.tuned.results]
    return line | {'fresh': [x.key for x in self.fresh]}


def read_point(line: Mapping[str, Any], results: Mapping[str, Result]) -> Point:
  """Returns the point of a stored line, with results of trials by key."""
  tuned = None
  if 'tuning' in line:
    trials = tuple(results[key] for key in line['tuning'])
    tuned = Tuned(trials, line['learning_rate'])
  return Point(line['labels'], tuned, tuple(results[x] for x in line['fresh']))
