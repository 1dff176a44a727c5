"""The rest: what is beside the hidden matrices, tuned for sizes of Muon's."""

import dataclasses

from examples.study.chains import Chain
from examples.study.optimizers import HYPERBALL, MUON
from examples.study.scales import DECAY, Scale
from examples.study.tuning.coordinates import (
  ChainField,
  Coordinate,
  Coordinates,
  GroupRate,
  Improved,
  Search,
  improve_all,
)
from examples.study.tuning.plans import Plan, gather

RMS, RATIO, KEPT = 'Muon, RMS', 'Muon, l2 ratio', 'Hyperball, rest tuned'
"""Muon with three sizes, each with the rest tuned."""
_PARTS = {
  RMS: ('muon', 'rms', 'decay'),
  RATIO: ('muon', 'l2', 'decay'),
  KEPT: HYPERBALL.chain.parts,
}
_RATES = (0.04125, 0.0825, 0.165, 0.33, 0.66, 1.32, 2.64, 5.28)
RATES: Coordinates = {
  'embeddings': GroupRate('embeddings', _RATES),
  'gains and biases': GroupRate('vectors', _RATES),
}
"""Learning rates of groups over that of hidden matrices."""
WEIGHT_DECAY: Coordinates = {
  'decay': Coordinate('weight_decay', (0.0, DECAY, 0.1, 0.3, 1.0, 3.0), DECAY)
}
_ADAM: Coordinates = {
  'Adam': ChainField('others', ('adam', 'adam corrected'), form='{}')
}


def decay_of(name: str) -> Coordinates:
  """Returns the decay to tune; it does nothing where the norm is kept."""
  return {} if name == KEPT else WEIGHT_DECAY


def tune_rest(
  scale: Scale, before: dict[str, Search]
) -> Plan[dict[str, Improved]]:
  """Plans to tune the rest of Muon with three sizes.

  Args:
    scale: Size of the study.
    before: Muon and Hyperball at a batch, with all else tuned.
  """
  starts = {x: before[HYPERBALL.name] for x in _PARTS}
  starts[RMS] = before[MUON.name]
  return (
    yield from gather(
      {x: _tune_rest(x, start, scale.many_seeds) for x, start in starts.items()}
    )
  )


def _tune_rest(name: str, start: Search, num_seeds: int) -> Plan[Improved]:
  optimizer = dataclasses.replace(
    start.best.optimizer,
    name=name,
    chain=Chain(_PARTS[name], 'adam', HYPERBALL.chain.others_rate),
  )
  return (
    yield from improve_all(
      dataclasses.replace(start.best, optimizer=optimizer),
      start.learning_rate,
      _ADAM | RATES | decay_of(name),
      num_seeds,
    )
  )
