"""What a learning rate costs that is too low or too high."""

import itertools

from matplotlib.figure import Figure

from examples.study.analysis.figures import draw_lines
from examples.study.analysis.logits import costs, format_logit, peak
from examples.study.analysis.tables import Tables, pivot, select
from examples.study.optimizers import ALL
from examples.study.points import Point
from examples.study.render import panels
from examples.study.scales import Scale
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.points import find_rate, run_seeds

TITLE = 'What a wrong learning rate costs'
TEXT = """\
Usual warm-up, b1 and initial weights: loss over that of the same two seeds at
the learning rate chosen, mean; and the largest attention logit of all layers,
diagnostics steps and seeds."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the learning rate chosen."""
_SEEDS = (1, 2)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans runs of fresh seeds at multiples of the rates chosen."""
  rates = yield from gather(
    {x.name: find_rate(scale, x, scale.batch_size) for x in ALL}
  )
  points = yield from gather(
    {
      (x.name, factor): run_seeds(
        scale,
        x,
        scale.batch_size,
        factor * rates[x.name].learning_rate,
        _SEEDS,
        with_diagnostics=True,
      )
      for x, factor in itertools.product(ALL, FACTORS)
    }
  )
  return [
    point.labelled(factor=factor) for (_, factor), point in points.items()
  ]


def tables(points: list[Point]) -> Tables:
  """Returns costs and largest logits by factor."""
  found = costs(points)

  def cost(point: Point) -> str:
    x = found[point['optimizer'], point['factor']]
    return 'diverged' if x == float('inf') else f'{x:+z.3f}'

  wrong = [x for x in points if x['factor'] != 1]
  return {
    'costs': pivot(wrong, ['optimizer'], 'factor', {'': cost}),
    'largest logits': pivot(
      points, ['optimizer'], 'factor', {'': lambda x: format_logit(peak(x))}
    ),
  }


def figure(points: list[Point]) -> Figure:
  """Draws the loss over the factor, without runs that diverged."""
  result, ((axes,),) = panels(1, 1)
  result.set_size_inches(6, 3.5)
  draw_costs(axes, points)
  axes.legend(fontsize=7)
  return result


def draw_costs(axes, points: list[Point]) -> None:
  """Draws the cost over the factor."""
  found = costs(points)
  draw_lines(
    axes, points, 'factor', lambda x: found[x['optimizer'], x['factor']]
  )
  axes.set_xscale('log', base=2)
  factors = sorted({x['factor'] for x in points})
  axes.set_xticks(factors, [f'{x:g} ×' for x in factors])
  axes.set_xlabel('learning rate over the one chosen')
  axes.set_ylabel('loss over that of the one chosen')
  size = select(points)[0]['batch']
  axes.set_title(f'batch {size}, usual warm-up and b1', fontsize=9)
  axes.set_ylim(top=0.5)
