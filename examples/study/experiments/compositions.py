"""Optimizers taken apart: direction, size of the step, norm kept."""

import dataclasses

from matplotlib.figure import Figure

from examples.study.analysis import figures, tables as t
from examples.study.analysis.intervals import difference
from examples.study.chains import Chain
from examples.study.optimizers import (
  ADAMW,
  HYPERBALL,
  MUON,
  WITH_RATIOS,
  Optimizer,
)
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, gather, scale_rate

TITLE = 'Compositions'
TEXT = """\
A direction, the size of its step, and whether the norm of each matrix is kept.
All other parameters: Adam without bias correction at a third of the rate,
unless said; AdamW and Muon are the trainer’s. At twice or four times the size,
weights start so, and norms are kept so. Hyperball is Muon’s direction with the
l2 norm kept, at twice the size unless said. The best two and Muon have fresh
seeds of their own (confirmed), also at twice the batch."""
_SEEDS, _MOST_SEEDS = 3, 8
_FINALISTS = 2
"""Compositions that get more seeds, and are tried at twice the batch."""
_SIZES = {
  'l2 ratio': (('decay', 'l2'), 0.02),
  'max ratio': (('decay', 'max'), 0.02),
  'row or matrix ratio': (('decay', 'row'), 0.02),
  'MERIT’s ratios': (('decay', 'merit', 'clip'), 0.028),
  'l2 norm kept': (('l2', 'keep l2'), 0.06),
  'max-norm kept': (('max', 'keep max'), 0.06),
  'MERIT’s ratios, l2 norm kept': (('merit', 'l2', 'keep l2'), 0.06),
}
"""Parts after the direction, and a first guess of the rate, by name."""


def _compositions() -> dict[str, Optimizer]:
  found = [ADAMW, MUON]
  for direction, optimizer in {'Adam': 'adamw', 'Muon': 'muon'}.items():
    for size, (parts, start) in _SIZES.items():
      chain = Chain((direction.lower(), *parts), 'adam', 0.33)
      found.append(Optimizer(f'{direction}, {size}', optimizer, start, chain))
  *_, ratios = found
  found.append(
    dataclasses.replace(
      ratios,
      name=f'{ratios.name}; MERIT on the rest',
      chain=dataclasses.replace(ratios.chain, others='merit'),
    )
  )
  found += [_resized(MUON, 'twice', 2.0), HYPERBALL, WITH_RATIOS]
  found += [
    _resized(x, 'four times', 4.0) for x in (MUON, HYPERBALL, WITH_RATIOS)
  ]
  return {x.name: x for x in found}


def _resized(optimizer: Optimizer, words: str, size: float) -> Optimizer:
  """Returns the same with other initial weights, and norms that are kept."""
  name = f'{optimizer.name} at {words} the size'
  return dataclasses.replace(
    optimizer.with_settings(init_scale=size), name=name
  )


COMPOSITIONS = _compositions()
"""What is compared, by name."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all compositions, and the best of them again."""
  cases, doubled = (
    {
      name: Case(scale, x, factor * scale.batch_size)
      for name, x in COMPOSITIONS.items()
    }
    for factor in (1, 2)
  )
  points = yield from gather(
    {name: x.find_point(_SEEDS) for name, x in cases.items()}
  )
  others = [name for name in points if name != MUON.name]
  ranked = sorted(others, key=lambda name: points[name].mean)
  finalists = [*ranked[:_FINALISTS], MUON.name]
  tuned = {name: points[name].tuned for name in finalists}
  confirmed = yield from gather(
    # On seeds that have not chosen them.
    {x: cases[x].judge(y, _MOST_SEEDS, _SEEDS + 1) for x, y in tuned.items()}
    | {
      f'{x}, doubled': doubled[x].find_point(
        _SEEDS, scale_rate(y.learning_rate, 2)
      )
      for x, y in tuned.items()
    }
  )
  return [
    *(points[name].labelled(role='all') for name in (MUON.name, *ranked)),
    *(x.labelled(role='confirmed') for x in confirmed.values()),
  ]


def tables(points: list[Point]) -> t.Tables:
  """Returns all, and the best of them with seeds of their own."""
  baseline, *_ = found = t.select(points, role='all')

  def over(point: Point) -> str:
    return '' if point is baseline else str(difference(point, baseline))

  confirmed = t.select(points, role='confirmed')
  first, second, *_ = t.values(confirmed, 'optimizer')
  pairs = [(first, MUON.name), (second, MUON.name), (first, second)]
  cells = {'loss': t.loss, 'minus Muon': over, 'learning rate': t.rate}
  return {
    'losses': t.pivot(found, ['optimizer'], cells=cells),
    'confirmed': t.pivot(confirmed, ['optimizer'], 'batch'),
    **t.compare(confirmed, pairs, 'batch'),
  }


def figure(points: list[Point]) -> Figure:
  """Draws the difference of each composition from Muon."""
  baseline, *others = t.select(points, role='all')
  found = {x['optimizer']: difference(x, baseline) for x in others}
  return figures.bars(found, MUON.name)
