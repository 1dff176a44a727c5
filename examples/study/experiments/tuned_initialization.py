"""Loss against batch size, with the size of the initial weights tuned too."""

import dataclasses

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import CONTENDERS, KEPT, SIMPLER, Contender
from examples.study.experiments import batch_scaling, sensitivity
from examples.study.experiments.sensitivity import (
  Outcome,
  Tunings,
  Varied,
  best,
)
from examples.study.plans import Plan
from examples.study.points import judge
from examples.study.scales import Scale

TITLE = 'Initial weights tuned too'
_SIZES = (1.0, 2.0, 4.0)
"""Deviations of the initial weights, over that in proportion to the width."""
_MARGIN = 0.02
"""Nats by which a size may be worse at the best learning rate of another, and
gets its own nevertheless: larger weights want higher rates."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune the initial weights at every batch."""
  return sensitivity.plan_with(plan_best, scale)


def plan_best(scale: Scale, contender: Contender, size: int) -> Plan[Varied]:
  """Plans to tune the initial weights, with the best warm-up and b1."""
  usual = yield from sensitivity.plan_best(scale, contender, size)
  tried = {_name(contender): usual.best}
  tunings = {_name(contender): usual.tunings[best(usual.tunings)]}
  # The next sizes, and those beyond where one of them is the best.
  for _ in _SIZES[1:]:
    lowest = best(tunings)
    proposed = neighbors(tried[lowest], tunings)
    tunings |= yield from sensitivity.tune(
      scale, proposed, size, tunings[lowest], _MARGIN
    )
    tried |= proposed
  chosen = tried[best(tunings)]
  if chosen is usual.best:
    return Varied(tunings, chosen, usual.point)
  tuned = tunings[best(tunings)]
  num_seeds = batch_scaling.num_seeds(scale, size)
  point = yield from judge(scale, chosen, size, tuned, num_seeds)
  return Varied(tunings, chosen, point)


def neighbors(contender: Contender, tunings: Tunings) -> dict[str, Contender]:
  """Returns the same with the next sizes, if they have not been tried."""
  i = _SIZES.index(contender.init_scale)
  others = [
    dataclasses.replace(
      contender, settings=contender.settings | {'init_scale': size}
    )
    for size in _SIZES[max(0, i - 1) : i + 2]
  ]
  return {_name(x): x for x in others if _name(x) not in tunings}


def _name(contender: Contender) -> str:
  return f'{contender.init_scale:g} ×'


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses of each at its best, and by size."""
  return '\n\n'.join(
    [
      'As above, and each optimizer with the standard deviation of the initial '
      'weights that suits it best at a batch, embeddings included: '
      f'{", ".join(f"{x:g}" for x in _SIZES)} × that in proportion to the '
      'width, the next one on either side of the best so far '
      f'({SIMPLER.name}: as {KEPT.name}, but for the learning rate). Mean and '
      'standard deviation over fresh seeds:',
      render.markdown(
        batch_scaling.loss_rows(sensitivity.judged(outcome), scale)
      ),
      *sensitivity.differences(outcome, scale),
      'Loss of one seed by size, and the learning rate, which is chosen for '
      'each size (at the smaller batches only if a size is at most '
      f'{_MARGIN:g} worse at the rate of the best one):',
      render.markdown(
        [
          _row(outcome, contender, size)
          for size in scale.batch_sizes
          for contender in CONTENDERS
        ]
      ),
    ]
  )


def _row(outcome: Outcome, contender: Contender, size: int) -> dict[str, str]:
  tunings = outcome[contender.name, size].tunings
  columns = {
    name: sensitivity.format_tuned(tunings[name]) if name in tunings else ''
    for name in (f'{x:g} ×' for x in _SIZES)
  }
  return {'batch': str(size), 'optimizer': contender.name} | columns


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over batch, and over the size at the two largest ones."""
  sizes = scale.batch_sizes[-2:]
  result, ((left, *others),) = render.panels(1, 1 + len(sizes))
  batch_scaling.draw_losses(left, sensitivity.judged(outcome), scale)
  left.set_title('all tuned, equal tokens')
  for size, axes in zip(sizes, others, strict=True):
    # Before there is data, since there may be none.
    axes.set_xscale('log', base=2)
    for contender in CONTENDERS:
      tunings = outcome[contender.name, size].tunings
      names = [x for x in (f'{y:g} ×' for y in _SIZES) if x in tunings]
      axes.plot(
        [float(x.split()[0]) for x in names],
        [tunings[x].loss for x in names],
        'o-',
        color=render.COLORS[contender.name],
      )
    axes.set_xticks(_SIZES, [f'{x:g} ×' for x in _SIZES])
    axes.set_xlabel('standard deviation over 0.02 × √(768 / width)')
    axes.set_title(f'batch {size}, one seed')
  return result
