"""MERIT with other thresholds of the element-wise clip."""

import itertools
import math

from matplotlib.figure import Figure

from examples.study.analysis.figures import draw_lines
from examples.study.analysis.logits import largest_share
from examples.study.analysis.tables import Tables, format_loss, pivot
from examples.study.optimizers import MERIT
from examples.study.points import Point
from examples.study.render import panels
from examples.study.scales import Scale
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.points import find_rate, run_seeds

TITLE = 'Threshold of the clip'
TEXT = """\
Multiples of the rate of MERIT as it is. Losses of two seeds; the largest share
of a layer’s elements whose update was clipped, over seeds and diagnostics
steps."""
THRESHOLDS = (0.5, 1.0, 2.0, 5.0, math.inf)
FACTORS = (1, 2, 4)
"""Multiples of the learning rate chosen."""
_SEEDS = (1, 2)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans runs with diagnostics at the rate of MERIT, and beyond it."""
  tuned = yield from find_rate(scale, MERIT, scale.batch_size)
  points = yield from gather(
    {
      (threshold, factor): run_seeds(
        scale,
        MERIT,
        scale.batch_size,
        factor * tuned.learning_rate,
        _SEEDS,
        with_diagnostics=True,
        clip_threshold=threshold,
      )
      for threshold, factor in itertools.product(THRESHOLDS, FACTORS)
    }
  )
  return [
    point.labelled(threshold=_name(threshold), factor=factor)
    for (threshold, factor), point in points.items()
  ]


def _name(threshold: float) -> str:
  return 'none' if math.isinf(threshold) else f'{threshold:g}'


def tables(points: list[Point]) -> Tables:
  """Returns losses and shares by threshold."""
  return {
    'losses': pivot(points, ['threshold'], 'factor', {'': _losses}),
    'most clipped': pivot(points, ['threshold'], 'factor', {'': _share}),
  }


def _losses(point: Point) -> str:
  return ', '.join(map(format_loss, point.losses))


def _share(point: Point) -> str:
  share = largest_share(point)
  return 'diverged' if math.isnan(share) else f'{share:.1%}'


def figure(points: list[Point]) -> Figure:
  """Draws the loss over the threshold, by factor of the rate."""
  result, ((axes,),) = panels(1, 1)
  result.set_size_inches(6, 3.5)
  draw_lines(axes, points, 'threshold', by='factor')
  axes.set_xlabel('threshold of the clip')
  axes.legend()
  return result
