"""Points of comparison: a tuned optimizer at a batch size, with seeds."""

from collections.abc import Callable
import dataclasses
import functools
import math
import statistics
from typing import Any

from examples.study.plans import Plan, Result, Run
from examples.study.scales import DECAY, LEARNING_RATES, Scale
from examples.study.tuning import Tuned, select, tune

CONTENDERS: dict[str, dict[str, Any]] = {
  'AdamW': {'optimizer': 'adamw'},
  'LAMB': {'optimizer': 'lamb'},
  'MERIT': {'optimizer': 'merit'},
  'Muon': {'optimizer': 'muon'},
  'AdamW, QK-norm': {'optimizer': 'adamw', 'qk_norm': True},
}
"""Settings of the optimizers that are compared, by name."""
PAPER = ('AdamW', 'LAMB', 'MERIT')
"""Those that the paper compares."""
OTHER_DECAYS = (0.0, 0.1)
"""Weight decays that are tried beside the first, at the largest batch."""


@dataclasses.dataclass(frozen=True)
class Point:
  """What came out at a batch size.

  Attributes:
    name: Name of the contender.
    batch_size: Global batch, sequences.
    tuned: Losses by learning rate.
    decays: Losses at the best learning rate by weight decay, those that were
      tried.
    losses: Final losses at the best learning rate and decay, of seeds that took
      no part in the tuning.
  """

  name: str
  batch_size: int
  tuned: Tuned
  decays: dict[float, float]
  losses: tuple[float, ...]

  @property
  def weight_decay(self) -> float:
    """The best weight decay."""
    return min(self.decays, key=self.decays.__getitem__)

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
  name: str,
  batch_size: int,
  *,
  start: float | None = None,
  budget: int | None = None,
  **changes: Any,
) -> Plan[Point]:
  """Plans to tune a contender and to repeat it with several seeds.

  The learning rate is tuned first and then, at the largest batch, the weight
  decay, unless it is among the changes.

  Args:
    scale: Size of the study.
    name: Name of the contender.
    batch_size: Global batch, sequences.
    start: First guess of the learning rate; that of the scale by default.
    budget: Runs to tune it; those of the scale by default.
    **changes: Further settings, as for :meth:`Scale.run`.
  """
  settings = CONTENDERS[name] | changes
  run = functools.partial(scale.run, batch_size=batch_size, **settings)
  tuned = yield from tune(
    lambda learning_rate: run(learning_rate=learning_rate),
    start or LEARNING_RATES[settings['optimizer']],
    budget or scale.budget,
  )
  run = functools.partial(run, learning_rate=tuned.learning_rate)
  decays = {settings.get('weight_decay', DECAY): tuned.loss}
  if batch_size == scale.largest_batch and 'weight_decay' not in changes:
    results = yield [run(weight_decay=x) for x in OTHER_DECAYS]
    decays |= dict(zip(OTHER_DECAYS, _losses(results), strict=True))
  best_decay = min(decays, key=decays.__getitem__)
  results = yield [
    run(weight_decay=best_decay, seed=seed)
    # The first has been chosen for its luck.
    for seed in range(1, scale.seeds + 1)
  ]
  return Point(name, batch_size, tuned, decays, tuple(_losses(results)))


def select_point(
  name: str,
  run: Callable[..., Run],
  *,
  start: float,
  seeds: int,
) -> Plan[Point]:
  """Plans to choose a learning rate by two seeds, and to judge it by others.

  Args:
    name: Name of the contender.
    run: Function from ``learning_rate`` and ``seed`` to a run.
    start: First guess of the learning rate.
    seeds: Runs that judge.
  """
  selected = yield from select(
    lambda rate, seed: run(learning_rate=rate, seed=seed), start
  )
  best = run(learning_rate=selected.learning_rate, seed=0).config
  results = yield [
    run(learning_rate=selected.learning_rate, seed=seed)
    for seed in range(1, seeds + 1)
  ]
  decays = {best.weight_decay: selected.loss}
  return Point(name, best.batch_size, selected, decays, tuple(_losses(results)))


def run_at(scale: Scale, point: Point, **changes: Any) -> Run:
  """Returns a run with diagnostics at a point, but for the changes."""
  settings = CONTENDERS[point.name] | {
    'batch_size': point.batch_size,
    'learning_rate': point.tuned.learning_rate,
    'weight_decay': point.weight_decay,
  }
  return scale.run(with_diagnostics=True, **settings | changes)


def _losses(results: list[Result]) -> list[float]:
  return [result.loss for result in results]
