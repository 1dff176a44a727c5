"""Whether MERIT's lead is about attention logits: a model that has none."""

import functools

from matplotlib.figure import Figure

from examples.study import render
from examples.study.differences import Difference, difference, sentence
from examples.study.plans import Plan, gather
from examples.study.points import Point, select_point
from examples.study.scales import Scale

TITLE = 'Mechanism: without attention logits'
_SEEDS = 5
MODELS = {'attention': 'softmax', 'mean of values': 'mean'}
"""What mixes tokens, by name."""
_CONTENDERS = {
  'AdamW': ({'optimizer': 'adamw'}, 0.011),
  'LAMB': ({'optimizer': 'lamb', 'arm': 'adam corrected > decay > l2'}, 0.028),
  'MERIT': ({'optimizer': 'merit'}, 0.028),
}
"""Settings, and a first guess of the learning rate, by name."""
RIVALS = ('AdamW', 'LAMB')

Outcome = dict[tuple[str, str], Point]
"""Points by model and contender."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose each optimizer's rate, with attention and without."""
  return gather(
    {
      (model, name): select_point(
        name,
        functools.partial(
          scale.run,
          batch_size=scale.largest_batch,
          init_std=scale.init_std,
          attention=attention,
          **settings,
        ),
        start=start,
        seeds=_SEEDS,
      )
      for model, attention in MODELS.items()
      for name, (settings, start) in _CONTENDERS.items()
    }
  )


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, and whether the lead stays without attention."""
  rows = [
    {'what mixes tokens': model}
    | {
      name: f'{render.format_point(outcome[model, name])} '
      f'({render.format_learning_rate(outcome[model, name].tuned)})'
      for name in _CONTENDERS
    }
    for model in MODELS
  ]
  return '\n\n'.join(
    [
      f'Batch {scale.largest_batch}, standard deviation {scale.init_std:g}; '
      'LAMB with a ratio for each layer. In the control, queries and keys are '
      'zero and stay so: each token takes the mean of the values so far. Mean '
      f'and standard deviation over {_SEEDS} seeds, and the learning rate:',
      render.markdown(rows),
      *(
        f'With {model}: '
        + sentence('MERIT', rival, _lead(outcome, model, rival))
        for rival in RIVALS
        for model in MODELS
      ),
    ]
  )


def _lead(outcome: Outcome, model: str, rival: str) -> Difference:
  return difference(outcome[model, 'MERIT'], outcome[model, rival])


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the tunings, a panel for each model."""
  del scale
  result, (row,) = render.panels(1, len(MODELS))
  for model, axes in zip(MODELS, row, strict=True):
    for name in _CONTENDERS:
      render.draw_tuning(
        axes, outcome[model, name].tuned, name, color=render.COLORS[name]
      )
    render.limit_losses(
      axes, [outcome[model, name].tuned for name in _CONTENDERS]
    )
    axes.set_title(model)
  row[0].legend()
  return result
