"""Whether MERIT's lead is about attention logits: a model that has none."""

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import ADAMW, LAMB, MERIT, PAPER
from examples.study.differences import (
  Difference,
  contrast,
  difference,
  sentence,
)
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_point
from examples.study.scales import Scale

TITLE = 'Mechanism: without attention logits'
_SEEDS = 5
MODELS = {'attention': 'softmax', 'mean of values': 'mean'}
"""What mixes tokens, by name."""

Outcome = dict[tuple[str, str], Point]
"""Points by model and contender."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to choose each optimizer's rate, with attention and without."""
  return gather(
    {
      (model, contender.name): find_point(
        scale,
        contender,
        scale.batch_size,
        num_seeds=_SEEDS,
        attention=attention,
      )
      for model, attention in MODELS.items()
      for contender in PAPER
    }
  )


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses, and whether the lead stays without attention."""
  rows = [
    {'what mixes tokens': model}
    | {x.name: render.format_with_rate(outcome[model, x.name]) for x in PAPER}
    for model in MODELS
  ]
  return '\n\n'.join(
    [
      f'Batch {scale.batch_size}. In the control, queries and keys are zero '
      'and stay so: each token takes the mean of the values so far. Mean and '
      f'standard deviation over {_SEEDS} seeds, and the learning rate:',
      render.markdown(rows),
      *(_compare(outcome, rival.name) for rival in (ADAMW, LAMB)),
    ]
  )


def _compare(outcome: Outcome, rival: str) -> str:
  """Returns MERIT's lead with each model, and whether they differ."""
  own, other = (
    [outcome[model, name] for model in MODELS] for name in (MERIT.name, rival)
  )
  leads = [
    f'With {model}: {sentence(MERIT.name, rival, difference(x, y))}'
    for model, x, y in zip(MODELS, own, other, strict=True)
  ]
  with_attention, without = zip(own, other, strict=True)
  change = contrast(
    [with_attention[0], without[1]], [with_attention[1], without[0]]
  )
  return ' '.join(
    [
      *leads,
      f'The difference of these differences: {change}.',
      verdict(rival, difference(*with_attention), difference(*without), change),
    ]
  )


def verdict(
  rival: str, full: Difference, without: Difference, change: Difference
) -> str:
  """Returns whether MERIT's lead is about attention logits.

  Args:
    rival: The optimizer that it is compared with.
    full: MERIT's loss over the rival's, with attention.
    without: The same where there are no attention logits.
    change: The first over the second.
  """
  lead = f"MERIT's lead over {rival}"
  if not full.high < 0:
    return f'There is no lead over {rival} to explain.'
  if without.high < 0 <= change.high:
    return (
      f'So {lead} does not need attention logits: without them it is as large, '
      'as far as can be seen.'
    )
  if without.high < 0:
    share = without.mean / full.mean
    return f'So {share:.0%} of {lead} is left without attention logits.'
  if change.high < 0:
    return f'So {lead} needs attention logits.'
  return f'So it stays open whether {lead} needs attention logits.'


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the tunings, a panel for each model."""
  del scale
  return render.draw_tunings(
    {
      model: {x.name: outcome[model, x.name].tuned for x in PAPER}
      for model in MODELS
    },
    sharey=False,
  )
