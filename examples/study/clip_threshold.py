"""MERIT with other thresholds of the element-wise clip."""

import math

from matplotlib.figure import Figure

from examples.study import render
from examples.study.ablation import find_variant
from examples.study.plans import Plan, Result, gather
from examples.study.points import Point, find_point, run_at
from examples.study.scales import Scale

TITLE = 'Threshold of the clip'
THRESHOLDS = (0.5, 1.0, 2.0, 5.0, math.inf)

Outcome = dict[float, tuple[Point, Result]]
"""By threshold the point, and its run with diagnostics, of the first seed."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans the thresholds at the largest batch, each with its own tuning."""
  full = yield from find_point(scale, 'MERIT', scale.largest_batch)
  others = [x for x in THRESHOLDS if x != 1]
  points = yield from gather(
    {x: find_variant(scale, full, clip_threshold=x) for x in others}
  )
  points[1.0] = full
  results = yield [
    run_at(scale, points[x], clip_threshold=x) for x in THRESHOLDS
  ]
  return {
    x: (points[x], result)
    for x, result in zip(THRESHOLDS, results, strict=True)
  }


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns a table of the thresholds."""
  rows = [
    {
      'threshold': 'none' if math.isinf(x) else f'{x:g}',
      'loss': render.format_point(point),
      'learning rate': render.format_learning_rate(point.tuned),
      'largest share clipped, by layer': ', '.join(
        f'{max(layer):.1%}' for layer in shares(result)
      ),
      'share clipped, mean over training': ', '.join(
        f'{sum(layer) / len(layer):.1%}' for layer in shares(result)
      ),
    }
    for x, (point, result) in outcome.items()
  ]
  return (
    f'Batch {scale.largest_batch}. Shares are of a layer’s elements whose '
    'update was clipped, in the first seed’s run.\n\n' + render.markdown(rows)
  )


def shares(result: Result) -> list[list[float]]:
  """Returns the share of clipped elements by layer and diagnostics step."""
  return [list(x) for x in zip(*result.diagnostics['clipped'], strict=True)]


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the share of clipped elements over time, by threshold and layer."""
  del scale
  finite = [x for x in outcome if math.isfinite(x)]
  drawn, (row,) = render.panels(1, len(finite), sharey=True)
  for x, axes in zip(finite, row, strict=True):
    point, result = outcome[x]
    steps = result.diagnostics['step']
    for layer, values in enumerate(shares(result), 1):
      axes.plot(steps, values, label=f'layer {layer}', lw=1.2)
    axes.set_title(f'threshold {x:g}, loss {render.format_point(point)}')
    axes.set_xlabel('step')
  row[0].set_ylabel('share of elements clipped')
  if row[0].lines:
    row[0].legend()
  return drawn
