"""MERIT with other thresholds of the element-wise clip."""

import itertools
import math
import statistics

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import MERIT
from examples.study.plans import Plan, Result, gather
from examples.study.points import find_rate, run_seeds
from examples.study.scales import Scale

TITLE = 'Threshold of the clip'
THRESHOLDS = (0.5, 1.0, 2.0, 5.0, math.inf)
FACTORS = (1, 2, 4)
"""Multiples of the learning rate chosen."""
_SEEDS = (1, 2)

Outcome = dict[tuple[int, float], list[Result]]
"""Results of all seeds by factor and threshold."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans runs with diagnostics at the rate of MERIT, and beyond it."""
  tuned = yield from find_rate(scale, MERIT, scale.batch_size)
  return (
    yield from gather(
      {
        (factor, threshold): run_seeds(
          scale,
          MERIT,
          factor * tuned.learning_rate,
          _SEEDS,
          clip_threshold=threshold,
        )
        for factor, threshold in itertools.product(FACTORS, THRESHOLDS)
      }
    )
  )


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns losses and shares by threshold."""
  rows = [
    {'threshold': _name(threshold)}
    | {
      f'loss at {factor} × the rate': _format_losses(outcome[factor, threshold])
      for factor in FACTORS
    }
    | {
      f'most clipped at {factor} ×': format_share(
        largest_share(outcome[factor, threshold])
      )
      for factor in FACTORS
    }
    for threshold in THRESHOLDS
  ]
  return (
    f'Batch {scale.batch_size}, the rate of MERIT as it is. Losses of '
    f'{len(_SEEDS)} seeds; the largest share of a layer’s elements whose '
    'update was clipped, over seeds and diagnostics steps.\n\n'
    + render.markdown(rows)
    + f'\n\n{_verdict(outcome)}'
  )


def _verdict(outcome: Outcome) -> str:
  """Returns at which rates the clip of the paper lowers the loss."""
  told = []
  for factor in FACTORS:
    clipped, free = (
      [x.loss for x in outcome[factor, threshold]]
      for threshold in (1.0, math.inf)
    )
    if max(clipped) >= min(free):
      words = 'they do not all end below those without a clip'
    elif math.isinf(max(free)):
      words = 'all seeds end below those without a clip, which diverge'
    else:
      gain = statistics.mean(free) - statistics.mean(clipped)
      words = (
        f'all seeds end below all without a clip, by {gain:.3f} in the mean'
      )
    told.append(f'at {factor} × the rate {words}')
  return f'With the threshold of 1, {"; ".join(told)}.'


def _name(threshold: float) -> str:
  return 'none' if math.isinf(threshold) else f'{threshold:g}'


def _format_losses(results: list[Result]) -> str:
  return ', '.join(render.format_loss(x.loss) for x in results)


def largest_share(results: list[Result]) -> float:
  """Returns the largest share of clipped elements of a layer.

  It is NaN where a run diverged or was not measured.
  """
  shares = [
    share
    for result in results
    for layers in result.diagnostics['clipped']
    for share in layers
  ]
  has_diverged = any(math.isinf(x.loss) for x in results)
  return math.nan if has_diverged or not shares else max(shares)


def format_share(share: float) -> str:
  """Returns a share as text."""
  return 'diverged' if math.isnan(share) else f'{share:.1%}'


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws the loss over the threshold, by factor of the rate."""
  del scale
  result, ((axes,),) = render.panels(1, 1)
  result.set_size_inches(6, 3.5)
  positions = range(len(THRESHOLDS))
  for factor in FACTORS:
    found = [outcome[factor, threshold] for threshold in THRESHOLDS]
    means = [statistics.mean(x.loss for x in results) for results in found]
    drawn = [x if math.isfinite(x) else math.nan for x in means]
    axes.plot(positions, drawn, 'o-', label=f'{factor} × the rate')
  axes.set_xticks(positions, map(_name, THRESHOLDS))
  axes.set_xlabel('threshold of the clip')
  axes.set_ylabel('validation loss')
  axes.legend()
  return result
