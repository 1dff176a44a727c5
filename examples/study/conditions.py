"""The claims again: in a deeper model, and at a larger batch."""

from typing import Any, NamedTuple

from matplotlib.figure import Figure

from examples.study import render
from examples.study.ablation import find_variant
from examples.study.attention_logits import peak
from examples.study.plans import Plan, Result, Run, gather
from examples.study.points import PAPER, Point, find_point, run_at
from examples.study.scales import Scale
from examples.study.tuning import Tuned, tune

TITLE = 'Other conditions'
_BUDGET = 3
_WEIGHT_ONLY = 'MERIT, weight-wise ratio only'
_CHANGES: dict[str, dict[str, Any]] = {_WEIGHT_ONLY: {'ratios': ('weight',)}}
"""Settings beside those of the optimizer, by contender."""


class TunedRun(NamedTuple):
  """What came out for an optimizer under a condition.

  Attributes:
    tuned: Losses by learning rate.
    best: Run with diagnostics at the best of them.
  """

  tuned: Tuned
  best: Result


Outcome = dict[str, dict[str, TunedRun]]
"""By condition and optimizer."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune the paper's optimizers under each condition."""
  most = scale.largest_batch
  points = yield from gather(
    {name: find_point(scale, name, most) for name in PAPER}
  )
  points[_WEIGHT_ONLY] = yield from find_variant(
    scale, points['MERIT'], **_CHANGES[_WEIGHT_ONLY]
  )
  results = yield [
    run_at(scale, point, **_CHANGES.get(name, {}))
    for name, point in points.items()
  ]
  num_layers = scale.run('merit', most, 1.0).config.num_layers
  tuned = yield from gather(
    {
      f'{2 * num_layers} layers, batch {most}': _tune_all(
        scale, points, num_layers=2 * num_layers
      ),
      f'{num_layers} layers, batch {2 * most}': _tune_all(
        scale, points, batch_size=2 * most
      ),
    }
  )
  as_above = {
    name: TunedRun(points[name].tuned, result)
    for name, result in zip(points, results, strict=True)
  }
  return {f'{num_layers} layers, batch {most}': as_above} | tuned


def _tune_all(
  scale: Scale, points: dict[str, Point], **changes: Any
) -> Plan[dict[str, TunedRun]]:
  """Plans to tune all contenders with other settings."""
  return gather(
    {
      name: _tune(scale, point, **_CHANGES.get(name, {}) | changes)
      for name, point in points.items()
    }
  )


def _tune(scale: Scale, point: Point, **changes: Any) -> Plan[TunedRun]:
  """Plans to tune around the best at the largest batch."""

  def run(learning_rate: float) -> Run:
    return run_at(scale, point, learning_rate=learning_rate, **changes)

  tuned = yield from tune(run, point.tuned.learning_rate, _BUDGET)
  (best,) = yield [run(tuned.learning_rate)]
  return TunedRun(tuned, best)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns whether the order of the optimizers holds."""
  del scale
  rows = [
    {
      'condition': condition,
      'optimizer': name,
      'loss': render.format_loss(found.best.loss),
      'learning rate': render.format_learning_rate(found.tuned),
      'largest logit, by layer': render.format_logits(peak(found.best)),
    }
    for condition, by_name in outcome.items()
    for name, found in by_name.items()
  ]
  return (
    'One seed. In other conditions than those of the tables above, learning '
    f'rates were tuned with {_BUDGET} runs around theirs. Logits are the '
    'largest of all diagnostics steps.\n\n'
    + render.markdown([_summary(*x) for x in outcome.items()])
    + '\n\n'
    + render.markdown(rows)
  )


def _summary(condition: str, by_name: dict[str, TunedRun]) -> dict[str, str]:
  losses = {name: found.best.loss for name, found in by_name.items()}
  last = {name: peak(found.best)[-1] for name, found in by_name.items()}
  return {
    'condition': condition,
    'order of losses': ' < '.join(sorted(losses, key=losses.__getitem__)),
    'order of logits in the last layer': ' < '.join(
      sorted(last, key=last.__getitem__)
    ),
  }


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over learning rate under each condition."""
  del scale
  result, (row,) = render.panels(1, len(outcome), sharey=True)
  for (condition, by_name), axes in zip(outcome.items(), row, strict=True):
    for name, found in by_name.items():
      render.draw_tuning(
        axes, found.tuned, name, color=render.COLORS.get(name, 'tab:olive')
      )
    axes.set_title(condition)
  render.limit_losses(
    row[0],
    [found.tuned for x in outcome.values() for found in x.values()],
  )
  row[0].legend()
  return result
