"""Loss against batch size, with the weight decay tuned too."""

import math
from typing import NamedTuple

from matplotlib.figure import Figure

from examples.study import render, variants
from examples.study.contenders import KEPT, MUON, PAPER, SIMPLER
from examples.study.differences import Difference, paired_difference
from examples.study.experiments import (
  batch_scaling,
  sensitivity,
  tuned_initialization,
)
from examples.study.plans import Plan, gather
from examples.study.scales import DECAY, Scale
from examples.study.variants import (
  Ladder,
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


class Outcome(NamedTuple):
  """What came out.

  Attributes:
    usual: What was tried without tuning the weight decay.
    tuned: The same, with the contenders' weight decay tuned.
  """

  usual: variants.Outcome
  tuned: variants.Outcome


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
  return Outcome(usual, usual | found)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the losses of each at its best, and what the decays change."""
  return '\n\n'.join(
    [
      'As above, and each optimizer with the weight decay λ that suits it best '
      f'at a batch: {", ".join(f"{x:g}" for x in _LADDER.values)}, the next '
      f'one on either side of the best so far, from {DECAY:g} on '
      f'({KEPT.name} and {SIMPLER.name}: as above, without any). Mean and '
      'standard deviation over fresh seeds:',
      render.markdown(batch_scaling.loss_rows(judged(outcome.tuned), scale)),
      *sensitivity.differences(outcome.tuned, scale),
      'Loss of one seed by weight decay, and the learning rate, which is '
      'chosen for each (at the smaller batches only if a weight decay is at '
      f'most {_LADDER.margin:g} worse at the rate of the best one):',
      table(outcome.tuned, CONTENDERS, _LADDER),
      'The λ with the lowest loss of that seed and, where it is not '
      f'{DECAY:g}, by how much it changes the loss of fresh seeds, seed by '
      'seed:',
      render.markdown([_row(outcome, x.name, scale) for x in CONTENDERS]),
      _advice(outcome),
    ]
  )


def changes(outcome: Outcome) -> dict[tuple[str, int], Difference]:
  """Returns what another weight decay changes, where one was chosen."""
  return {
    key: paired_difference(varied.point, outcome.usual[key].point)
    for key, varied in outcome.tuned.items()
    if varied.best is not outcome.usual[key].best
  }


def _row(outcome: Outcome, name: str, scale: Scale) -> dict[str, str]:
  found = changes(outcome)
  row = {'optimizer': name}
  for size in scale.batch_sizes:
    chosen = _LADDER.name(outcome.tuned[name, size].best)
    change = f': {found[name, size]}' if (name, size) in found else ''
    row[f'batch {size}'] = chosen + change
  return row


def _advice(outcome: Outcome) -> str:
  """Returns whether another weight decay is worth its tuning."""
  found = {
    f'{name} at batch {size}': x for (name, size), x in changes(outcome).items()
  }
  gains = [f'{where} ({x})' for where, x in found.items() if x.high < 0]
  costs = [f'{where} ({x})' for where, x in found.items() if x.low > 0]
  if not gains:
    seen = [x.detectable for x in found.values() if math.isfinite(x.detectable)]
    text = f'No other weight decay was seen to be better than {DECAY:g}'
    if seen:
      text += f' ({min(seen):.3f} to {max(seen):.3f} would have been seen)'
    text += ': keep it'
  else:
    text = f'Another weight decay than {DECAY:g} pays for {"; ".join(gains)}'
  if costs:
    text += (
      f'. Chosen by one seed it can also cost: {"; ".join(costs)}. Choose it '
      'by more than one seed, or leave it'
    )
  return f'{text}.'


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws loss over batch, and what each weight decay changes, by batch."""
  result, (panels,) = render.panels(1, 1 + len(CONTENDERS))
  left, *others = panels
  batch_scaling.draw_losses(left, judged(outcome.tuned), scale)
  left.set_title('all tuned, equal tokens')
  for contender, axes in zip(CONTENDERS, others, strict=True):
    for size in scale.batch_sizes:
      tunings = outcome.tuned[contender.name, size].tunings
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
