"""MERIT with other thresholds of the element-wise clip."""

import math

from examples.study.ablation import find_variant
from examples.study.plans import Plan, Result, together
from examples.study.points import Point, find_point, run_at
from examples.study.scales import Scale

THRESHOLDS = (0.5, 1.0, 2.0, 5.0, math.inf)


def plan(scale: Scale) -> Plan[dict[float, tuple[Point, Result]]]:
  """Plans the thresholds at the largest batch, each with a tuning of its own.

  Returns by threshold the point, and its run with the first seed.
  """
  full = yield from find_point(scale, 'MERIT', scale.largest_batch)
  others = [x for x in THRESHOLDS if x != 1]
  variants = yield from together(
    *(find_variant(scale, full, clip_threshold=x) for x in others)
  )
  points = dict(zip(others, variants, strict=True)) | {1.0: full}
  results = yield [
    run_at(scale, points[x], clip_threshold=x) for x in THRESHOLDS
  ]
  return {
    x: (points[x], result)
    for x, result in zip(THRESHOLDS, results, strict=True)
  }
