"""Steps to a loss against global batch: where a larger batch stops paying."""

import itertools
import math
import statistics
from typing import Any, NamedTuple

from matplotlib.figure import Figure
import numpy as np

from examples.study import render, variants
from examples.study.contenders import CONTENDERS, PAPER, Contender
from examples.study.experiments import hyperparameters, sensitivity
from examples.study.plans import Plan, Run, gather
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import round_rate

TITLE = 'Steps to a loss'
_SEEDS = (1, 2)
_CLOSE = 0.02
"""Nats from the target at which the length of training is refined no more."""
_MOST_TRIES = 4
"""Lengths of training beside that of equal tokens."""
_SLOPE = -0.35
"""First guess of how the loss moves with the logarithm of the steps, nats."""
_SHORTEST, _LONGEST = 1 / 16, 4.0
"""Lengths of training over that of equal tokens, at the ends."""
_MOST_CHANGE = 4.0
"""Largest factor from one length to the next."""
_ROUNDED_TO = 0.05
_MOST_TOKENS = 1.5
"""Tokens over those at the smallest batch with which a batch is said to pay."""


class Steps(NamedTuple):
  """How many steps complete runs take to a loss.

  Attributes:
    batch_size: Global batch, sequences.
    by_seed: Steps; infinite for a seed that does not get there in the longest
      run, 0 for one that is below the target after the shortest.
    tried: Mean final loss by the steps of a run, the fewest first.
    missed: Nats by which the better of the neighboring learning rates is below
      the one used, with one seed at the length closest to the target; 0 if none
      is, infinite if the one used alone diverged. None if none was tried, as at
      equal tokens, where the rate is tuned.
  """

  batch_size: int
  by_seed: tuple[float, ...]
  tried: dict[int, float]
  missed: float | None = None

  @property
  def mean(self) -> float:
    """Mean of the steps over seeds, NaN where it is not known."""
    known = all(0 < x < math.inf for x in self.by_seed)
    return statistics.mean(self.by_seed) if known else math.nan


class Outcome(NamedTuple):
  """What came out.

  Attributes:
    target: The loss, nats a token.
    steps: Steps by contender and batch size.
  """

  target: float
  steps: dict[tuple[str, int], Steps]


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans runs whose length is chosen until they end at the target."""
  varied = yield from sensitivity.plan(scale)
  points = variants.judged(varied)
  rates = yield from hyperparameters.plan(scale)
  target = choose_target(points, scale)
  steps = yield from gather(
    {
      (x.name, size): _find_steps(
        scale,
        varied[x.name, size].best,
        points[x.name, size],
        target,
        hyperparameters.power_of_length(rates[x.name], scale),
      )
      for x in CONTENDERS
      for size in _sizes(scale)
    }
  )
  return Outcome(target, steps)


def _sizes(scale: Scale) -> tuple[int, ...]:
  """Returns every other batch, from the smallest."""
  return scale.batch_sizes[::2]


def choose_target(points: dict[tuple[str, int], Point], scale: Scale) -> float:
  """Returns the worst loss of the paper's optimizers at one batch, rounded."""
  losses = [points[x.name, scale.batch_size].mean for x in PAPER]
  worst = max(filter(math.isfinite, losses), default=math.inf)
  if math.isinf(worst):
    return worst
  return round(math.ceil(worst / _ROUNDED_TO) * _ROUNDED_TO, 2)


def _find_steps(
  scale: Scale,
  contender: Contender,
  point: Point,
  target: float,
  power: float,
) -> Plan[Steps]:
  """Plans to find the length of training that ends at the target."""
  size, seeds = point.batch_size, _SEEDS[: len(point.losses)]
  full = scale.num_steps(size)
  losses = {full: list(point.losses[: len(seeds)])}

  def run(steps: int, seed: int, factor: float = 1.0) -> Run:
    rate = point.tuned.learning_rate * (steps / full) ** power * factor
    return contender.run(scale, size, round_rate(rate), seed=seed, steps=steps)

  while (steps := _next_steps(losses, target, full)) is not None:
    results = yield [run(steps, seed) for seed in seeds]
    losses[steps] = [result.loss for result in results]
  last = min(losses, key=lambda x: abs(statistics.mean(losses[x]) - target))
  missed = None
  if last != full:
    results = yield [run(last, seeds[0], x) for x in (0.5**0.5, 2**0.5)]
    lowest = min(x.loss for x in results)
    missed = max(0.0, losses[last][0] - lowest) if lowest < math.inf else 0.0
  by_seed = [
    _solve({steps: x[i] for steps, x in losses.items()}, target)
    for i in range(len(seeds))
  ]
  tried = {x: statistics.mean(losses[x]) for x in sorted(losses)}
  return Steps(size, tuple(by_seed), tried, missed)


def _next_steps(
  losses: dict[int, list[float]], target: float, full: int
) -> int | None:
  """Returns the next length of training to try, None if that will do."""
  means = {steps: statistics.mean(x) for steps, x in losses.items()}
  if (
    len(losses) > _MOST_TRIES
    or math.isinf(target)
    or min(abs(x - target) for x in means.values()) <= _CLOSE
  ):
    return None
  steps = _solve(means, target)
  if math.isinf(steps):
    steps = _extrapolate(max(means), means[max(means)], target)
  elif not steps:
    steps = _extrapolate(min(means), means[min(means)], target)
  steps = round(min(max(steps, _SHORTEST * full), _LONGEST * full))
  return None if steps in losses else steps


def _extrapolate(steps: int, loss: float, target: float) -> float:
  """Returns the steps at the target, if the loss falls as first guessed."""
  change = (target - loss) / _SLOPE
  most = math.log(_MOST_CHANGE)
  return steps * math.exp(min(max(change, -most), most))


def _solve(losses: dict[int, float], target: float) -> float:
  """Returns where the loss first falls to the target, by interpolation.

  It is infinite if that is nowhere, and 0 if the fewest steps are enough, but
  for a target that is close to the loss there.
  """
  steps = sorted(losses)
  for few, more in itertools.pairwise(steps):
    if losses[few] > target >= losses[more]:
      if math.isinf(losses[few]):
        return math.sqrt(few * more)
      share = (losses[few] - target) / (losses[few] - losses[more])
      return few * (more / few) ** share
  is_below = losses[steps[0]] <= target < math.inf
  end = steps[0] if is_below else steps[-1]
  if math.isfinite(target) and abs(losses[end] - target) <= 2 * _CLOSE:
    return _extrapolate(end, losses[end], target)
  return 0.0 if is_below else math.inf


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns the steps, and by what factor a larger batch saves them."""
  if math.isinf(outcome.target):
    return 'There is no loss to aim at: with each optimizer a seed diverged.'
  sizes = _sizes(scale)
  rows = [
    {'optimizer': x.name}
    | {f'batch {size}': _format(outcome.steps[x.name, size]) for size in sizes}
    | {
      f'saved by {size}, of {size // sizes[0]} ×': _format_saved(
        outcome, x.name, size, scale
      )
      for size in sizes[1:]
    }
    for x in CONTENDERS
  ]
  return '\n\n'.join(
    [
      'Steps of a complete run (warm-up and cosine) that ends at a loss of '
      f'{outcome.target:g}, by interpolation between runs of up to '
      f'{_MOST_TRIES + 1} lengths: the mean of seeds, and each of them. '
      'Warm-up and b1 are those that suit an optimizer best at the batch and '
      'at equal tokens. The learning rate of a length follows the power of '
      'the steps that fits the rates chosen for other lengths.',
      render.markdown(rows),
      _check_rates(outcome),
      _advice(outcome, scale),
    ]
  )


def _check_rates(outcome: Outcome) -> str:
  """Returns how far the learning rates of other lengths may be off."""
  missed = {
    key: x.missed for key, x in outcome.steps.items() if x.missed is not None
  }
  if not missed:
    return 'Lengths closest to the target are those that rates were chosen for.'
  (name, size), most = max(missed.items(), key=lambda x: x[1])
  return (
    f'In {len(missed)} cases the length closest to the target is not that of '
    'equal tokens. There, learning rates by √2 around the one used were tried '
    'with one seed: the better of them lowered the loss by up to '
    f'{most:.3f} ({name}, batch {size}).'
  )


def _advice(outcome: Outcome, scale: Scale) -> str:
  """Returns up to which batch each optimizer takes few tokens more."""
  sizes = _sizes(scale)
  largest = {
    x.name: _largest_that_pays(outcome, x.name, scale) for x in CONTENDERS
  }
  listed = '; '.join(
    f'{name}: {x or "not known"}' for name, x in largest.items()
  )
  return (
    f'Up to these batches (of {", ".join(map(str, sizes))}) an optimizer takes '
    f'at most {_MOST_TOKENS:g} times the tokens that it takes at batch '
    f'{sizes[0]}: {listed}. The next batch costs more.'
  )


def _largest_that_pays(outcome: Outcome, name: str, scale: Scale) -> int | None:
  """Returns the largest batch before the first that takes many more tokens."""
  tokens = [size * outcome.steps[name, size].mean for size in _sizes(scale)]
  if math.isnan(tokens[0]):
    return None
  pays = itertools.takewhile(
    lambda x: x[1] <= _MOST_TOKENS * tokens[0],
    zip(_sizes(scale), tokens, strict=True),
  )
  return [size for size, _ in pays][-1]


def _saved(outcome: Outcome, name: str, size: int, scale: Scale) -> float:
  """Returns the factor by which a batch saves steps, NaN if unknown."""
  first = outcome.steps[name, _sizes(scale)[0]]
  return first.mean / outcome.steps[name, size].mean


def _format(steps: Steps) -> str:
  if math.inf in steps.by_seed:
    return f'> {max(steps.tried):,}'
  if 0 in steps.by_seed:
    return f'< {min(steps.tried):,}'
  each = ', '.join(f'{x:,.0f}' for x in steps.by_seed)
  return f'{statistics.mean(steps.by_seed):,.0f} ({each})'


def _format_saved(outcome: Outcome, name: str, size: int, scale: Scale) -> str:
  saved = _saved(outcome, name, size, scale)
  return f'{saved:.1f} ×' if math.isfinite(saved) else ''


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws steps over batch, and how many times fewer a larger batch takes."""
  result, ((left, right),) = render.panels(1, 2)
  for x in CONTENDERS:
    _draw_steps(left, right, outcome, x.name, scale)
  sizes = _sizes(scale)
  factors = [size / sizes[0] for size in sizes]
  right.plot(sizes, factors, ':', color='gray', label='perfect scaling')
  if any(0 < x < math.inf for y in outcome.steps.values() for x in y.by_seed):
    left.set_yscale('log', base=2)
  right.set_yscale('log', base=2)
  for axes in (left, right):
    axes.set_xscale('log', base=2)
    axes.set_xlim(scale.batch_sizes[0] / 1.2, scale.batch_sizes[-1] * 1.2)
    axes.set_xticks(scale.batch_sizes, map(str, scale.batch_sizes))
    axes.set_xlabel('global batch, sequences')
    axes.yaxis.set_major_formatter('{x:g}')
  left.set_ylabel(f'steps to a loss of {outcome.target:g}')
  right.set_ylabel(f'steps at batch {sizes[0]} over steps')
  left.legend(fontsize=8, loc='upper right')
  right.legend(handles=right.get_lines()[-1:], fontsize=8, loc='upper left')
  return result


def _draw_steps(
  left: Any, right: Any, outcome: Outcome, name: str, scale: Scale
) -> None:
  """Draws an optimizer's steps, and how many times fewer they become."""
  sizes = np.array(_sizes(scale))
  steps = np.array([outcome.steps[name, size].by_seed for size in sizes])
  steps[~np.isfinite(steps) | (steps == 0)] = np.nan
  color = render.COLORS[name]
  for axes, drawn in ((left, steps), (right, steps[0].mean() / steps)):
    axes.fill_between(
      sizes, drawn.min(axis=1), drawn.max(axis=1), color=color, alpha=0.25
    )
  left.plot(sizes, steps.mean(axis=1), 'o-', color=color, label=name)
  mean = steps.mean(axis=1)
  right.plot(sizes, mean[0] / mean, 'o-', color=color)
