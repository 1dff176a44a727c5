"""Everything tuned: decay, and what is beside the hidden matrices of Muon."""

from collections.abc import Sequence
import dataclasses
import math

from examples.study.chains import Chain
from examples.study.optimizers import HYPERBALL, MUON, PAPER
from examples.study.scales import DECAY, Scale
from examples.study.tuning.cases import Case
from examples.study.tuning.coordinates import (
  ChainField,
  Coordinate,
  Coordinates,
  GroupRate,
  Improved,
  improve_all,
)
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.stages import B1, initial_weights, tune_stage

RMS, RATIO, KEPT = (
  'Muon, rest tuned',
  'Muon, l2 ratio, rest tuned',
  'Hyperball, rest tuned',
)
"""Muon with three sizes, each with the rest tuned."""
_PARTS = {
  RMS: ('muon', 'rms', 'decay'),
  RATIO: ('muon', 'l2', 'decay'),
  KEPT: HYPERBALL.chain.parts,
}
_STARTS = {
  **{x.name: x for x in PAPER},
  RMS: MUON,
  RATIO: HYPERBALL,
  KEPT: HYPERBALL,
}
"""What each begins with, all but the rest tuned."""
_RATES = (0.04125, 0.0825, 0.165, 0.33, 0.66, 1.32, 2.64, 5.28)
RATES: Coordinates = {
  'embeddings': GroupRate('embeddings', _RATES),
  'gains and biases': GroupRate('vectors', _RATES),
}
"""Learning rates of groups over that of hidden matrices."""
_WEIGHT_DECAY: Coordinates = {
  'decay': Coordinate('weight_decay', (0.0, DECAY, 0.1, 0.3, 1.0, 3.0))
}
_ADAM: Coordinates = {
  'Adam': ChainField('others', ('adam', 'adam corrected'), form='{}')
}
_AGAIN: Coordinates = {
  'warm-up': Coordinate('warmup_share', (0.1, 0.3, 0.5)),
  'b1': B1,
  'initial weights': Coordinate(
    'init_scale', (0.5, 1.0, 2.0, 4.0), '{:g} ×', promising=0.02
  ),
}


def decay_of(case: Case) -> Coordinates:
  """Returns the decay to tune; it does nothing where the norm is kept."""
  chain = case.optimizer.chain
  return {} if chain and 'keep l2' in chain.parts else _WEIGHT_DECAY


def everything_tuned(
  scale: Scale, size: int, names: Sequence[str] = (RMS, KEPT)
) -> Plan[dict[str, Improved]]:
  """Plans optimizers at a batch with everything tuned, by name.

  Args:
    scale: Size of the study.
    size: Global batch, sequences.
    names: Muon with a size, or one of ``PAPER``.
  """
  return gather({x: _tune(scale, size, x) for x in names})


def _tune(scale: Scale, size: int, name: str) -> Plan[Improved]:
  case = Case(scale, _STARTS[name], size)
  start = yield from tune_stage(initial_weights, case)
  case, coordinates = start.best.with_optimizer(name=name), {}
  if name in _PARTS:
    chain = Chain(_PARTS[name], 'adam', HYPERBALL.chain.others_rate)
    case, coordinates = case.with_optimizer(chain=chain), _ADAM | RATES
  coordinates = {**coordinates, **decay_of(case)}
  return (yield from improve_all(case, start.learning_rate, coordinates))


def tune_again(
  case: Case, learning_rate: float, own: Coordinates
) -> Plan[Improved]:
  """Plans to tune what begins with the settings of another.

  What it has of its own, then warm-up, b1, initial weights, the rate of
  embeddings and the decay. Of learning rates the best one is taken, even if the
  next larger one is much worse: fresh seeds tell what it is worth.

  Args:
    case: What is tuned.
    learning_rate: First guess of its learning rate.
    own: Further settings, or other values of those of all.
  """
  chain = case.optimizer.chain
  embeddings = (
    {'embeddings': RATES['embeddings']} if chain and chain.others else {}
  )
  coordinates = {**own, **_AGAIN, **embeddings, **decay_of(case), **own}
  case = dataclasses.replace(case, margin=math.inf)
  return improve_all(case, learning_rate, coordinates)
