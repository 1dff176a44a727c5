"""What the rows and columns of a matrix are worth, in Muon and Hyperball."""

import functools

from examples.study.analysis import tables as t
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Plan
from examples.study.tuning.coordinates import Improved, improve_all
from examples.study.tuning.rest import (
  KEPT,
  RMS,
  Relative,
  Tuning,
  at_batches,
  decay_of,
  with_parts,
)

TITLE = 'Rows and columns'
TEXT = """\
Muon and Hyperball with the update of each output of a layer brought to the same
size (balanced; with Muon to an RMS of 0.2, about that of its updates). At the
largest batch also Hyperball with the max-norm ratio of row or matrix, the
larger one, and with MERIT’s ratios. All begin with what was best for Muon or
Hyperball with the rest tuned, and are tuned again: the learning rate, warm-up,
b1, initial weights, the rate of embeddings, and the decay (Hyperball: none);
with a linear decay to zero instead of the cosine, the learning rate and the
decay of weights once more. What was tried has losses of one seed, what was
chosen those of eight fresh ones."""


def _linear(name: str) -> str:
  return f'{name}, linear'


_MUON, _HYPERBALL = 'Muon, tuned again', 'Hyperball, tuned again'
_BALANCED_MUON, _BALANCED = 'Muon, balanced', 'Hyperball, balanced'
_AT_BOTH = {
  _MUON: Relative(RMS),
  _HYPERBALL: Relative(KEPT),
  _BALANCED_MUON: Relative(RMS, with_parts('muon', 'balance', 'decay')),
  _BALANCED: Relative(KEPT, with_parts('muon', 'lmo column', 'l2', 'keep l2')),
}
_RATIOS = {
  'Hyperball, ratios of rows': Relative(
    KEPT, with_parts('muon', 'row', 'l2', 'keep l2')
  ),
  'Hyperball, ratios of MERIT': Relative(
    KEPT, with_parts('muon', 'merit', 'l2', 'keep l2')
  ),
}
_PAIRS = (
  (_BALANCED_MUON, _MUON),
  (_BALANCED, _HYPERBALL),
  (_BALANCED, _BALANCED_MUON),
  *((_linear(x), x) for x in _AT_BOTH),
  (_linear(_BALANCED_MUON), _linear(_MUON)),
  (_linear(_BALANCED), _linear(_HYPERBALL)),
  (_linear(_HYPERBALL), _linear(_MUON)),
  (_linear(_BALANCED), _linear(_BALANCED_MUON)),
  (_linear(_BALANCED_MUON), _MUON),
  (_linear(_BALANCED), _HYPERBALL),
  ('Hyperball, ratios of rows', _HYPERBALL),
  ('Hyperball, ratios of MERIT', _HYPERBALL),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans what is balanced at two batches, with ratios at the largest."""
  *_, middle, largest = scale.few_batch_sizes
  at_both: dict[str, Tuning] = {name: x.tune for name, x in _AT_BOTH.items()}
  linear = {
    _linear(name): functools.partial(_tune_linear, x)
    for name, x in _AT_BOTH.items()
  }
  ratios = {name: x.tune for name, x in _RATIOS.items()}
  return at_batches(
    scale, {middle: at_both | linear, largest: at_both | linear | ratios}
  )


def _tune_linear(
  relative: Relative, scale: Scale, size: int, name: str
) -> Plan[Improved]:
  """Plans a learning rate and a decay for a line instead of the cosine."""
  start = (yield from relative.tune(scale, size, name)).best
  case = start.case.with_settings(schedule='linear')
  rate = start.tuned.learning_rate
  return (yield from improve_all(case, rate, decay_of(case)))


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
