"""MERIT without its parts, and with others in their place."""

import math
from typing import Any

from examples.study.plans import Plan, together
from examples.study.points import Point, find_point
from examples.study.scales import Scale

ARMS: dict[str, dict[str, Any]] = {
  'no clip': {'clip_threshold': math.inf},
  'no weight-wise floor': {'ratios': ('row', 'column')},
  'weight-wise ratio only': {'ratios': ('weight',)},
  'l2 norms, element-wise': {'arm': 'l2'},
  'trust ratio on matrices only': {'trust_ratio': 'matrices'},
  'min_norm 0.01': {'min_norm': 0.01},
  'decay outside the ratio': {'arm': 'decay_outside'},
  'Q, K, V split': {'qkv': 'split'},
  'Q, K, V per head': {'qkv': 'heads'},
}
"""Settings of the arms, by name; Q, K and V are fused where not said else."""


def plan(scale: Scale) -> Plan[tuple[Point, dict[str, Point]]]:
  """Plans the arms at the largest batch, each with a tuning of its own.

  Returns MERIT as it is, and the arms by name.
  """
  full = yield from find_point(scale, 'MERIT', scale.largest_batch)
  points = yield from together(
    *(find_variant(scale, full, **changes) for changes in ARMS.values())
  )
  return full, dict(zip(ARMS, points, strict=True))


def find_variant(scale: Scale, full: Point, **changes: Any) -> Plan[Point]:
  """Plans a variant of MERIT, tuned around the rate of MERIT as it is."""
  return find_point(
    scale,
    full.name,
    full.batch_size,
    start=full.tuned.rate,
    budget=max(3, scale.budget - 2),
    **{'weight_decay': full.weight_decay} | changes,
  )
