"""Loss against batch size, with the size of the initial weights tuned too."""

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import CONTENDERS, KEPT, SIMPLER, Contender
from examples.study.experiments import batch_scaling, sensitivity
from examples.study.plans import Plan
from examples.study.scales import Scale
from examples.study.variants import (
  Ladder,
  Outcome,
  Varied,
  climb,
  judged,
  table,
)

TITLE = 'Initial weights tuned too'
_LADDER = Ladder('init_scale', (1.0, 2.0, 4.0), 1.0, '{:g} ×', margin=0.02)
"""Deviations of the initial weights, over that in proportion to the width;
larger ones want higher rates."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune the initial weights at every batch."""
  return sensitivity.plan_with(plan_best, scale)


def plan_best(scale: Scale, contender: Contender, size: int) -> Plan[Varied]:
  """Plans to tune the initial weights, with the best warm-up and b1."""
  usual = yield from sensitivity.plan_best(scale, contender, size)
  return (yield from climb(scale, usual, _LADDER))


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses of each at its best, and by size."""
  return '\n\n'.join(
    [
      'As above, and each optimizer with the standard deviation of the initial '
      'weights that suits it best at a batch, embeddings included: '
      f'{", ".join(f"{x:g}" for x in _LADDER.values)} × that in proportion to '
      'the width, the next one on either side of the best so far '
      f'({SIMPLER.name}: as {KEPT.name}, but for the learning rate). Mean and '
      'standard deviation over fresh seeds:',
      render.markdown(batch_scaling.loss_rows(judged(outcome), scale)),
      *sensitivity.differences(outcome, scale),
      'Loss of one seed by size, and the learning rate, which is chosen for '
      'each size (at the smaller batches only if a size is at most '
      f'{_LADDER.margin:g} worse at the rate of the best one):',
      table(outcome, CONTENDERS, _LADDER),
    ]
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over batch, and over the size at the two largest ones."""
  sizes = scale.batch_sizes[-2:]
  result, ((left, *others),) = render.panels(1, 1 + len(sizes))
  batch_scaling.draw_losses(left, judged(outcome), scale)
  left.set_title('all tuned, equal tokens')
  for size, axes in zip(sizes, others, strict=True):
    # Before there is data, since there may be none.
    axes.set_xscale('log', base=2)
    for contender in CONTENDERS:
      tunings = outcome[contender.name, size].tunings
      names = [x for x in _LADDER.names if x in tunings]
      axes.plot(
        [float(x.split()[0]) for x in names],
        [tunings[x].loss for x in names],
        'o-',
        color=render.COLORS[contender.name],
      )
    axes.set_xticks(_LADDER.values, _LADDER.names)
    axes.set_xlabel('standard deviation over 0.02 × √(768 / width)')
    axes.set_title(f'batch {size}, one seed')
  return result
