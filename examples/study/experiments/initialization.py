"""What the standard deviation of the initial weights decides."""

from matplotlib.figure import Figure

from examples.gpt2.model.config import INIT_STD
from examples.study import render
from examples.study.contenders import ADAMW, MERIT, MUON
from examples.study.differences import difference, sentence
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_point
from examples.study.scales import Scale

TITLE = 'Initialization'
CONTENDERS = (ADAMW, MERIT, MUON)
_FACTORS = (1.0, 2.0)
"""Standard deviations over the one in proportion, beside GPT-2's itself."""
_GPT2_STARTS = {'AdamW': 0.0057, 'MERIT': 0.04, 'Muon': 0.02}
"""First guesses of the learning rate, for GPT-2's standard deviation."""

Outcome = dict[tuple[str, float], Point]
"""Points by contender and standard deviation."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose each contender's rate for each standard deviation."""
  return gather(
    {
      (contender.name, std): find_point(
        scale,
        contender,
        scale.batch_size,
        start=_GPT2_STARTS[contender.name]
        if std == INIT_STD != scale.init_std
        else None,
        init_std=std,
      )
      for contender in CONTENDERS
      for std in deviations(scale)
    }
  )


def deviations(scale: Scale) -> list[float]:
  """Returns the standard deviations that are compared."""
  scaled = [float(f'{x * scale.init_std:.3g}') for x in _FACTORS]
  return sorted({INIT_STD, *scaled})


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, and what the initialization is worth."""
  stds = deviations(scale)
  rows = [
    {'optimizer': contender.name}
    | {
      f'std {std:g}': render.format_with_rate(outcome[contender.name, std])
      for std in stds
    }
    for contender in CONTENDERS
  ]
  return '\n\n'.join(
    [
      f'Batch {scale.batch_size}. GPT-2 small has {INIT_STD:g} at width '
      f'768, in proportion {scale.init_std:g} here. Mean and standard '
      'deviation over seeds, and the learning rate:',
      render.markdown(rows),
      *(
        f'At {std:g}: '
        + sentence(
          MERIT.name,
          other.name,
          difference(outcome[MERIT.name, std], outcome[other.name, std]),
        )
        for std in stds
        for other in (ADAMW, MUON)
      ),
    ]
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the tunings, a panel for each standard deviation."""
  return render.draw_tunings(
    {
      f'standard deviation {std:g}': {
        contender.name: outcome[contender.name, std].tuned
        for contender in CONTENDERS
      }
      for std in deviations(scale)
    }
  )
