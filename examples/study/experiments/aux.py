"""What Hyperball's lead over Muon is made of: the norm, the ratio, the rest."""

import dataclasses

from examples.study.analysis import tables as t
from examples.study.chains import Chain
from examples.study.optimizers import HYPERBALL, MUON
from examples.study.points import Point
from examples.study.scales import DECAY, Scale
from examples.study.tuning import Plan, at_batches, gather, muon_and_hyperball
from examples.study.tuning.coordinates import (
  Coordinate,
  GroupRate,
  Others,
  Search,
  improve_all,
)

TITLE = 'The norm, or the rest?'
TEXT = """\
Muon’s direction with three sizes: that of Adam’s updates (RMS), the l2 ratio,
and the l2 ratio with the norm kept (Hyperball). What is no hidden matrix is
updated by the same Adam, tuned as well with each: with bias correction or
without, then the rates of embeddings and of gains and biases over that of
hidden matrices, then the decay of hidden matrices, which is none where their
norm is kept. Each value has its own learning rate; what was tried has losses of
one seed, what was chosen those of eight fresh ones. Warm-up, b1 and initial
weights are those that suited Muon (RMS) and Hyperball (the others) best at a
batch. The first two rows are the optimizers as they were before."""
_RMS, _RATIO, _KEPT = 'Muon, RMS', 'Muon, l2 ratio', 'Hyperball, rest tuned'
_PARTS = {
  _RMS: ('muon', 'rms', 'decay'),
  _RATIO: ('muon', 'l2', 'decay'),
  _KEPT: HYPERBALL.chain.parts,
}
_PAIRS = (
  (_RMS, MUON.name),
  (_RATIO, _RMS),
  (_KEPT, _RATIO),
  (_KEPT, _RMS),
  (_KEPT, HYPERBALL.name),
)
_RATES = (0.04125, 0.0825, 0.165, 0.33, 0.66, 1.32, 2.64, 5.28)
_REST = {
  'Adam': Others('others', ('adam', 'adam corrected'), form='{}'),
  'embeddings': GroupRate('embeddings', _RATES),
  'gains and biases': GroupRate('vectors', _RATES),
}
_DECAYS = (0.0, DECAY, 0.1, 0.3, 1.0)
_DECAY = {'decay': Coordinate('weight_decay', _DECAYS, DECAY)}


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans the rest of each size at the smallest, middle and largest batch."""
  return at_batches(_plan_batch, scale, scale.few_batch_sizes)


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  before = yield from muon_and_hyperball(scale, size)
  starts = {x: before[HYPERBALL.name] for x in _PARTS}
  starts[_RMS] = before[MUON.name]
  found = yield from gather(
    {
      **{x: y.with_seeds(scale.many_seeds) for x, y in before.items()},
      **{x: _tune_rest(x, y) for x, y in starts.items()},
    }
  )
  return [point for points in found.values() for point in points]


def _tune_rest(name: str, start: Search) -> Plan[list[Point]]:
  """Plans to tune what is beside the hidden matrices, for a size of these."""
  optimizer = dataclasses.replace(
    start.best.optimizer,
    name=name,
    chain=Chain(_PARTS[name], 'adam', HYPERBALL.chain.others_rate),
  )
  case = dataclasses.replace(start.best, optimizer=optimizer)
  return improve_all(
    case,
    start.point.tuned.learning_rate,
    _REST if name == _KEPT else _REST | _DECAY,
    case.scale.many_seeds,
  )


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, what each part is worth, and what was tried."""
  return t.searched(points, _PAIRS)
