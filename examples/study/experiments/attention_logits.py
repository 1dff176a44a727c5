"""Attention logits at the learning rates chosen and above, with bounds too."""

from typing import Any

from matplotlib.figure import Figure

from examples.study.analysis import figures, logits, tables as t
from examples.study.optimizers import COMPARED
from examples.study.points import Point
from examples.study.render import panels
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, gather_lists

TITLE = 'Attention logits'
TEXT = """\
Multiples of the learning rate that was chosen without a bound, with usual
warm-up, b1 and initial weights. Mean loss of two seeds, and in brackets their
largest raw logit of all heads, layers and diagnostics steps. QK-clip has a
bound of 50."""
FACTORS = (1, 2, 4)
"""Multiples of the learning rate chosen."""
BOUNDS: dict[str, dict[str, Any]] = {
  'none': {},
  'QK-norm': {'qk_norm': True},
  'QK-clip': {'qk_clip': 50.0},
}
"""Settings by what bounds the logits."""
_SEEDS = (1, 2)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans runs with diagnostics, at rates chosen without a bound."""
  cases = {x.name: Case(scale, x, scale.batch_size) for x in COMPARED}
  return gather_lists(
    {
      name: case.run_variants('bound', BOUNDS, FACTORS, _SEEDS)
      for name, case in cases.items()
    }
  )


def tables(points: list[Point]) -> t.Tables:
  """Returns losses and largest logits."""
  cells = {'': logits.loss_and_peak}
  rows = t.pivot(points, ['optimizer', 'bound'], 'factor', cells)
  return {'losses and logits': rows}


def figure(points: list[Point]) -> Figure:
  """Draws the largest logit over training, by factor and bound."""
  result, all_axes = panels(3, 3, sharex=True, sharey='row')
  for bound, row in zip(BOUNDS, all_axes, strict=True):
    for factor, axes in zip(FACTORS, row, strict=True):
      figures.draw_logits(axes, t.select(points, bound=bound, factor=factor))
      axes.set_title(f'{factor} × the rate, bound: {bound}', fontsize=9)
    row[0].set_ylabel('largest logit')
  all_axes[0, 0].legend(fontsize=7)
  return result
