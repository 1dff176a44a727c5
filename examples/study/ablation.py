"""MERIT without its parts, and with others in their place."""

import math
from typing import Any

from matplotlib.figure import Figure

from examples.study import render
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_point
from examples.study.scales import Scale

TITLE = 'Ablations'
ARMS: dict[str, dict[str, Any]] = {
  'no clip': {'clip_threshold': math.inf},
  'no weight-wise floor': {'ratios': ('row', 'column')},
  'weight-wise ratio only': {'ratios': ('weight',)},
  'l2 norms, element-wise': {'arm': 'adam > decay > l2 merit > clip'},
  'trust ratio on matrices only': {'trust_ratio': 'matrices'},
  'min_norm 0.01': {'min_norm': 0.01},
  'decay outside the ratio': {'arm': 'adam > merit > clip > decay'},
  'Q, K, V split': {'qkv': 'split'},
  'Q, K, V per head': {'qkv': 'heads'},
}
"""Settings of the arms, by name; Q, K and V are fused where not said else."""

Outcome = tuple[Point, dict[str, Point]]
"""MERIT as it is, and the arms by name."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans the arms at the largest batch, each with a tuning of its own."""
  full = yield from find_point(scale, 'MERIT', scale.largest_batch)
  arms = yield from gather(
    {name: find_variant(scale, full, **x) for name, x in ARMS.items()}
  )
  return full, arms


def find_variant(scale: Scale, full: Point, **changes: Any) -> Plan[Point]:
  """Plans a variant of MERIT, tuned around the best of MERIT as it is."""
  return find_point(
    scale,
    full.name,
    full.batch_size,
    start=full.tuned.learning_rate,
    budget=max(3, scale.budget - 2),
    **{'weight_decay': full.weight_decay} | changes,
  )


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns a table of the arms, and of what each is worth."""
  full, arms = outcome
  rows = [
    {
      'arm': name,
      'loss': render.format_point(point),
      'over MERIT': _over(point, full),
      'learning rate': render.format_learning_rate(point.tuned),
    }
    for name, point in ({'MERIT': full} | arms).items()
  ]
  return (
    f'Batch {scale.largest_batch}, weight decay {full.weight_decay:g}; each '
    'arm tuned around MERIT’s learning rate, then with the same seeds.\n\n'
    + render.markdown(rows)
  )


def _over(point: Point, full: Point) -> str:
  difference = point.mean - full.mean
  is_known = point is not full and math.isfinite(difference)
  return f'{difference:+.3f}' if is_known else ''


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws what each arm loses; those that diverged have no bar."""
  del scale
  full, arms = outcome
  losses = {
    name: point.mean - full.mean if _over(point, full) else 0.0
    for name, point in arms.items()
  }
  result, ((axes,),) = render.panels(1, 1)
  result.set_size_inches(7, 0.8 + 0.35 * len(arms))
  axes.barh(
    list(losses),
    list(losses.values()),
    xerr=[point.std for point in arms.values()],
    capsize=3,
    color='tab:green',
    alpha=0.7,
  )
  axes.axvspan(-full.std, full.std, color='0.85', zorder=0)
  axes.invert_yaxis()
  axes.set_xlabel('validation loss over MERIT’s (grey: its standard deviation)')
  return result
