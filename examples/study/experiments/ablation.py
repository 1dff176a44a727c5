"""MERIT without its parts, and with others in their place."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from examples.study.analysis import tables as t
from examples.study.analysis.intervals import Difference, paired_difference
from examples.study.chains import Chain
from examples.study.optimizers import MERIT
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, gather

TITLE = 'Ablations'
TEXT = """\
Each change tuned around MERIT’s learning rate, then ten fresh seeds. Losses are
compared seed by seed; beside each difference is the smallest that 80 % of such
experiments would have detected."""
CHANGES: dict[str, dict[str, Any]] = {
  'no clip': {'clip_threshold': math.inf},
  'no weight-wise floor': {'ratios': ('row', 'column')},
  'weight-wise ratio only': {'ratios': ('weight',)},
  'l2 norms, element-wise': {
    'chain': Chain(('adam', 'decay', 'l2 merit', 'clip'))
  },
  'trust ratio on matrices only': {'trust_ratio': 'matrices'},
  'min_norm 0.01': {'min_norm': 0.01},
  'decay outside the ratio': {
    'chain': Chain(('adam', 'merit', 'clip', 'decay'))
  },
  'no weight decay': {'weight_decay': 0.0},
  'weight decay 0.1': {'weight_decay': 0.1},
  'Q, K, V split': {'qkv': 'split'},
  'Q, K, V per head': {'qkv': 'heads'},
}
"""Settings by name; Q, K and V are fused where not said else."""
# Enough to see 0.01: parts are worth little here, the paper saw 0.024.
_SEEDS = 10


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans the changes, each with a tuning of its own."""
  num_seeds = _SEEDS if scale.num_seeds > 1 else scale.num_seeds
  full = yield from Case(scale, MERIT, scale.batch_size).find_point(num_seeds)
  start = full.tuned.learning_rate
  changed = yield from gather(
    {
      name: Case(
        scale,
        dataclasses.replace(MERIT, name=name, settings=settings),
        scale.batch_size,
      ).find_point(num_seeds, start)
      for name, settings in CHANGES.items()
    }
  )
  return [full, *changed.values()]


def tables(points: list[Point]) -> t.Tables:
  """Returns the losses, and what each part is worth."""
  full, *_ = points

  def over_full(point: Point, form: Callable[[Difference], str]) -> str:
    return '' if point is full else form(paired_difference(point, full))

  cells = {
    'loss': t.loss,
    'minus MERIT': lambda x: over_full(x, str),
    'detectable': lambda x: over_full(x, t.format_detectable),
    'learning rate': t.rate,
  }
  return {'losses': t.pivot(points, ['optimizer'], cells=cells)}
