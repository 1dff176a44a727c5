"""What trials at multiples of a learning rate tell, with diagnostics."""

from collections.abc import Iterable
import math
import statistics

from examples.study.analysis.tables import format_loss
from examples.study.points import Point


def peak(point: Point) -> float:
  """Returns the largest logit of all seeds, layers and diagnostics steps.

  It is infinite where a run diverged, maybe between two of them.
  """
  return _largest(point, 'max_attention_logit', math.inf)


def largest_share(point: Point) -> float:
  """Returns the largest share of clipped elements of a layer.

  It is NaN where a run diverged.
  """
  return _largest(point, 'clipped', math.nan)


def _largest(point: Point, name: str, otherwise: float) -> float:
  """Returns the largest of all seeds, layers and diagnostics steps."""
  if not all(map(math.isfinite, point.losses)):
    return otherwise
  found = [
    math.inf if x is None else x
    for result in point.fresh
    for layers in result.diagnostics[name]
    for x in layers
  ]
  return max(found, default=otherwise)


def format_logit(logit: float) -> str:
  """Returns an attention logit as text."""
  if not math.isfinite(logit):
    return 'not finite'
  return f'{logit:,.0f}' if logit < 1e6 else f'{logit:.0e}'


def loss_and_peak(point: Point) -> str:
  """Returns the mean loss, and the largest logit in brackets."""
  return f'{format_loss(point.mean)} ({format_logit(peak(point))})'


def costs(points: Iterable[Point]) -> dict[tuple[str, float], float]:
  """Returns what factors of the learning rate cost, by optimizer and factor.

  The mean loss minus that of the same seeds at the rate chosen; infinite where
  a run diverged.
  """
  found = {(point['optimizer'], point['factor']): point for point in points}
  return {
    (name, factor): _cost(point, found[name, 1])
    for (name, factor), point in found.items()
  }


def _cost(point: Point, chosen: Point) -> float:
  pairs = zip(point.losses, chosen.losses, strict=True)
  found = [wrong - right for wrong, right in pairs]
  return statistics.mean(found) if all(map(math.isfinite, found)) else math.inf
