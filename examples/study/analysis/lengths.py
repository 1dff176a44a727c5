"""What follows from runs of several lengths."""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import math
import statistics

import numpy as np

from examples.study.points import Point

CLOSE = 0.02
"""Nats from a target that are close to it."""
_SLOPE = -0.35
"""First guess of how the loss moves with the logarithm of the steps, nats."""
_MOST_CHANGE = 4.0
"""Largest factor from one length to the next."""


def fit_power(rates: Iterable[tuple[float, float]]) -> tuple[float, float]:
  """Fits rates as a power of the number of steps.

  Args:
    rates: Pairs of steps and learning rate.

  Returns:
    The rate at 1000 steps, and the exponent.
  """
  steps, values = np.array(list(rates)).T
  power, offset = np.polyfit(np.log(steps / 1000), np.log(values), 1)
  return float(np.exp(offset)), float(power)


def steps_to(
  losses: Mapping[int, float], target: float, reach: float = 2 * CLOSE
) -> float:
  """Returns where the loss first falls to a target, by interpolation.

  It is infinite if that is nowhere, and 0 if the fewest steps are enough, but
  for a target that is within reach of the loss there.

  Args:
    losses: Final losses by the steps of the run.
    target: The loss.
    reach: How far to extrapolate, nats.
  """
  steps = sorted(losses)
  for few, more in itertools.pairwise(steps):
    if losses[few] > target >= losses[more]:
      if math.isinf(losses[few]):
        return math.sqrt(few * more)
      share = (losses[few] - target) / (losses[few] - losses[more])
      return few * (more / few) ** share
  is_below = losses[steps[0]] <= target < math.inf
  end = steps[0] if is_below else steps[-1]
  if math.isfinite(target) and abs(losses[end] - target) <= reach:
    return _extrapolate(end, losses[end], target)
  return 0.0 if is_below else math.inf


def _extrapolate(steps: int, loss: float, target: float) -> float:
  """Returns the steps at the target, if the loss falls as first guessed."""
  change = (target - loss) / _SLOPE
  most = math.log(_MOST_CHANGE)
  return steps * math.exp(min(max(change, -most), most))


def steps_by_seed(
  points: Iterable[Point],
) -> dict[tuple[str, int], list[float]]:
  """Returns the steps to the target of each seed, by optimizer and batch.

  Args:
    points: Points of all lengths, with the labels ``'steps'`` and ``'target'``.
  """
  lengths: dict[tuple[str, int], list[Point]] = {}
  for point in points:
    lengths.setdefault((point['optimizer'], point['batch']), []).append(point)
  return {
    key: [
      steps_to(
        dict(zip([x['steps'] for x in tried], losses, strict=True)),
        tried[0]['target'],
      )
      for losses in zip(*(x.losses for x in tried), strict=True)
    ]
    for key, tried in lengths.items()
  }


def known_mean(by_seed: Sequence[float]) -> float:
  """Returns the mean, NaN where the steps of a seed are not known."""
  is_known = all(0 < x < math.inf for x in by_seed)
  return statistics.mean(by_seed) if is_known else math.nan
