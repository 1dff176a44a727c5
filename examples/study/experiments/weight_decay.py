"""Loss against batch size, with the weight decay tuned too."""

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import KEPT, MUON, PAPER, SIMPLER
from examples.study.experiments import (
  batch_scaling,
  sensitivity,
  tuned_initialization,
)
from examples.study.plans import Plan, gather
from examples.study.scales import DECAY, Scale
from examples.study.variants import (
  Ladder,
  Outcome,
  climb,
  judged,
  table,
)

TITLE = 'Weight decay tuned too'
CONTENDERS = (*PAPER, MUON)
"""Those that decay; where norms are kept, nothing does."""
_LADDER = Ladder(
  'weight_decay', (0.0, DECAY, 0.1, 0.3, 1.0), DECAY, 'λ {:g}', margin=0.02
)
_NAMES = {x.name for x in CONTENDERS}


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans to tune the weight decay at every batch."""
  usual = yield from tuned_initialization.plan(scale)
  found = yield from gather(
    {
      (name, size): climb(scale, varied, _LADDER)
      for (name, size), varied in usual.items()
      if name in _NAMES
    }
  )
  return usual | found


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses of each at its best, and by weight decay."""
  return '\n\n'.join(
    [
      'As above, and each optimizer with the weight decay that suits it best '
      f'at a batch: {", ".join(f"{x:g}" for x in _LADDER.values)}, the next '
      f'one on either side of the best so far, from {DECAY:g} on '
      f'({KEPT.name} and {SIMPLER.name}: as above, without any). Mean and '
      'standard deviation over fresh seeds:',
      render.markdown(batch_scaling.loss_rows(judged(outcome), scale)),
      *sensitivity.differences(outcome, scale),
      'Loss of one seed by weight decay, and the learning rate, which is '
      'chosen for each (at the smaller batches only if a weight decay is at '
      f'most {_LADDER.margin:g} worse at the rate of the best one):',
      table(outcome, CONTENDERS, _LADDER),
    ]
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over batch, and what each weight decay changes, by batch."""
  result, (panels,) = render.panels(1, 1 + len(CONTENDERS))
  left, *others = panels
  batch_scaling.draw_losses(left, judged(outcome), scale)
  left.set_title('all tuned, equal tokens')
  for contender, axes in zip(CONTENDERS, others, strict=True):
    for size in scale.batch_sizes:
      tunings = outcome[contender.name, size].tunings
      names = [x for x in _LADDER.names if x in tunings]
      usual = tunings[_LADDER.name(contender)].loss
      axes.plot(
        [_LADDER.names.index(x) for x in names],
        [tunings[x].loss - usual for x in names],
        'o-',
        ms=4,
        label=f'batch {size}',
      )
    axes.axhline(0, color='0.5', lw=1)
    axes.set_xticks(
      range(len(_LADDER.values)), [f'{x:g}' for x in _LADDER.values]
    )
    axes.set_xlabel('weight decay')
    axes.set_title(contender.name, fontsize=8)
  others[0].set_ylabel(f'loss over that of λ = {DECAY:g}, one seed')
  others[-1].legend(fontsize=7)
  return result
