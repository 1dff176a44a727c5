"""Final loss against global batch, at equal tokens."""

from examples.study.analysis import tables as t
from examples.study.optimizers import ALL, COMPARED, STACKED_LAMB, Optimizer
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, find_rates, gather, gather_lists

TITLE = 'Loss against batch size'
TEXT = """\
The usual settings: a warm-up of 10 %, a b1 of 0.9 (with Muon and Hyperball
0.95), initial weights in proportion to the width (with Hyperball twice that).
At the scale mini, a warm-up of 30 % and a b1 of 0.8 (with Hyperball 10 % and
0.8). Learning rates are chosen for each optimizer and batch; mean and standard
deviation over fresh seeds, if there are any."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans to tune all optimizers at all batches."""
  # The scale that finds the rules compares Hyperball with warm-up and b1 tuned.
  optimizers = COMPARED if scale.finds_rules else ALL
  points = yield from gather_lists(
    {x.name: _plan_batches(scale, x) for x in optimizers}
  )
  if not scale.num_seeds:  # Runs are too dear for a comparison by the way.
    return points
  stacked = Case(scale, STACKED_LAMB, scale.batch_size)
  return [*points, (yield from stacked.find_point(scale.num_seeds))]


def _plan_batches(scale: Scale, optimizer: Optimizer) -> Plan[list[Point]]:
  rates = yield from find_rates(scale, optimizer)
  cases = {x: Case(scale, optimizer, x) for x in rates}
  points = yield from gather(
    {x: case.evaluate(rates[x]) for x, case in cases.items()}
  )
  rules = {x: case.rule_rate for x, case in cases.items()}
  return [
    point.labelled(rule=rules[x]) if rules[x] else point
    for x, point in points.items()
  ]


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and the tuning."""
  ruled = [x for x in points if 'rule' in x.labels]
  return {
    **t.losses(points),
    'tuning': t.pivot(points, ['optimizer', 'batch'], cells=t.TUNING),
    'rates over the rules': t.pivot(
      ruled, ['optimizer'], 'batch', {'': _over_rule}
    ),
  }


def _over_rule(point: Point) -> str:
  return f'{point.tuned.learning_rate / point["rule"]:.2g} ×'
