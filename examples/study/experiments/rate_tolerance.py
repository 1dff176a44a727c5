"""What a learning rate costs that is too low or too high."""

import itertools
import math
import statistics

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import WITH_SIMPLER as CONTENDERS
from examples.study.experiments.attention_logits import peak
from examples.study.plans import Plan, Result, gather
from examples.study.points import find_rate, run_seeds
from examples.study.scales import Scale

TITLE = 'What a wrong learning rate costs'
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the learning rate chosen."""
_SEEDS = (1, 2)

Outcome = dict[tuple[str, float], list[Result]]
"""Results of all seeds by contender and factor."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans runs of fresh seeds at multiples of the rates chosen."""
  rates = yield from gather(
    {x.name: find_rate(scale, x, scale.batch_size) for x in CONTENDERS}
  )
  return (
    yield from gather(
      {
        (x.name, factor): run_seeds(
          scale, x, factor * rates[x.name].learning_rate, _SEEDS
        )
        for x, factor in itertools.product(CONTENDERS, FACTORS)
      }
    )
  )


def cost(outcome: Outcome, name: str, factor: float) -> float:
  """Returns the mean loss over that of the same seeds at the rate chosen.

  It is infinite where a run diverged.
  """
  pairs = zip(outcome[name, factor], outcome[name, 1.0], strict=True)
  costs = [wrong.loss - chosen.loss for wrong, chosen in pairs]
  return statistics.mean(costs) if all(map(math.isfinite, costs)) else math.inf


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns costs by factor, and who bears a wrong guess best."""
  most = max(FACTORS)
  rows = [
    {'optimizer': x.name}
    | {
      f'{factor:g} × the rate': _format(cost(outcome, x.name, factor))
      for factor in FACTORS
      if factor != 1
    }
    | {
      f'largest logit, {most:g} ×': render.format_logit(
        peak(outcome[x.name, most])
      )
    }
    for x in CONTENDERS
  ]
  return (
    f'Batch {scale.batch_size}; loss over that of the same {len(_SEEDS)} seeds '
    'at the learning rate chosen, mean; and the largest attention logit of '
    f'all layers, diagnostics steps and seeds at the largest rate.\n\n'
    f'{render.markdown(rows)}\n\n' + _least(outcome)
  )


def _format(loss: float) -> str:
  return f'{loss:+z.3f}' if math.isfinite(loss) else 'diverged'


def _least(outcome: Outcome) -> str:
  """Returns what a guess costs at the worst that is at most half or twice."""
  worst = {
    x.name: max(cost(outcome, x.name, factor) for factor in (0.5, 2.0))
    for x in CONTENDERS
  }
  ranked = sorted(worst, key=worst.__getitem__)
  told = ', '.join(f'{name} {_format(worst[name])}' for name in ranked)
  return f'The worse of half and twice the rate: {told}.'


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the cost over the factor, without runs that diverged."""
  result, ((axes,),) = render.panels(1, 1)
  result.set_size_inches(6, 3.5)
  for x in CONTENDERS:
    costs = [cost(outcome, x.name, factor) for factor in FACTORS]
    drawn = [y if math.isfinite(y) else math.nan for y in costs]
    axes.plot(FACTORS, drawn, 'o-', label=x.name, color=render.COLORS[x.name])
  axes.set_xscale('log', base=2)
  axes.set_xticks(FACTORS, [f'{factor:g} ×' for factor in FACTORS])
  axes.set_xlabel('learning rate over the one chosen')
  axes.set_ylabel(f'loss over that of the one chosen, batch {scale.batch_size}')
  axes.set_ylim(top=0.5)
  axes.legend(fontsize=7)
  return result
