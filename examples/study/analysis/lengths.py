"""What follows from runs of several lengths."""

from collections.abc import Iterable, Mapping
import itertools
import math

import numpy as np

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


def steps_to(losses: Mapping[int, float], target: float) -> float:
  """Returns where the loss first falls to a target, by interpolation.

  It is infinite if that is nowhere, and 0 if the fewest steps are enough, but
  for a target that is close to the loss there.

  Args:
    losses: Final losses by the steps of the run.
    target: The loss.
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
  if math.isfinite(target) and abs(losses[end] - target) <= 2 * CLOSE:
    return extrapolate(end, losses[end], target)
  return 0.0 if is_below else math.inf


def extrapolate(steps: int, loss: float, target: float) -> float:
  """Returns the steps at the target, if the loss falls as first guessed."""
  change = (target - loss) / _SLOPE
  most = math.log(_MOST_CHANGE)
  return steps * math.exp(min(max(change, -most), most))
