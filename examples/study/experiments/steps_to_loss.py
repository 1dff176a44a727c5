"""Steps to a loss against global batch: where a larger batch stops paying."""

import math
import statistics
from typing import Any, NamedTuple

from matplotlib.figure import Figure
import numpy as np

from examples.study import render
from examples.study.contenders import CONTENDERS, PAPER, Contender
from examples.study.experiments import batch_scaling
from examples.study.experiments.hyperparameters import fit_rate, num_steps
from examples.study.plans import Plan, gather
from examples.study.points import Point
from examples.study.scales import Scale

TITLE = 'Steps to a loss'
_SEEDS = (1, 2)
_CLOSE = 0.02
"""Nats from the target at which the length of training is refined no more."""
_MOST_LENGTHS = 3
"""Lengths of training that are tried."""
_SLOPE = -0.35
"""First guess of how the loss moves with the logarithm of the steps, nats."""
_WIDEST = 16.0
"""Largest factor between the steps of a run and those of equal tokens."""
_ROUNDED_TO = 0.05


class Steps(NamedTuple):
  """How many steps complete runs take to a loss.

  Attributes:
    batch_size: Global batch, sequences.
    by_seed: Steps, NaN for a seed that diverged.
    tried: Mean final loss by the steps of a run.
  """

  batch_size: int
  by_seed: tuple[float, ...]
  tried: dict[int, float]


class Outcome(NamedTuple):
  """What came out.

  Attributes:
    target: The loss, nats a token.
    points: Those of the experiment ``batch-scaling``.
    steps: Steps by contender and batch size.
  """

  target: float
  points: batch_scaling.Outcome
  steps: dict[tuple[str, int], Steps]


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans runs whose length is chosen until they end at the target."""
  points = yield from batch_scaling.plan(scale)
  target = choose_target(points, scale)
  steps = yield from gather(
    {
      (x.name, size): _find_steps(scale, x, size, points, target)
      for x in CONTENDERS
      for size in scale.batch_sizes
    }
  )
  return Outcome(target, points, steps)


def choose_target(points: batch_scaling.Outcome, scale: Scale) -> float:
  """Returns the worst loss of the paper's optimizers at one batch, rounded."""
  losses = [points[x.name, scale.batch_size].mean for x in PAPER]
  worst = max(filter(math.isfinite, losses), default=math.inf)
  if math.isinf(worst):
    return worst
  return round(math.ceil(worst / _ROUNDED_TO) * _ROUNDED_TO, 2)


def _find_steps(
  scale: Scale,
  contender: Contender,
  batch_size: int,
  points: batch_scaling.Outcome,
  target: float,
) -> Plan[Steps]:
  """Plans to find the length of training that ends at the target."""
  point = points[contender.name, batch_size]
  _, power = fit_rate(
    [
      (num_steps(scale, x), points[contender.name, x].tuned.learning_rate)
      for x in scale.batch_sizes
    ]
  )
  full = num_steps(scale, batch_size)
  losses: dict[int, list[float]] = {full: list(point.losses[: len(_SEEDS)])}
  while (steps := _next_steps(losses, target)) is not None:
    results = yield [
      contender.run(
        scale,
        batch_size,
        float(f'{point.tuned.learning_rate * (steps / full) ** power:.3g}'),
        seed=seed,
        steps=steps,
      )
      for seed in _SEEDS[: len(losses[full])]
    ]
    losses[steps] = [result.loss for result in results]
  by_seed = [_interpolate(losses, i, target) for i in range(len(losses[full]))]
  tried = {x: statistics.mean(y) for x, y in sorted(losses.items())}
  return Steps(batch_size, tuple(by_seed), tried)


def _next_steps(losses: dict[int, list[float]], target: float) -> int | None:
  """Returns the next length of training to try, None if the best will do."""
  means = {steps: statistics.mean(x) for steps, x in losses.items()}
  if len(means) > _MOST_LENGTHS or not all(
    map(math.isfinite, [target, *means.values()])
  ):
    return None
  nearest = _nearest(means, target)
  if abs(means[nearest[0]] - target) <= _CLOSE:
    return None
  full = next(iter(losses))
  factor = _solve(means, nearest, target) / full
  steps = round(full * min(max(factor, 1 / _WIDEST), _WIDEST))
  return None if steps in losses else steps


def _nearest(losses: dict[int, float], target: float) -> list[int]:
  """Returns the two lengths whose losses are nearest to the target, or one."""
  return sorted(losses, key=lambda steps: abs(losses[steps] - target))[:2]


def _solve(
  losses: dict[int, float], nearest: list[int], target: float
) -> float:
  """Returns the steps at which a line through the nearest hits the target."""
  slope = _SLOPE
  if len(nearest) == 2:
    first, second = nearest
    measured = (losses[first] - losses[second]) / math.log(first / second)
    # Noise, where two lengths are close.
    slope = measured if measured < _SLOPE / 5 else _SLOPE
  return nearest[0] * math.exp((target - losses[nearest[0]]) / slope)


def _interpolate(
  losses: dict[int, list[float]], index: int, target: float
) -> float:
  """Returns the steps to the target of one seed, NaN if it diverged."""
  own = {steps: x[index] for steps, x in losses.items()}
  if not all(map(math.isfinite, [target, *own.values()])):
    return math.nan
  return _solve(own, _nearest(own, target), target)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the steps, and by what factor a larger batch saves them."""
  sizes = scale.batch_sizes
  rows = [
    {'optimizer': x.name}
    | {f'batch {size}': _format(outcome.steps[x.name, size]) for size in sizes}
    | {
      f'saved from {sizes[0]} to {sizes[-1]}': _format_saved(
        outcome, x.name, scale
      )
    }
    for x in CONTENDERS
  ]
  return '\n\n'.join(
    [
      f'Steps of a complete run (warm-up and cosine) that ends at a loss of '
      f'{outcome.target:g}, by interpolation between runs of up to '
      f'{_MOST_LENGTHS + 1} lengths; mean of {len(_SEEDS)} seeds, and each of '
      'them. The learning rate of a length follows the power of the steps that '
      'fits the rates chosen at equal tokens.',
      render.markdown(rows),
      f'A batch {sizes[-1] // sizes[0]} times as large can save a factor of '
      f'{sizes[-1] // sizes[0]} at best.',
    ]
  )


def _format(steps: Steps) -> str:
  mean = statistics.mean(steps.by_seed)
  if not math.isfinite(mean):
    return 'not reached'
  each = ', '.join(f'{x:,.0f}' for x in steps.by_seed)
  return f'{mean:,.0f} ({each})'


def _format_saved(outcome: Outcome, name: str, scale: Scale) -> str:
  first, last = (
    statistics.mean(outcome.steps[name, size].by_seed)
    for size in (scale.batch_sizes[0], scale.batch_sizes[-1])
  )
  saved = first / last
  return f'{saved:.1f} ×' if math.isfinite(saved) else ''


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws steps over batch, and what a wrong learning rate costs."""
  result, ((left, right),) = render.panels(1, 2)
  for x in CONTENDERS:
    _draw_steps(left, outcome, x.name, scale)
    _draw_excess(right, outcome.points[x.name, scale.batch_size])
  left.set_xscale('log', base=2)
  if any(math.isfinite(x) for y in outcome.steps.values() for x in y.by_seed):
    left.set_yscale('log', base=2)
  left.set_xlim(scale.batch_sizes[0] / 1.2, scale.batch_sizes[-1] * 1.2)
  left.set_xticks(scale.batch_sizes, map(str, scale.batch_sizes))
  left.yaxis.set_major_formatter('{x:g}')
  left.set_xlabel('global batch, sequences')
  left.set_ylabel(f'steps to a loss of {outcome.target:g}')
  left.legend(fontsize=8)
  right.set_xscale('log', base=2)
  right.set_xticks([0.25, 0.5, 1, 2, 4], ['¼', '½', '1', '2', '4'])
  right.set_xlim(0.22, 4.5)
  right.set_ylim(-0.02, 0.5)
  right.set_xlabel('learning rate over the one chosen')
  right.set_ylabel('validation loss over the best')
  right.set_title(f'batch {scale.batch_size}')
  return result


def _draw_steps(axes: Any, outcome: Outcome, name: str, scale: Scale) -> None:
  """Draws an optimizer's steps, and those of perfect scaling."""
  sizes = np.array(scale.batch_sizes)
  steps = np.array([outcome.steps[name, size].by_seed for size in sizes])
  color = render.COLORS[name]
  axes.plot(sizes, steps.mean(axis=1), 'o-', color=color, label=name)
  axes.fill_between(
    sizes, steps.min(axis=1), steps.max(axis=1), color=color, alpha=0.25
  )
  perfect = steps[0].mean() * sizes[0] / sizes
  axes.plot(sizes, perfect, ':', color=color, lw=0.8)


def _draw_excess(axes: Any, point: Point) -> None:
  """Draws what a wrong learning rate costs."""
  tuned = point.tuned
  axes.plot(
    [rate / tuned.learning_rate for rate in tuned.losses],
    [
      loss - tuned.loss if math.isfinite(loss) else math.nan
      for loss in tuned.losses.values()
    ],
    'o-',
    ms=3,
    color=render.COLORS[point.name],
  )
