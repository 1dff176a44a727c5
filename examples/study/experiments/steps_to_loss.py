"""Steps to a loss against global batch: where a larger batch stops paying."""

import math
import statistics

from matplotlib.figure import Figure

from examples.study.analysis.figures import finite
from examples.study.analysis.lengths import (
  CLOSE,
  extrapolate,
  fit_power,
  steps_to,
)
from examples.study.analysis.tables import Rows, Tables, select, values
from examples.study.optimizers import COMPARED, PAPER, Optimizer
from examples.study.points import Point
from examples.study.render import COLORS, panels
from examples.study.scales import Scale
from examples.study.trial import Result, Trial
from examples.study.tuning.coordinates import Search
from examples.study.tuning.lengths import find_length_rates, middle_batch
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.points import find_rates
from examples.study.tuning.rates import round_rate
from examples.study.tuning.stages import warmup_and_b1

TITLE = 'Steps to a loss'
TEXT = """\
Steps of a complete run (warm-up and cosine) that ends at a loss, by
interpolation between runs of up to five lengths: the mean of two seeds, and
each of them. The loss is the highest of AdamW, LAMB and MERIT at one batch,
rounded up. Warm-up and b1 are those that suit an optimizer best at the batch
and at equal tokens. The learning rate of a length follows the power of the
steps that fits the rates chosen for other lengths. Rates by √2 around it were
tried with one seed at the length closest to the target, where that is not the
one of equal tokens: “missed” is by how much the better of them is lower."""
_SEEDS = (1, 2)
_MOST_TRIES = 4
"""Lengths of training beside that of equal tokens."""
_SHORTEST, _LONGEST = 1 / 16, 4.0
"""Lengths of training over that of equal tokens, at the ends."""
_ROUNDED_TO = 0.05


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans runs whose length is chosen until they end at the target."""
  sizes = scale.batch_sizes[::2]
  found = yield from gather(
    {
      'tuned': gather(
        {
          (x.name, size): warmup_and_b1(scale, x, size)
          for x in COMPARED
          for size in (*sizes, scale.batch_size)
        }
      ),
      'powers': gather({x.name: _power(scale, x) for x in COMPARED}),
    }
  )
  tuned, powers = found['tuned'], found['powers']
  losses = [tuned[x.name, scale.batch_size].point.mean for x in PAPER]
  target = choose_target(losses)
  points = yield from gather(
    {
      (x.name, size): _find_steps(
        scale, tuned[x.name, size], target, powers[x.name]
      )
      for x in COMPARED
      for size in sizes
    }
  )
  return [point for found in points.values() for point in found]


def _power(scale: Scale, optimizer: Optimizer) -> Plan[float]:
  """Plans to find with which power of the steps the rate moves."""
  rates = yield from find_rates(scale, optimizer)
  size = middle_batch(scale)
  tunings = yield from find_length_rates(scale, optimizer, rates[size])
  _, power = fit_power(
    (scale.num_steps(size, share), tuned.learning_rate)
    for share, tuned in tunings.items()
  )
  return power


def choose_target(losses: list[float]) -> float:
  """Returns the highest loss, rounded up."""
  highest = max(filter(math.isfinite, losses), default=math.inf)
  if math.isinf(highest):
    return highest
  return round(math.ceil(highest / _ROUNDED_TO) * _ROUNDED_TO, 2)


def _find_steps(
  scale: Scale, search: Search, target: float, power: float
) -> Plan[list[Point]]:
  """Plans to find the length of training that ends at the target."""
  point = search.point
  size, seeds = point['batch'], _SEEDS[: len(point.losses)]
  full = scale.num_steps(size)
  # Scales without fresh seeds take what chose the rate.
  judges = point.fresh or point.tuned.chosen
  found = {full: judges[: len(seeds)]}

  def trial(steps: int, seed: int, factor: float = 1.0) -> Trial:
    rate = point.tuned.learning_rate * (steps / full) ** power * factor
    return search.best.trial(
      scale, size, round_rate(rate), seed=seed, steps=steps
    )

  while (steps := _next_steps(_means(found), target, full)) is not None:
    results = yield [trial(steps, seed) for seed in seeds]
    found[steps] = tuple(results)
  means = _means(found)
  last = min(means, key=lambda x: abs(means[x] - target))
  around: list[Result] = []
  if last != full:
    around = yield [trial(last, seeds[0], x) for x in (0.5**0.5, 2**0.5)]
  labels = {**point.labels, 'target': target}
  tried = [
    Point({**labels, 'steps': steps, 'role': 'length'}, None, found[steps])
    for steps in sorted(found)
  ]
  neighbors = {**labels, 'steps': last, 'role': 'other rates'}
  return [*tried, Point(neighbors, None, tuple(around))] if around else tried


def _means(found: dict[int, tuple[Result, ...]]) -> dict[int, float]:
  return {
    steps: statistics.mean(x.loss for x in results)
    for steps, results in found.items()
  }


def _next_steps(
  means: dict[int, float], target: float, full: int
) -> int | None:
  """Returns the next length of training to try, None if that will do."""
  if (
    len(means) > _MOST_TRIES
    or math.isinf(target)
    or min(abs(x - target) for x in means.values()) <= CLOSE
  ):
    return None
  steps = steps_to(means, target)
  if math.isinf(steps):
    steps = extrapolate(max(means), means[max(means)], target)
  elif not steps:
    steps = extrapolate(min(means), means[min(means)], target)
  steps = round(min(max(steps, _SHORTEST * full), _LONGEST * full))
  return None if steps in means else steps


def steps_by_seed(points: list[Point]) -> dict[tuple[str, int], list[float]]:
  """Returns steps to the target of each seed, by optimizer and batch."""
  tried: dict[tuple[str, int], list[Point]] = {}
  for point in select(points, role='length'):
    tried.setdefault((point['optimizer'], point['batch']), []).append(point)
  return {
    key: [
      steps_to({x['steps']: x.losses[i] for x in lengths}, lengths[0]['target'])
      for i in range(len(lengths[0].losses))
    ]
    for key, lengths in tried.items()
  }


def tables(points: list[Point]) -> Tables:
  """Returns the steps, and by what factor a larger batch saves them."""
  found = steps_by_seed(points)
  first, *others = values(points, 'batch')
  names = values(points, 'optimizer')
  target = points[0]['target']
  if math.isinf(target):
    return {}
  means = {key: _known_mean(x) for key, x in found.items()}
  return {
    f'steps to a loss of {target:g}': [
      {'optimizer': name}
      | {f'batch {x}': _format(found[name, x]) for x in (first, *others)}
      for name in names
    ],
    f'steps at batch {first} over those at': [
      {'optimizer': name}
      | {
        f'batch {x}': f'{means[name, first] / means[name, x]:.1f} ×'
        for x in others
      }
      for name in names
    ],
    f'tokens over those at batch {first}': [
      {'optimizer': name}
      | {
        f'batch {x}': f'{means[name, x] * x / means[name, first] / first:.1f} ×'
        for x in others
      }
      for name in names
    ],
    'missed': _missed(points),
  }


def _known_mean(by_seed: list[float]) -> float:
  """Returns the mean, NaN where the steps of a seed are not known."""
  known = all(0 < x < math.inf for x in by_seed)
  return statistics.mean(by_seed) if known else math.nan


def _format(by_seed: list[float]) -> str:
  if math.isnan(_known_mean(by_seed)):
    return 'not known'
  each = ', '.join(f'{x:,.0f}' for x in by_seed)
  return f'{statistics.mean(by_seed):,.0f} ({each})'


def _missed(points: list[Point]) -> Rows:
  """Returns how far the learning rates of other lengths may be off."""
  rows = []
  for point in select(points, role='other rates'):
    (used,) = select(
      points,
      role='length',
      **{x: point[x] for x in ('optimizer', 'batch', 'steps')},
    )
    better = used.losses[0] - min(point.losses)
    rows.append(
      {
        'optimizer': point['optimizer'],
        'batch': f'{point["batch"]}',
        'steps': f'{point["steps"]:,}',
        'missed': f'{max(0.0, better):.3f}',
      }
    )
  return rows


def figure(points: list[Point]) -> Figure:
  """Draws steps over batch, and how many times fewer a larger batch takes."""
  result, ((left, right),) = panels(1, 2)
  found = steps_by_seed(points)
  sizes = values(points, 'batch')
  for name in values(points, 'optimizer'):
    steps = finite(_known_mean(found[name, x]) for x in sizes)
    left.plot(sizes, steps, 'o-', color=COLORS[name], label=name)
    saved = [steps[0] / x for x in steps]
    right.plot(sizes, saved, 'o-', color=COLORS[name])
  perfect = [x / sizes[0] for x in sizes]
  right.plot(sizes, perfect, ':', color='gray', label='perfect scaling')
  for axes in (left, right):
    axes.set_xscale('log', base=2)
    axes.set_yscale('log', base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_xlabel('global batch, sequences')
    axes.yaxis.set_major_formatter('{x:g}')
  left.set_ylabel(f'steps to a loss of {points[0]["target"]:g}')
  right.set_ylabel(f'steps at batch {sizes[0]} over steps')
  left.legend(fontsize=7)
  return result
