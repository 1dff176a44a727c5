"""How far two points differ, and what difference could have been seen."""

import math
import statistics
from typing import NamedTuple

from scipy import stats

from examples.study.points import Point

_CONFIDENCE, _POWER = 0.95, 0.8


class Difference(NamedTuple):
  """Mean of one point's losses over that of another, nats a token.

  Attributes:
    mean: The difference.
    low: Lower end of its confidence interval of 95 %, after Welch.
    high: Upper end.
    detectable: Smallest true difference whose interval would leave out zero in
      80 % of such experiments.
  """

  mean: float
  low: float
  high: float
  detectable: float

  def __str__(self) -> str:
    if not math.isfinite(self.mean):
      return 'runs diverged'
    if math.isnan(self.high):
      return f'{self.mean:+.3f}, no interval'
    return f'{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]'


def difference(first: Point, second: Point) -> Difference:
  """Compares the losses of the fresh seeds of two points.

  Where a seed diverged, or there is one seed only, the interval is NaN.
  """
  mean = first.mean - second.mean
  counts = [len(point.losses) for point in (first, second)]
  if min(counts) < 2 or not math.isfinite(mean):
    return Difference(mean, *[math.nan] * 3)
  variances = [
    statistics.variance(point.losses) / len(point.losses)
    for point in (first, second)
  ]
  error = math.sqrt(sum(variances))
  # Welch and Satterthwaite; equal losses have no variance at all.
  freedom = sum(variances) ** 2 / max(
    sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True)),
    1e-300,
  )
  quantile = stats.t.ppf([(1 + _CONFIDENCE) / 2, _POWER], max(freedom, 1.0))
  return Difference(
    mean,
    float(mean - quantile[0] * error),
    float(mean + quantile[0] * error),
    float(quantile.sum() * error),
  )


def sentence(name: str, other: str, found: Difference) -> str:
  """Returns what can be said of two contenders."""
  if math.isnan(found.high):
    return f'{name} and {other}: {found}.'
  if found.low <= 0 <= found.high:
    return (
      f'{name} and {other} differ by no more than could be seen ({found}; '
      f'{found.detectable:.3f} would have been seen in four of five such '
      'experiments).'
    )
  word = 'lower' if found.mean < 0 else 'higher'
  return f'{name} has a {word} loss than {other}: {found}.'
