"""Optimizers taken apart: direction, size of the step, norm kept."""

import dataclasses
import functools
from typing import Any

from matplotlib.figure import Figure

from examples.study import render
from examples.study.differences import difference, sentence
from examples.study.plans import Plan, Run, gather
from examples.study.points import Point, select_point
from examples.study.scales import Scale

TITLE = 'Compositions'
BASELINE = 'Muon'
"""What a composition has to beat."""
_SEEDS, _MOST_SEEDS = 3, 8
_FINALISTS = 2
"""Compositions that get more seeds, and are tried at twice the batch."""


@dataclasses.dataclass(frozen=True)
class Composition:
  """An optimizer of the comparison.

  Attributes:
    optimizer: The trainer's, which gives the betas too.
    start: First guess of the learning rate.
    arm: Chain in its place (see :mod:`examples.study.arms`).
    scaled_init: Standard deviation over the one in proportion.
  """

  optimizer: str
  start: float
  arm: str = ''
  scaled_init: float = 1.0

  def run(self, scale: Scale, **changes: Any) -> Run:
    """Returns a run, with settings as for :meth:`Scale.run`."""
    return scale.run(
      self.optimizer,
      arm=self.arm,
      init_std=self.scaled_init * scale.init_std,
      **changes,
    )


_KEPT = 'MERIT’s ratios, l2 norm kept'
_SIZES = {
  'l2 ratio': ('decay > l2', 0.02),
  'max ratio': ('decay > max', 0.02),
  'row or matrix ratio': ('decay > row', 0.02),
  'MERIT’s ratios': ('decay > merit > clip', 0.028),
  'l2 norm kept': ('l2 > keep l2', 0.06),
  'max-norm kept': ('max > keep max', 0.06),
  _KEPT: ('merit > l2 > keep l2', 0.06),
}
"""Parts after the direction, and a first guess of the rate, by name."""


def _compositions() -> dict[str, Composition]:
  found = {
    'AdamW': Composition('adamw', 0.011),
    BASELINE: Composition('muon', 0.028),
  }
  for direction, optimizer in (('Adam', 'adamw'), ('Muon', 'muon')):
    for size, (parts, start) in _SIZES.items():
      arm = f'{direction.lower()} > {parts}; adam 0.33'
      found[f'{direction}, {size}'] = Composition(optimizer, start, arm)
  best = found[f'Muon, {_KEPT}']
  on_the_rest = best.arm.replace('; adam', '; merit')
  return found | {
    f'Muon, {_KEPT}; MERIT on the rest': dataclasses.replace(
      best, arm=on_the_rest
    ),
    f'Muon, {_KEPT} at twice the size': dataclasses.replace(
      best, scaled_init=2.0
    ),
  }


COMPOSITIONS = _compositions()
"""What is compared, by name."""

Outcome = tuple[dict[str, Point], dict[str, Point], dict[str, Point]]
"""All points by name; the best with more seeds; those at twice the batch."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans all compositions, and the best of them again."""
  most = scale.largest_batch
  points = yield from gather(
    {
      name: _select(scale, name, most, composition.start)
      for name, composition in COMPOSITIONS.items()
    }
  )
  names = [*_best(points)[:_FINALISTS], BASELINE]
  confirmed = yield from gather(
    {name: _with_more_seeds(scale, points[name]) for name in names}
  )
  doubled = yield from gather(
    {
      name: _select(scale, name, 2 * most, points[name].tuned.learning_rate)
      for name in names
    }
  )
  return points, confirmed, doubled


def _select(
  scale: Scale, name: str, batch_size: int, start: float
) -> Plan[Point]:
  run = functools.partial(COMPOSITIONS[name].run, scale, batch_size=batch_size)
  return select_point(name, run, start=start, seeds=_SEEDS)


def _with_more_seeds(scale: Scale, point: Point) -> Plan[Point]:
  run = functools.partial(
    COMPOSITIONS[point.name].run,
    scale,
    batch_size=point.batch_size,
    learning_rate=point.tuned.learning_rate,
  )
  results = yield [run(seed=seed) for seed in range(1, _MOST_SEEDS + 1)]
  losses = tuple(result.loss for result in results)
  return dataclasses.replace(point, losses=losses)


def _best(points: dict[str, Point]) -> list[str]:
  """Returns the names of the compositions, the best first."""
  names = [name for name in points if name != BASELINE]
  return sorted(names, key=lambda name: points[name].mean)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns a table of all, and what is known of the best."""
  points, confirmed, doubled = outcome
  most = scale.largest_batch
  rows = [
    {
      'hidden matrices': name,
      f'loss, batch {most}': render.format_point(points[name]),
      f'over {BASELINE}': str(difference(points[name], points[BASELINE])),
      'learning rate': render.format_learning_rate(points[name].tuned),
    }
    for name in [BASELINE, *_best(points)]
  ]
  finalists = [name for name in confirmed if name != BASELINE]
  return '\n\n'.join(
    [
      'A direction, the size of its step, and whether the norm of each matrix '
      'is kept. All other parameters: Adam without bias correction at a third '
      'of the rate, unless said; AdamW and Muon are the trainer’s. The '
      'interval is one of 95 %.',
      render.markdown(rows),
      *(
        f'Batch {size}, {len(of[name].losses)} seeds: '
        + sentence(name, BASELINE, difference(of[name], of[BASELINE]))
        for name in finalists
        for size, of in ((most, confirmed), (2 * most, doubled))
      ),
    ]
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws each composition's loss over the baseline's."""
  del scale
  points, _, _ = outcome
  names = _best(points)
  result, ((axes,),) = render.panels(1, 1)
  result.set_size_inches(8, 0.8 + 0.3 * len(names))
  found = [difference(points[name], points[BASELINE]) for name in names]
  colors = [
    'tab:red' if name.startswith('Muon') else 'tab:blue' for name in names
  ]
  axes.barh(names, [x.mean for x in found], color=colors, alpha=0.7)
  axes.errorbar(
    [x.mean for x in found],
    names,
    xerr=[x.high - x.mean for x in found],
    fmt='none',
    capsize=3,
    color='black',
  )
  axes.invert_yaxis()
  axes.axvline(0, color='0.5', lw=1)
  axes.set_xlabel(f'validation loss over {BASELINE}’s, with 95 % intervals')
  return result
