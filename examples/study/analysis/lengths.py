"""What follows from runs of several lengths."""

from collections.abc import Callable, Mapping
import itertools
import math

import numpy as np
from scipy.interpolate import PchipInterpolator

from examples.study.analysis.data import Points

_REACH = 0.04
"""How far to extrapolate, nats."""
_SLOPE = -0.35
"""How the loss moves with the logarithm of the steps beyond the runs, nats."""


def steps_by_seed(points: Points) -> list[float]:
  """Returns the steps that end at the target loss, for each seed.

  Args:
    points: One optimizer with several lengths, with the label ``'target'``.
  """
  return [
    steps_to({x.steps: x.loss for x in trials}, points[0].labels['target'])
    for trials in zip(*(x.fresh for x in points), strict=True)
  ]


def steps_to(losses: Mapping[int, float], target: float) -> float:
  """Returns where the loss first falls to a target, by interpolation.

  It is infinite or 0 if the target lies beyond the longest or shortest run and
  out of reach.
  """
  steps = sorted(losses)
  for few, more in itertools.pairwise(steps):
    if losses[few] > target >= losses[more]:
      share = (losses[few] - target) / (losses[few] - losses[more])
      return few * float(more / few) ** share
  is_below = losses[steps[0]] <= target
  end = steps[0] if is_below else steps[-1]
  if abs(losses[end] - target) <= _REACH:
    return end * math.exp((target - losses[end]) / _SLOPE)
  return 0.0 if is_below else math.inf


def steps_by_loss(points: Points) -> Callable[[float], float]:
  """Returns the steps that end at a loss, given points whose loss falls."""
  steps = np.log([x.fresh[0].steps for x in points])
  losses = [x.mean for x in points]
  # Losses fall with the steps, and an interpolator wants them to rise.
  curve = PchipInterpolator(losses[::-1], steps[::-1])

  def steps_of(loss: float) -> float:
    end = min(max(loss, losses[-1]), losses[0])
    return math.exp(curve(end) + curve(end, 1) * (loss - end))

  return steps_of
