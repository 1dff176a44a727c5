"""MERIT with other thresholds of the element-wise clip."""

import itertools
import math
import statistics

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import MERIT
from examples.study.plans import Plan, Result, gather
from examples.study.points import find_rate
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
        (factor, threshold): _plan_seeds(
          scale, factor * tuned.learning_rate, threshold
        )
        for factor, threshold in itertools.product(FACTORS, THRESHOLDS)
      }
    )
  )


def _plan_seeds(
  scale: Scale, learning_rate: float, threshold: float
) -> Plan[list[Result]]:
  return (
    yield [
      MERIT.run(
        scale,
        scale.batch_size,
        float(f'{learning_rate:.3g}'),
        with_diagnostics=True,
        seed=seed,
        clip_threshold=threshold,
      )
      for seed in _SEEDS
    ]
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
      f'most clipped at {factor} ×': f'{largest_share(found):.1%}'
      if (found := outcome[factor, threshold]) and _is_finite(found)
      else 'diverged'
      for factor in FACTORS
    }
    for threshold in THRESHOLDS
  ]
  return (
    f'Batch {scale.batch_size}, the rate of MERIT as it is. Losses of '
    f'{len(_SEEDS)} seeds; the largest share of a layer’s elements whose '
    'update was clipped, over seeds and diagnostics steps.\n\n'
    + render.markdown(rows)
  )


def _name(threshold: float) -> str:
  return 'none' if math.isinf(threshold) else f'{threshold:g}'


def _format_losses(results: list[Result]) -> str:
  return ', '.join(render.format_loss(x.loss) for x in results)


def _is_finite(results: list[Result]) -> bool:
  return all(math.isfinite(x.loss) for x in results)


def largest_share(results: list[Result]) -> float:
  """Returns the largest share of clipped elements of a layer; 0 if unknown."""
  return max(
    (
      share
      for result in results
      for layers in result.diagnostics['clipped']
      for share in layers
    ),
    default=0.0,
  )


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
