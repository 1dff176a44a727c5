"""The claims again: in a deeper model, and at a larger batch."""

from typing import Any, NamedTuple

from matplotlib.figure import Figure

from examples.study.ablation import find_variant
from examples.study.attention_logits import peak
from examples.study.plans import Plan, Result, Run, together
from examples.study.points import (
  CONTENDERS,
  PAPER,
  Point,
  find_point,
  run_at,
)
from examples.study.render import (
  COLORS,
  draw_tuning,
  limit_losses,
  markdown,
  panels,
  shown,
  shown_logit,
  shown_rate,
)
from examples.study.scales import Scale
from examples.study.tuning import Tuned, tune

TITLE = 'Other conditions'
_BUDGET = 3
_WEIGHT_ONLY = 'MERIT, weight-wise ratio only'
_CHANGES: dict[str, dict[str, Any]] = {_WEIGHT_ONLY: {'ratios': ('weight',)}}
"""Settings beside those of the optimizer, by contender."""


class Found(NamedTuple):
  """What came out for an optimizer under a condition.

  Attributes:
    tuned: Losses by learning rate.
    best: Watched run at the best rate.
  """

  tuned: Tuned
  best: Result


Outcome = dict[str, dict[str, Found]]
"""By condition and optimizer."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune the paper's optimizers under each condition."""
  most = scale.largest_batch
  found = yield from together(
    *(find_point(scale, name, most) for name in PAPER)
  )
  points = dict(zip(PAPER, found, strict=True))
  points[_WEIGHT_ONLY] = yield from find_variant(
    scale, points['MERIT'], **_CHANGES[_WEIGHT_ONLY]
  )
  results = yield [
    run_at(scale, point, **_CHANGES.get(name, {}))
    for name, point in points.items()
  ]
  num_layers = scale.run('merit', most, 1.0).config.num_layers
  deeper, larger = yield from together(
    _tune_all(scale, points, num_layers=2 * num_layers),
    _tune_all(scale, points, batch_size=2 * most),
  )
  return {
    f'{num_layers} layers, batch {most}': {
      name: Found(points[name].tuned, result)
      for name, result in zip(points, results, strict=True)
    },
    f'{2 * num_layers} layers, batch {most}': deeper,
    f'{num_layers} layers, batch {2 * most}': larger,
  }


def _tune_all(
  scale: Scale, points: dict[str, Point], **changes: Any
) -> Plan[dict[str, Found]]:
  """Plans to tune all contenders with other settings."""
  found = yield from together(
    *(
      _tune(scale, point, **_CHANGES.get(name, {}) | changes)
      for name, point in points.items()
    )
  )
  return dict(zip(points, found, strict=True))


def _tune(scale: Scale, point: Point, **changes: Any) -> Plan[Found]:
  """Plans to tune around the best rate at the largest batch."""
  settings = CONTENDERS[point.name] | {'batch_size': point.batch_size}
  settings |= {'weight_decay': point.weight_decay} | changes

  def run(rate: float) -> Run:
    return scale.run(learning_rate=rate, is_watched=True, **settings)

  tuned = yield from tune(run, point.tuned.rate, _BUDGET)
  (best,) = yield [run(tuned.rate)]
  return Found(tuned, best)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns whether the order of the optimizers holds."""
  del scale
  rows = [
    {
      'condition': condition,
      'optimizer': name,
      'loss': shown(found.best.loss),
      'rate': shown_rate(found.tuned),
      'largest logit, by layer': ', '.join(map(shown_logit, peak(found.best))),
    }
    for condition, by_name in outcome.items()
    for name, found in by_name.items()
  ]
  return (
    'One seed. In other conditions than those of the tables above, rates were '
    f'tuned with {_BUDGET} runs around theirs. Logits are the largest of all '
    'watch steps.\n\n'
    + markdown([_summary(*x) for x in outcome.items()])
    + '\n\n'
    + markdown(rows)
  )


def _summary(condition: str, by_name: dict[str, Found]) -> dict[str, str]:
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
  result, (row,) = panels(1, len(outcome), sharey=True)
  for (condition, by_name), axes in zip(outcome.items(), row, strict=True):
    for name, found in by_name.items():
      draw_tuning(axes, found.tuned, name, color=COLORS.get(name, 'tab:olive'))
    axes.set_title(condition)
  limit_losses(
    row[0],
    [
      loss
      for by_name in outcome.values()
      for found in by_name.values()
      for loss in found.tuned.losses.values()
    ],
  )
  row[0].legend()
  return result
