"""What a learning rate costs that is too low or too high."""

from matplotlib.figure import Figure

from examples.study.analysis import figures, logits, tables as t
from examples.study.optimizers import ALL
from examples.study.points import Point
from examples.study.render import panels
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, gather_lists

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
  return gather_lists(
    {x.name: _plan_multiples(Case(scale, x, scale.batch_size)) for x in ALL}
  )


def _plan_multiples(case: Case) -> Plan[list[Point]]:
  tuned = yield from case.find_rate()
  return (yield from case.run_multiples(tuned.learning_rate, FACTORS, _SEEDS))


def tables(points: list[Point]) -> t.Tables:
  """Returns costs and largest logits by factor."""
  found = logits.costs(points)

  def cost(point: Point) -> str:
    return f'{found[point["optimizer"], point["factor"]]:+z.3f}'

  wrong = [x for x in points if x['factor'] != 1]
  peaks = {'': lambda x: logits.format_logit(logits.peak(x))}
  return {
    'costs': t.pivot(wrong, ['optimizer'], 'factor', {'': cost}),
    'largest logits': t.pivot(points, ['optimizer'], 'factor', peaks),
  }


def figure(points: list[Point]) -> Figure:
  """Draws the cost over the factor."""
  result, ((axes,),) = panels(1, 1)
  result.set_size_inches(6, 3.5)
  figures.draw_costs(axes, points)
  axes.legend(fontsize=7)
  return result
