"""How far two points differ, and what difference could have been seen."""

from collections.abc import Sequence
import math
import statistics
from typing import NamedTuple

from scipy import optimize, stats

from examples.study.points import Point

_CONFIDENCE, _POWER = 0.95, 0.8


class Difference(NamedTuple):
  """Mean of one point's losses over that of another, nats a token.

  Attributes:
    mean: The difference.
    low: Lower end of its confidence interval of 95 %, after Welch.
    high: Upper end.
    detectable: Smallest true difference whose interval would leave out zero in
      80 % of such experiments, if seeds deviate as they did.
  """

  mean: float
  low: float
  high: float
  detectable: float

  def __str__(self) -> str:
    if not math.isfinite(self.mean):
      return 'runs diverged'
    if math.isnan(self.high):
      return f'{self.mean:+z.3f}, no interval'
    # Losses of some image models are a thousandth themselves.
    form = '+z.3f' if self.high - self.low >= 0.001 else '+z.4f'
    return f'{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]'


def difference(first: Point, second: Point) -> Difference:
  """Compares the losses of the fresh seeds of two points."""
  return contrast([first.losses], [second.losses])


def paired_difference(first: Point, second: Point) -> Difference:
  """Compares two points seed by seed, of the seeds that both have.

  For variants of one optimizer, whose losses go together: a seed decides the
  initial weights and the batches of both.
  """
  others = {x.seed: x.loss for x in second.fresh}
  pairs = [x.loss - others[x.seed] for x in first.fresh if x.seed in others]
  return contrast([pairs], []) if pairs else difference(first, second)


def contrast(
  plus: Sequence[Sequence[float]], minus: Sequence[Sequence[float]]
) -> Difference:
  """Compares sums of means of samples.

  Where a seed diverged, or there is one seed only, the interval is NaN.

  Args:
    plus: Samples whose means are added.
    minus: Samples whose means are subtracted.
  """
  samples = [*plus, *minus]
  mean = sum(map(statistics.mean, plus)) - sum(map(statistics.mean, minus))
  counts = [len(sample) for sample in samples]
  if min(counts) < 2 or not math.isfinite(mean):
    return Difference(mean, *[math.nan] * 3)
  variances = [statistics.variance(x) / len(x) for x in samples]
  error = math.sqrt(sum(variances))
  # Welch and Satterthwaite; equal losses have no variance at all.
  freedom = sum(variances) ** 2 / max(
    sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True)), 1e-300
  )
  freedom = max(freedom, 1.0)
  quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, freedom))
  return Difference(
    mean,
    mean - quantile * error,
    mean + quantile * error,
    error * _detectable(quantile, freedom),
  )


def _detectable(quantile: float, freedom: float) -> float:
  """Returns the difference, in standard errors, that is seen with _POWER."""

  def missing_power(shift: float) -> float:
    return _POWER - float(stats.nct.sf(quantile, freedom, shift))

  return float(optimize.brentq(missing_power, 0.0, 20 * quantile))
