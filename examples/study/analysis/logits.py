"""What trials with diagnostics tell about attention logits and the clip."""

from collections.abc import Iterable, Sequence
import math
import statistics
from typing import Any

from examples.study.analysis.figures import draw_lines
from examples.study.analysis.tables import format_loss
from examples.study.points import Point
from examples.study.render import COLORS


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

  The mean loss over that of the same seeds at the rate chosen; infinite where a
  run diverged.
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


def draw_logits(axes: Any, points: Iterable[Point]) -> None:
  """Draws the largest logit over the steps, a line for each seed."""
  for point in points:
    for result in point.fresh:
      logits = [
        max(math.nan if x is None else x for x in layers)
        for layers in result.diagnostics['max_attention_logit']
      ]
      axes.plot(
        result.diagnostics['step'],
        logits,
        color=COLORS[point['optimizer']],
        label=point['optimizer'] if result is point.fresh[0] else None,
        lw=1.1,
      )
  axes.set_yscale('symlog', linthresh=1.0)
  axes.set_xlabel('step')


def draw_costs(axes: Any, points: Sequence[Point]) -> None:
  """Draws what factors of the learning rate cost, but for what diverged."""
  found = costs(points)
  factors = sorted({x['factor'] for x in points})
  draw_lines(
    axes, points, 'factor', lambda x: found[x['optimizer'], x['factor']]
  )
  axes.set_xscale('log', base=2)
  axes.set_xticks(factors, [f'{x:g} ×' for x in factors])
  axes.set_xlabel('learning rate over the one chosen')
  axes.set_ylabel('loss over that of the one chosen')
  axes.set_title(
    f'batch {points[0]["batch"]}, usual warm-up and b1', fontsize=9
  )
  axes.set_ylim(top=0.5)
