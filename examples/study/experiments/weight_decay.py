"""Loss against batch size, with the weight decay tuned too."""

from collections.abc import Mapping
import math
from typing import NamedTuple

from matplotlib.figure import Figure

from examples.study import render, variants
from examples.study.contenders import KEPT, MUON, PAPER, SIMPLER
from examples.study.differences import (
  Difference,
  contrast_samples,
  paired_difference,
)
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
  alone, together = changes(outcome), pooled(outcome)
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
      render.markdown(
        [_row(outcome, alone, x.name, scale) for x in CONTENDERS]
      ),
      *(f'{where}: {x} in the mean.' for where, x in together.items()),
      _advice(
        {f'{name}, batch {size}': x for (name, size), x in alone.items()}
        | together
      ),
    ]
  )


def changes(outcome: Outcome) -> dict[tuple[str, int], Difference]:
  """Returns what another weight decay changes, where one was chosen."""
  return {
    key: paired_difference(varied.point, outcome.usual[key].point)
    for key, varied in outcome.tuned.items()
    if varied.best is not outcome.usual[key].best
  }


def pooled(outcome: Outcome) -> dict[str, Difference]:
  """Returns the mean change of a weight decay chosen at several batches."""
  sizes: dict[tuple[str, str], list[int]] = {}
  for name, size in changes(outcome):
    decay = _LADDER.name(outcome.tuned[name, size].best)
    sizes.setdefault((name, decay), []).append(size)
  return {
    f'{name}, {decay}, batches {", ".join(map(str, x))}': contrast_samples(
      [[y for size in x for y in _by_seed(outcome, (name, size))]], []
    )
    for (name, decay), x in sizes.items()
    if len(x) > 1
  }


def _by_seed(outcome: Outcome, key: tuple[str, int]) -> list[float]:
  """Returns the change of each fresh seed."""
  pairs = zip(
    outcome.tuned[key].point.losses,
    outcome.usual[key].point.losses,
    strict=True,
  )
  return [one - other for one, other in pairs]


def _row(
  outcome: Outcome,
  found: Mapping[tuple[str, int], Difference],
  name: str,
  scale: Scale,
) -> dict[str, str]:
  row = {'optimizer': name}
  for size in scale.batch_sizes:
    chosen = _LADDER.name(outcome.tuned[name, size].best)
    change = f': {found[name, size]}' if (name, size) in found else ''
    row[f'batch {size}'] = chosen + change
  return row


def _advice(found: Mapping[str, Difference]) -> str:
  """Returns whether another weight decay is worth its tuning."""
  known = {where: x for where, x in found.items() if not math.isnan(x.high)}
  if found and not known:
    return (
      f'Whether another weight decay than {DECAY:g} is better is not known: '
      'seeds diverged, or are too few.'
    )
  gains = [f'{where} ({x})' for where, x in known.items() if x.high < 0]
  costs = [f'{where} ({x})' for where, x in known.items() if x.low > 0]
  if gains:
    text = f'Another weight decay than {DECAY:g} pays for {"; ".join(gains)}'
  else:
    text = f'No other weight decay was seen to be better than {DECAY:g}'
  limits = [x.detectable for x in known.values() if x.low <= 0 <= x.high]
  if limits:
    text += (
      f'. Where none was seen, changes of {min(limits):.3f} to '
      f'{max(limits):.3f} would have been'
    )
  if costs:
    text += (
      f'. Chosen by one seed it can also cost: {"; ".join(costs)}. Choose it '
      f'by more than one seed, or take {DECAY:g}'
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
