"""MERIT with other thresholds of the element-wise clip."""

import math

from examples.study.analysis import logits, tables as t
from examples.study.optimizers import MERIT
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan

TITLE = 'Threshold of the clip'
TEXT = """\
Multiples of the rate of MERIT as it is. Losses of two seeds; the largest share
of a layer’s elements whose update was clipped, over seeds and diagnostics
steps."""
THRESHOLDS = {'0.5': 0.5, '1': 1.0, '2': 2.0, '5': 5.0, 'none': math.inf}
FACTORS = (1, 2, 4)
"""Multiples of the learning rate chosen."""
_SEEDS = (1, 2)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans runs with diagnostics at the rate of MERIT, and beyond it."""
  case = Case(scale, MERIT, scale.batch_size)
  variants = {name: {'clip_threshold': x} for name, x in THRESHOLDS.items()}
  return case.run_variants('threshold', variants, FACTORS, _SEEDS)


def tables(points: list[Point]) -> t.Tables:
  """Returns losses and shares by threshold."""
  losses = {'': lambda x: ', '.join(map(t.format_loss, x.losses))}
  shares = {'': lambda x: f'{logits.largest_share(x):.1%}'}
  return {
    'losses': t.pivot(points, ['threshold'], 'factor', losses),
    'most clipped': t.pivot(points, ['threshold'], 'factor', shares),
  }
