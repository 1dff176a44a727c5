"""Plans of points: an optimizer that is tuned, then judged by fresh seeds."""

from collections.abc import Sequence
import math
from typing import Any

from examples.study.optimizers import Optimizer
from examples.study.points import MARGIN, Point, Tuned
from examples.study.scales import Scale
from examples.study.trial import Trial
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.rates import round_rate, select


def find_point(
  scale: Scale,
  optimizer: Optimizer,
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
    optimizer: The optimizer.
    batch_size: Global batch, sequences.
    num_seeds: As for :func:`judge`.
    start: As for :func:`find_rate`.
    stride: As for :func:`find_rate`.
    **changes: Further settings, as for :meth:`Scale.run`.
  """
  tuned = yield from find_rate(
    scale, optimizer, batch_size, start=start, stride=stride, **changes
  )
  return (
    yield from judge(scale, optimizer, batch_size, tuned, num_seeds, **changes)
  )


def find_rate(
  scale: Scale,
  optimizer: Optimizer,
  batch_size: int,
  *,
  start: float | None = None,
  stride: int | None = None,
  seeds: Sequence[int] | None = None,
  margin: float = MARGIN,
  **changes: Any,
) -> Plan[Tuned]:
  """Plans to choose a learning rate.

  Args:
    scale: Size of the study.
    optimizer: The optimizer.
    batch_size: Global batch, sequences.
    start: First guess of the learning rate; by the optimizer's rule, or its
      own, by default.
    stride: Of :func:`examples.study.tuning.rates.select`; that of the scale by
      default.
    seeds: Seeds that choose; those of the scale by default.
    margin: Instability margin, nats.
    **changes: Further settings, as for :meth:`Scale.run`.
  """

  def trial(learning_rate: float, seed: int) -> Trial:
    return optimizer.trial(
      scale, batch_size, learning_rate, seed=seed, **changes
    )

  return select(
    trial,
    start or optimizer.rule_rate(scale, batch_size) or optimizer.start,
    seeds or scale.tuning_seeds,
    stride or scale.stride,
    margin,
  )


def judge(
  scale: Scale,
  optimizer: Optimizer,
  batch_size: int,
  tuned: Tuned,
  num_seeds: int | None = None,
  first_seed: int = 1,
  **changes: Any,
) -> Plan[Point]:
  """Plans to repeat the learning rate chosen with fresh seeds.

  Args:
    scale: Size of the study.
    optimizer: The optimizer.
    batch_size: Global batch, sequences.
    tuned: What was chosen.
    num_seeds: Number of seeds; that of the scale by default. With none, the
      loss of the tuning judges.
    first_seed: The first of them.
    **changes: Further settings, as for :meth:`Scale.run`.
  """
  count = scale.num_seeds if num_seeds is None else num_seeds
  seeds = range(first_seed, first_seed + count)
  point = yield from run_seeds(
    scale, optimizer, batch_size, tuned.learning_rate, seeds, **changes
  )
  return Point(point.labels, tuned, point.fresh)


def run_seeds(
  scale: Scale,
  optimizer: Optimizer,
  batch_size: int,
  learning_rate: float,
  seeds: Sequence[int],
  **changes: Any,
) -> Plan[Point]:
  """Plans trials of some seeds at a learning rate, as :func:`judge` does."""
  results = yield [
    optimizer.trial(
      scale, batch_size, round_rate(learning_rate), seed=seed, **changes
    )
    for seed in seeds
  ]
  labels = {'optimizer': optimizer.name, 'batch': batch_size}
  return Point(labels, None, tuple(results))


def find_rates(scale: Scale, optimizer: Optimizer) -> Plan[dict[int, Tuned]]:
  """Plans to choose a learning rate for every batch size of the scale.

  It begins at the one of experiments that do not vary it. From there, the rate
  of a batch is the first guess for the next, moved as the rule, if it has one.
  """
  middle = scale.batch_sizes.index(scale.batch_size)
  first = yield from find_rate(scale, optimizer, scale.batch_size)
  outward = {
    'smaller': scale.batch_sizes[:middle][::-1],
    'larger': scale.batch_sizes[middle + 1 :],
  }
  found = yield from gather(
    {
      side: _find_next_rates(scale, optimizer, sizes, first)
      for side, sizes in outward.items()
    }
  )
  rates = {scale.batch_size: first} | found['smaller'] | found['larger']
  return {size: rates[size] for size in scale.batch_sizes}


def _find_next_rates(
  scale: Scale, optimizer: Optimizer, sizes: Sequence[int], first: Tuned
) -> Plan[dict[int, Tuned]]:
  found: dict[int, Tuned] = {}
  previous, tuned = scale.batch_size, first
  for size in sizes:
    start = scale_rate(tuned.learning_rate, size / previous)
    rules = [optimizer.rule_rate(scale, x) for x in (size, previous)]
    if all(rules):
      start = tuned.learning_rate * rules[0] / rules[1]
    tuned = yield from find_rate(scale, optimizer, size, start=start, stride=1)
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
