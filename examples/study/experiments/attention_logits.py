"""Attention logits at the learning rates chosen and above, with bounds too."""

import itertools
import math
import statistics
from typing import Any

from matplotlib.figure import Figure
from scipy import stats

from examples.study import render
from examples.study.contenders import CONTENDERS
from examples.study.plans import Plan, Result, gather
from examples.study.points import find_rate, run_seeds
from examples.study.scales import Scale

TITLE = 'Attention logits'
FACTORS = (1, 2, 4)
"""Multiples of the learning rate chosen."""
_BOUND = 50.0
BOUNDS: dict[str, dict[str, Any]] = {
  'none': {},
  'QK-norm': {'qk_norm': True},
  'QK-clip': {'qk_clip': _BOUND},
}
"""Settings by what bounds the logits."""
_SEEDS = {'none': (1, 2), 'QK-norm': (1,), 'QK-clip': (1,)}
"""Seeds by bound."""
EXPLODED = 1000.0
"""Largest logits above this are said to have exploded."""

Outcome = dict[tuple[str, str, int], list[Result]]
"""Results of all seeds by contender, bound and factor."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans runs with diagnostics, at rates chosen without a bound."""
  rates = yield from gather(
    {x.name: find_rate(scale, x, scale.batch_size) for x in CONTENDERS}
  )
  return (
    yield from gather(
      {
        (x.name, bound, factor): run_seeds(
          scale,
          x,
          factor * rates[x.name].learning_rate,
          _SEEDS[bound],
          **BOUNDS[bound],
        )
        for x, bound, factor in itertools.product(CONTENDERS, BOUNDS, FACTORS)
      }
    )
  )


def peak(results: list[Result]) -> float:
  """Returns the largest logit of all seeds, layers and diagnostics steps.

  It is infinite where a run diverged, maybe between two of them.
  """
  logits = [
    math.inf if x is None else x
    for result in results
    for layers in result.diagnostics['max_attention_logit']
    for x in layers
  ]
  has_diverged = any(math.isinf(result.loss) for result in results)
  return math.inf if has_diverged or not logits else max(logits)


def last_layer(results: list[Result]) -> float:
  """Returns the largest logit of the last layer, over seeds and steps."""
  if math.isinf(peak(results)):
    return math.inf
  return max(
    layers[-1]
    for result in results
    for layers in result.diagnostics['max_attention_logit']
  )


def mean_loss(results: list[Result]) -> float:
  """Returns the mean over seeds."""
  return statistics.mean(result.loss for result in results)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns losses and largest logits, and how they go together."""
  rows = [
    {'optimizer': contender.name, 'bound': bound}
    | {
      f'{factor} × the rate': _format(outcome[contender.name, bound, factor])
      for factor in FACTORS
    }
    for contender in CONTENDERS
    for bound in BOUNDS
  ]
  return '\n\n'.join(
    [
      f'Batch {scale.batch_size}; {len(_SEEDS["none"])} seeds without a bound, '
      'one with. Mean loss, and in '
      'brackets the largest raw logit of all heads, layers, seeds and '
      f'diagnostics steps. QK-clip has a bound of {_BOUND:g}; rates were '
      'chosen without a bound.',
      render.markdown(rows),
      _bounded(outcome),
      _relation(outcome),
    ]
  )


def _format(results: list[Result]) -> str:
  loss = render.format_loss(mean_loss(results))
  return f'{loss} ({render.format_logit(peak(results))})'


def _bounded(outcome: Outcome) -> str:
  """Returns which optimizers keep their logits small without a bound."""
  most = FACTORS[-1]
  names = [
    x.name for x in CONTENDERS if peak(outcome[x.name, 'none', most]) < EXPLODED
  ]
  return (
    f'Without a bound, at {most} times the rate, the largest logit stays below '
    f'{EXPLODED:,.0f} with: {", ".join(names) or "none of them"}.'
  )


def _relation(outcome: Outcome) -> str:
  """Returns the rank correlation of losses and logits."""
  pairs = [
    (peak(results), mean_loss(results))
    for (_, bound, _), results in outcome.items()
    if bound == 'none'
  ]
  tuned = {x.name: outcome[x.name, 'none', 1] for x in CONTENDERS}
  best = min(tuned, key=lambda name: mean_loss(tuned[name]))
  smallest = min(tuned, key=lambda name: peak(tuned[name]))
  text = (
    f'At the rates chosen, {best} has the lowest loss, and {smallest} the '
    'smallest logits.'
  )
  if min(len(set(values)) for values in zip(*pairs, strict=True)) < 2:
    return text
  found = stats.spearmanr(*zip(*pairs, strict=True))
  return (
    f'{text} Over optimizers and rates without a bound, the rank correlation '
    f'of largest logit and loss is {found.statistic:.2f} (Spearman, '
    f'{len(pairs)} pairs, which are not independent).'
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the largest logit over training, by factor and bound."""
  del scale
  result, all_axes = render.panels(
    len(BOUNDS), len(FACTORS), sharex=True, sharey='row'
  )
  for bound, row in zip(BOUNDS, all_axes, strict=True):
    for factor, axes in zip(FACTORS, row, strict=True):
      for contender in CONTENDERS:
        _draw(axes, outcome[contender.name, bound, factor], contender.name)
      axes.set_yscale('symlog', linthresh=1.0)
      axes.set_title(f'{factor} × the rate, bound: {bound}', fontsize=9)
    row[0].set_ylabel('largest logit')
  all_axes[0, 0].legend(fontsize=7)
  for axes in all_axes[-1]:
    axes.set_xlabel('step')
  return result


def _draw(axes: Any, results: list[Result], name: str) -> None:
  for result in results:
    steps = result.diagnostics['step']
    logits = [
      max(math.nan if x is None else x for x in layers)
      for layers in result.diagnostics['max_attention_logit']
    ]
    label = name if result is results[0] else None
    axes.plot(steps, logits, color=render.COLORS[name], label=label, lw=1.1)
