"""What the standard deviation of the first weights decides."""

import functools

from matplotlib.figure import Figure

from examples.study import render
from examples.study.differences import difference, sentence
from examples.study.plans import Plan, gather
from examples.study.points import CONTENDERS, Point, select_point
from examples.study.scales import Scale

TITLE = 'Initialization'
NAMES = ('AdamW', 'MERIT', 'Muon')
_FACTORS = (1.0, 2.0)
"""Standard deviations over the one in proportion, beside 0.02 itself."""
# What did best in first trials, by contender: at 0.02, and above it.
_STARTS = {
  'AdamW': (0.0057, 0.011),
  'MERIT': (0.04, 0.028),
  'Muon': (0.02, 0.028),
}
_SEEDS = 3

Outcome = dict[tuple[str, float], Point]
"""Points by contender and standard deviation."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose each contender's rate for each standard deviation."""
  return gather(
    {
      (name, std): select_point(
        name,
        functools.partial(
          scale.run,
          batch_size=scale.largest_batch,
          init_std=std,
          **CONTENDERS[name],
        ),
        start=_STARTS[name][std > GPT2],
        seeds=_SEEDS,
      )
      for name in NAMES
      for std in deviations(scale)
    }
  )


GPT2 = 0.02
"""GPT-2's standard deviation."""


def deviations(scale: Scale) -> list[float]:
  """Returns the standard deviations that are compared."""
  return [GPT2, *(float(f'{x * scale.init_std:.3g}') for x in _FACTORS)]


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, and what the initialization is worth."""
  stds = deviations(scale)
  rows = [
    {'optimizer': name}
    | {
      f'std {std:g}': f'{render.format_point(outcome[name, std])} '
      f'({render.format_learning_rate(outcome[name, std].tuned)})'
      for std in stds
    }
    for name in NAMES
  ]
  return '\n\n'.join(
    [
      f'Batch {scale.largest_batch}. GPT-2 small has {GPT2:g} at width 768, in '
      f'proportion {stds[1]:g} here. Mean and standard deviation over '
      f'{_SEEDS} seeds, and the learning rate:',
      render.markdown(rows),
      *(
        f'At {std:g}: '
        + sentence('MERIT', other, _between(outcome, other, std))
        for std in stds
        for other in ('AdamW', 'Muon')
      ),
    ]
  )


def _between(outcome: Outcome, other: str, std: float):
  return difference(outcome['MERIT', std], outcome[other, std])


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the tunings, a panel for each standard deviation."""
  stds = deviations(scale)
  result, (row,) = render.panels(1, len(stds), sharey=True)
  for std, axes in zip(stds, row, strict=True):
    for name in NAMES:
      render.draw_tuning(
        axes, outcome[name, std].tuned, name, color=render.COLORS[name]
      )
    axes.set_title(f'standard deviation {std:g}')
  render.limit_losses(row[0], [point.tuned for point in outcome.values()])
  row[0].legend()
  return result
