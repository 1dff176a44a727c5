"""Attention logits at the learning rates chosen and above, with bounds too."""

import itertools

from matplotlib.figure import Figure

from examples.study.analysis.logits import draw_logits, loss_and_peak
from examples.study.analysis.tables import Tables, pivot, select, values
from examples.study.optimizers import COMPARED
from examples.study.points import Point
from examples.study.render import panels
from examples.study.scales import Scale
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.points import find_rate, run_seeds

TITLE = 'Attention logits'
TEXT = """\
Multiples of the learning rate that was chosen without a bound, with usual
warm-up, b1 and initial weights. Two seeds without a bound, one with. Mean loss,
and in brackets the largest raw logit of all heads, layers, seeds and
diagnostics steps. QK-clip has a bound of 50."""
FACTORS = (1, 2, 4)
"""Multiples of the learning rate chosen."""
BOUNDS = {
  'none': {},
  'QK-norm': {'qk_norm': True},
  'QK-clip': {'qk_clip': 50.0},
}
"""Settings by what bounds the logits."""
_SEEDS = {'none': (1, 2), 'QK-norm': (1,), 'QK-clip': (1,)}


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans runs with diagnostics, at rates chosen without a bound."""
  rates = yield from gather(
    {x.name: find_rate(scale, x, scale.batch_size) for x in COMPARED}
  )
  points = yield from gather(
    {
      (x.name, bound, factor): run_seeds(
        scale,
        x,
        scale.batch_size,
        factor * rates[x.name].learning_rate,
        _SEEDS[bound],
        with_diagnostics=True,
        **BOUNDS[bound],
      )
      for x, bound, factor in itertools.product(COMPARED, BOUNDS, FACTORS)
    }
  )
  return [
    point.labelled(bound=bound, factor=factor)
    for (_, bound, factor), point in points.items()
  ]


def tables(points: list[Point]) -> Tables:
  """Returns losses and largest logits."""
  cells = {'': loss_and_peak}
  return {
    'losses and logits': pivot(points, ['optimizer', 'bound'], 'factor', cells)
  }


def figure(points: list[Point]) -> Figure:
  """Draws the largest logit over training, by factor and bound."""
  bounds, factors = (values(points, name) for name in ('bound', 'factor'))
  result, all_axes = panels(
    len(bounds), len(factors), sharex=True, sharey='row'
  )
  for bound, row in zip(bounds, all_axes, strict=True):
    for factor, axes in zip(factors, row, strict=True):
      draw_logits(axes, select(points, bound=bound, factor=factor))
      axes.set_title(f'{factor} × the rate, bound: {bound}', fontsize=9)
    row[0].set_ylabel('largest logit')
  all_axes[0, 0].legend(fontsize=7)
  return result
