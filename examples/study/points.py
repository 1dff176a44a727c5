"""Points of comparison: a tuned optimizer at a batch size, with seeds."""

from collections.abc import Callable, Sequence
import dataclasses
import math
import statistics
from typing import Any

from examples.study.contenders import Contender
from examples.study.plans import Plan, Result, Run, gather
from examples.study.scales import Scale
from examples.study.tuning import CLIFF, Tuned, round_rate, select


@dataclasses.dataclass(frozen=True)
class Point:
  """What came out at a batch size.

  Attributes:
    name: Name of the contender.
    batch_size: Global batch, sequences.
    tuned: Losses by learning rate, and the one chosen.
    losses: Final losses at that, of seeds that took no part in the tuning.
  """

  name: str
  batch_size: int
  tuned: Tuned
  losses: tuple[float, ...]

  @property
  def mean(self) -> float:
    """Mean over seeds."""
    return statistics.mean(self.losses)

  @property
  def std(self) -> float:
    """Standard deviation over seeds, NaN for one or where one diverged."""
    is_known = len(self.losses) > 1 and math.isfinite(self.mean)
    return statistics.stdev(self.losses) if is_known else math.nan


def find_point(
  scale: Scale,
  contender: Contender,
  batch_size: int,
  *,
  num_seeds: int | None = None,
  start: float | None = None,
  stride: int | None = None,
  **changes: Any,
) -> Plan[Point]:
  """Plans to choose a learning rate, and to judge it by fresh seeds.

  Args:
    scale: Size of the study.
    contender: The optimizer.
    batch_size: Global batch, sequences.
    num_seeds: Runs that judge; those of the scale by default.
    start: First guess of the learning rate; by the contender's rule, or its
      own, by default.
    stride: Of :func:`examples.study.tuning.select`; that of the scale by
      default.
    **changes: Further settings, as for :meth:`Scale.run`.
  """
  tuned = yield from find_rate(
    scale, contender, batch_size, start=start, stride=stride, **changes
  )
  return (
    yield from judge(scale, contender, batch_size, tuned, num_seeds, **changes)
  )


def find_rate(
  scale: Scale,
  contender: Contender,
  batch_size: int,
  *,
  start: float | None = None,
  stride: int | None = None,
  seeds: Sequence[int] | None = None,
  cliff: float = CLIFF,
  **changes: Any,
) -> Plan[Tuned]:
  """Plans to choose a learning rate.

  Args:
    scale: Size of the study.
    contender: The optimizer.
    batch_size: Global batch, sequences.
    start: First guess of the learning rate; by the contender's rule, or its
      own, by default.
    stride: Of :func:`examples.study.tuning.select`; that of the scale by
      default.
    seeds: Seeds that choose; those of the scale by default.
    cliff: Of :func:`examples.study.tuning.select`.
    **changes: Further settings, as for :meth:`Scale.run`.
  """

  def run(learning_rate: float, seed: int) -> Run:
    return contender.run(scale, batch_size, learning_rate, seed=seed, **changes)

  return select(
    run,
    start or contender.rule_rate(scale, batch_size) or contender.start,
    seeds or scale.tuning_seeds,
    stride or scale.stride,
    cliff,
  )


def judge(
  scale: Scale,
  contender: Contender,
  batch_size: int,
  tuned: Tuned,
  num_seeds: int | None = None,
  first_seed: int = 1,
  **changes: Any,
) -> Plan[Point]:
  """Plans to repeat the learning rate chosen with fresh seeds.

  Args:
    scale: Size of the study.
    contender: The optimizer.
    batch_size: Global batch, sequences.
    tuned: What was chosen.
    num_seeds: Number of seeds; that of the scale by default. With none, the
      loss of the tuning judges.
    first_seed: The first of them.
    **changes: Further settings, as for :meth:`Scale.run`.
  """
  num_seeds = scale.num_seeds if num_seeds is None else num_seeds

  def run(learning_rate: float, seed: int) -> Run:
    return contender.run(scale, batch_size, learning_rate, seed=seed, **changes)

  seeds = range(first_seed, first_seed + num_seeds)
  losses = yield from repeat(run, tuned, seeds)
  return Point(contender.name, batch_size, tuned, losses)


def repeat(
  make_run: Callable[[float, int], Run], tuned: Tuned, seeds: Sequence[int]
) -> Plan[tuple[float, ...]]:
  """Plans to repeat the learning rate chosen with some seeds.

  Args:
    make_run: Function from a learning rate and a seed to the run with them.
    tuned: What was chosen.
    seeds: The seeds; with none, the loss of the tuning is returned.
  """
  results = yield [make_run(tuned.learning_rate, seed) for seed in seeds]
  return tuple(result.loss for result in results) or (tuned.loss,)


def run_seeds(
  scale: Scale,
  contender: Contender,
  learning_rate: float,
  seeds: Sequence[int],
  **changes: Any,
) -> Plan[list[Result]]:
  """Plans runs with diagnostics, at the batch that most experiments share."""
  return (
    yield [
      contender.run(
        scale,
        scale.batch_size,
        round_rate(learning_rate),
        with_diagnostics=True,
        seed=seed,
        **changes,
      )
      for seed in seeds
    ]
  )


def measure_seeds(
  scale: Scale,
  contender: Contender,
  batch_size: int,
  learning_rate: float,
  measure: str,
  num_seeds: int,
  **changes: Any,
) -> Plan[list[Result]]:
  """Plans to measure the final weights of fresh seeds.

  Args:
    scale: Size of the study.
    contender: The optimizer.
    batch_size: Global batch, sequences.
    learning_rate: Peak learning rate.
    measure: Of the :class:`Run`.
    num_seeds: Number of seeds, at least one.
    **changes: Further settings, as for :meth:`Scale.run`.
  """
  return (
    yield [
      contender.run(
        scale, batch_size, learning_rate, seed=seed, measure=measure, **changes
      )
      for seed in range(1, 1 + max(1, num_seeds))
    ]
  )


def find_rates(scale: Scale, contender: Contender) -> Plan[dict[int, Tuned]]:
  """Plans to choose a learning rate for every batch size of the scale.

  It begins at the one of experiments that do not vary it. From there, the rate
  of a batch is the first guess for the next, moved as the rule, if it has one.
  """
  middle = scale.batch_sizes.index(scale.batch_size)
  first = yield from find_rate(scale, contender, scale.batch_size)
  outward = {
    'smaller': scale.batch_sizes[:middle][::-1],
    'larger': scale.batch_sizes[middle + 1 :],
  }
  found = yield from gather(
    {
      side: _find_next_rates(scale, contender, sizes, first)
      for side, sizes in outward.items()
    }
  )
  rates = {scale.batch_size: first} | found['smaller'] | found['larger']
  return {size: rates[size] for size in scale.batch_sizes}


def _find_next_rates(
  scale: Scale, contender: Contender, sizes: Sequence[int], first: Tuned
) -> Plan[dict[int, Tuned]]:
  found: dict[int, Tuned] = {}
  previous, tuned = scale.batch_size, first
  for size in sizes:
    start = scale_rate(tuned.learning_rate, size / previous)
    rules = [contender.rule_rate(scale, x) for x in (size, previous)]
    if all(rules):
      start = tuned.learning_rate * rules[0] / rules[1]
    tuned = yield from find_rate(scale, contender, size, start=start, stride=1)
    found[size], previous = tuned, size
  return found


def scale_rate(learning_rate: float, factor: float) -> float:
  """Returns a first guess for another batch, or for another number of steps.

  Args:
    learning_rate: The rate chosen for one.
    factor: The other batch over that one, or the steps of that one over the
      other's.
  """
  return learning_rate * math.sqrt(factor)
