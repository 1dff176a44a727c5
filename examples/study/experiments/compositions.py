"""Optimizers taken apart: direction, size of the step, norm kept."""

import dataclasses
from typing import Any

from matplotlib.figure import Figure

from examples.study import render
from examples.study.contenders import ADAMW, KEPT, MUON, Contender
from examples.study.differences import (
  difference,
  paired_difference,
  sentence,
)
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_point, judge, scale_rate
from examples.study.scales import Scale

TITLE = 'Compositions'
BASELINE = MUON.name
"""What a composition has to beat."""
_SEEDS, _MOST_SEEDS = 3, 8
_FINALISTS = 2
"""Compositions that get more seeds, and are tried at twice the batch."""

_SIZES = {
  'l2 ratio': ('decay > l2', 0.02),
  'max ratio': ('decay > max', 0.02),
  'row or matrix ratio': ('decay > row', 0.02),
  'MERIT’s ratios': ('decay > merit > clip', 0.028),
  'l2 norm kept': ('l2 > keep l2', 0.06),
  'max-norm kept': ('max > keep max', 0.06),
  'MERIT’s ratios, l2 norm kept': ('merit > l2 > keep l2', 0.06),
}
"""Parts after the direction, and a first guess of the rate, by name."""

_INIT_SCALES = {'twice': 2.0, 'four times': 4.0}
"""Sizes of the initial weights, over those in proportion to the width."""


def _compositions() -> dict[str, Contender]:
  directions = {'Adam': 'adamw', 'Muon': 'muon'}
  found = [ADAMW, MUON] + [
    Contender(
      f'{direction}, {size}',
      optimizer,
      start,
      f'{direction.lower()} > {parts}; adam 0.33',
    )
    for direction, optimizer in directions.items()
    for size, (parts, start) in _SIZES.items()
  ]
  by_name = {x.name: x for x in found}
  norm_kept = by_name['Muon, l2 norm kept']
  with_ratios = by_name['Muon, MERIT’s ratios, l2 norm kept']
  found.append(
    dataclasses.replace(
      with_ratios,
      name=f'{with_ratios.name}; MERIT on the rest',
      arm=with_ratios.arm.replace('; adam', '; merit'),
    )
  )
  found += _resized(MUON, norm_kept, with_ratios)
  return {x.name: x for x in found}


def _resized(*contenders: Contender) -> list[Contender]:
  found = [
    dataclasses.replace(
      contender,
      name=f'{contender.name} at {size} the size',
      settings={'init_scale': scale},
    )
    for contender in contenders
    for size, scale in _INIT_SCALES.items()
  ]
  # The best of them under the name that it has elsewhere.
  return [
    KEPT if (x.arm, x.settings) == (KEPT.arm, KEPT.settings) else x
    for x in found
  ]


COMPOSITIONS = _compositions()
"""What is compared, by name."""

Outcome = tuple[dict[str, Point], dict[str, Point], dict[str, Point]]
"""All points by name; the best with other seeds; those at twice the batch."""


def plan(scale: Scale) -> Plan[Outcome]:
  """Plans all compositions, and the best of them again."""
  points = yield from gather(
    {name: _find_point(scale, name) for name in COMPOSITIONS}
  )
  names = [*_best(points)[:_FINALISTS], BASELINE]
  # On seeds that have not chosen them.
  confirmed = yield from gather(
    {
      name: judge(
        scale,
        COMPOSITIONS[name],
        scale.batch_size,
        points[name].tuned,
        _MOST_SEEDS,
        first_seed=_SEEDS + 1,
      )
      for name in names
    }
  )
  doubled = yield from gather(
    {
      name: _find_point(
        scale,
        name,
        2,
        start=scale_rate(points[name].tuned.learning_rate, 2),
        stride=1,
      )
      for name in names
    }
  )
  return points, confirmed, doubled


def _find_point(
  scale: Scale, name: str, factor: int = 1, **options: Any
) -> Plan[Point]:
  """Plans a composition at a multiple of the batch size."""
  options = {'num_seeds': _SEEDS} | options
  return find_point(
    scale, COMPOSITIONS[name], factor * scale.batch_size, **options
  )


def _best(points: dict[str, Point]) -> list[str]:
  """Returns the names of the compositions, the best first."""
  names = [name for name in points if name != BASELINE]
  return sorted(names, key=lambda name: points[name].mean)


def section(outcome: Outcome, scale: Scale) -> str:
  """Returns a table of all, and what is known of the best."""
  points, confirmed, doubled = outcome
  size = scale.batch_size
  rows = [
    {
      'hidden matrices': name,
      f'loss, batch {size}': render.format_point(points[name]),
      f'over {BASELINE}': ''
      if name == BASELINE
      else str(difference(points[name], points[BASELINE])),
      'learning rate': render.format_learning_rate(points[name].tuned),
    }
    for name in [BASELINE, *_best(points)]
  ]
  finalists = [name for name in confirmed if name != BASELINE]
  return '\n\n'.join(
    [
      'A direction, the size of its step, and whether the norm of each matrix '
      'is kept. All other parameters: Adam without bias correction at a third '
      'of the rate, unless said; AdamW and Muon are the trainer’s. At twice '
      'or four times the size, weights start so, and norms are kept so. '
      f'“{KEPT.name}” is Muon’s direction with MERIT’s ratios and the l2 norm '
      'kept, at twice the size. The best two are compared seed by seed.',
      render.markdown(rows),
      *(
        f'Batch {batch}, {len(of[name].losses)} seeds: '
        + sentence(name, other, compare(of[name], of[other]))
        for name, other, compare in (
          *((x, BASELINE, difference) for x in finalists),
          (*finalists, paired_difference),
        )
        for batch, of in ((size, confirmed), (2 * size, doubled))
      ),
    ]
  )


def figure(outcome: Outcome, scale: Scale) -> Figure:
  """Draws each composition's loss over the baseline's."""
  del scale
  points, _, _ = outcome
  found = {
    name: difference(points[name], points[BASELINE]) for name in _best(points)
  }
  colors = ['tab:red' if x.startswith('Muon') else 'tab:blue' for x in found]
  return render.draw_differences(found, BASELINE, color=colors)
