"""MERIT without its parts, and with others in their place."""

import dataclasses
import math
from typing import Any

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import MERIT
from examples.study.differences import Difference, paired_difference
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_point
from examples.study.scales import Scale

TITLE = 'Ablations'
WEIGHT_ONLY = 'weight-wise ratio only'
ARMS: dict[str, dict[str, Any]] = {
  'no clip': {'clip_threshold': math.inf},
  'no weight-wise floor': {'ratios': ('row', 'column')},
  WEIGHT_ONLY: {'ratios': ('weight',)},
  'l2 norms, element-wise': {'arm': 'adam > decay > l2 merit > clip'},
  'trust ratio on matrices only': {'trust_ratio': 'matrices'},
  'min_norm 0.01': {'min_norm': 0.01},
  'decay outside the ratio': {'arm': 'adam > merit > clip > decay'},
  'no weight decay': {'weight_decay': 0.0},
  'weight decay 0.1': {'weight_decay': 0.1},
  'Q, K, V split': {'qkv': 'split'},
  'Q, K, V per head': {'qkv': 'heads'},
}
"""Settings of the arms, by name; Q, K and V are fused where not said else."""
# Enough to see 0.01: parts are worth little here, the paper saw 0.024.
_SEEDS = 10

Outcome = tuple[Point, dict[str, Point]]
"""MERIT as it is, and the arms by name."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans the arms, each with a tuning of its own."""
  num_seeds = _SEEDS if scale.num_seeds > 1 else scale.num_seeds
  full = yield from find_point(
    scale, MERIT, scale.batch_size, num_seeds=num_seeds
  )
  arms = yield from gather(
    {
      name: find_point(
        scale,
        dataclasses.replace(MERIT, name=name, settings=settings),
        scale.batch_size,
        num_seeds=num_seeds,
        start=full.tuned.learning_rate,
        stride=1,
      )
      for name, settings in ARMS.items()
    }
  )
  return full, arms


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns a table of the arms, and of what each is worth."""
  full, arms = outcome
  found = _differences(outcome)
  rows = [
    {
      'arm': point.name,
      'loss': render.format_point(point),
      'over MERIT': str(found.get(point.name, '')),
      'could be seen': _detectable(found.get(point.name)),
      'learning rate': render.format_learning_rate(point.tuned),
    }
    for point in (full, *arms.values())
  ]
  return '\n\n'.join(
    [
      f'Batch {scale.batch_size}; each arm tuned around MERIT’s learning rate, '
      f'then {len(full.losses)} seeds. Differences are taken seed by seed; '
      'beside each is the smallest that four of five such experiments would '
      'show.',
      render.markdown(rows),
    ]
  )


def _detectable(found: Difference | None) -> str:
  if found is None or math.isnan(found.detectable):
    return ''
  return f'{found.detectable:.3f}'


def _differences(outcome: Outcome) -> dict[str, Difference]:
  full, arms = outcome
  return {name: paired_difference(x, full) for name, x in arms.items()}


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws what each arm loses."""
  del scale
  return render.draw_differences(
    _differences(outcome), MERIT.name, color=render.COLORS[MERIT.name]
  )
