"""Published relatives of MERIT and Hyperball, as chains of the kit."""

import dataclasses
from typing import NamedTuple

from examples.study.analysis import tables as t
from examples.study.chains import Chain
from examples.study.optimizers import LAMB, PAPER
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import (
  B1,
  Case,
  Plan,
  at_batches,
  gather,
  initial_weights,
  muon_and_hyperball,
)
from examples.study.tuning.coordinates import (
  ChainField,
  Coordinates,
  Improved,
  Search,
  improve_all,
)
from examples.study.tuning.rest import (
  KEPT,
  RATES,
  RATIO,
  RMS,
  WEIGHT_DECAY,
  tune_rest,
)

TITLE = 'Relatives'
TEXT = """\
Optimizers for large batches side by side. AdamW, LAMB, MERIT and LARS update
all parameters, with warm-up, b1 and initial weights that suited each best (LARS
has those of LAMB), and then the weight decay tuned. The others update hidden
matrices: Muon and Hyperball with the rest tuned, and relatives that begin with
what was best for one of them (OrScale and Muon with decay in the l2 ratio with
that for the l2 ratio, the others with that for the RMS) and then have their own
settings, the rates of embeddings and of gains and biases, and the decay tuned.
Each value has its own learning rate; what was tried has losses of one seed,
what was chosen those of eight fresh ones."""


class _Relative(NamedTuple):
  """A relative, and what is tuned of it.

  Attributes:
    start: Name of what it has all other settings from.
    parts: Parts of its chain.
    own: Settings that only it has.
    others: Optimizer of all other parameters; that of the start if empty.
    rate: First guess of the learning rate over that of the start.
  """

  start: str
  parts: tuple[str, ...]
  own: Coordinates = {}
  others: str = ''
  rate: float = 1.0


_MONA = tuple(
  (f'accelerate {x}', 'muon', 'rms', 'decay') for x in (0.9, 0.975, 0.99)
)
_OF_MUON = {
  'Muon, decay in the l2 ratio': _Relative(RATIO, ('muon', 'decay', 'l2')),
  'OrScale': _Relative(RATIO, ('muon', 'decay', 'l2 bounded')),
  'OrScale-LM': _Relative(RMS, ('muon', 'rms', 'decay', 'l2 calibrated')),
  'MONA': _Relative(
    RMS, _MONA[1], {'acceleration': ChainField('parts', _MONA, form='{0[0]}')}
  ),
  # Its hidden matrices have an RMS of 1/√rows, Muon's one of 0.2.
  'Scion': _Relative(
    RMS,
    ('muon momentum', 'spectral', 'shrink'),
    {
      'norm': ChainField('others', ('lmo row', 'lmo max'), form='{}'),
      'b1': B1,
    },
    'lmo row',
    1.6,
  ),
}
_LARS = Chain(('decay', 'l2', 'trace'))
# A momentum of 0.9 that sums steps makes them ten times as large.
_LARS_RATE = 0.2
_PAIRS = (
  *((x, RMS) for x in (KEPT, *_OF_MUON)),
  ('OrScale', 'Muon, decay in the l2 ratio'),
  *((x.name, RMS) for x in PAPER),
  ('LARS', LAMB.name),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all at the largest batch."""
  return at_batches(_plan_batch, scale, scale.few_batch_sizes[-1:])


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  found = yield from gather(
    {
      'all parameters': _plan_whole(scale, size),
      'hidden matrices': _plan_of_muon(scale, size),
    }
  )
  return [point for points in found.values() for point in points]


def _plan_whole(scale: Scale, size: int) -> Plan[list[Point]]:
  """Plans those that update all parameters."""
  before = yield from gather(
    {x.name: initial_weights(Case(scale, x, size)) for x in PAPER}
  )
  found = yield from gather(
    {
      **{x: _tune_decay(scale, y) for x, y in before.items()},
      'LARS': _plan_lars(scale, before[LAMB.name]),
    }
  )
  return [point for points in found.values() for point in points]


def _tune_decay(scale: Scale, start: Search) -> Plan[list[Point]]:
  improved = yield from improve_all(
    start.best,
    start.point.tuned.learning_rate,
    WEIGHT_DECAY,
    scale.many_seeds,
  )
  return improved.points


def _plan_lars(scale: Scale, lamb: Search) -> Plan[list[Point]]:
  optimizer = dataclasses.replace(
    lamb.best.optimizer.with_settings(b1=0.9), name='LARS', chain=_LARS
  )
  improved = yield from improve_all(
    dataclasses.replace(lamb.best, optimizer=optimizer),
    _LARS_RATE * lamb.point.tuned.learning_rate,
    {'b1': B1, **WEIGHT_DECAY},
    scale.many_seeds,
  )
  return improved.points


def _plan_of_muon(scale: Scale, size: int) -> Plan[list[Point]]:
  """Plans those that update hidden matrices by Muon's direction."""
  before = yield from muon_and_hyperball(scale, size)
  tuned = yield from tune_rest(scale, before)
  found = yield from gather(
    {
      name: _plan_relative(name, x, tuned[x.start])
      for name, x in _OF_MUON.items()
    }
  )
  points = [x.points[:1] for name, x in tuned.items() if name != RATIO]
  return [point for each in (*points, *found.values()) for point in each]


def _plan_relative(
  name: str, relative: _Relative, start: Improved
) -> Plan[list[Point]]:
  theirs = start.best.optimizer
  chain = dataclasses.replace(
    theirs.chain,
    parts=relative.parts,
    others=relative.others or theirs.chain.others,
  )
  optimizer = dataclasses.replace(theirs, name=name, chain=chain)
  improved = yield from improve_all(
    dataclasses.replace(start.best, optimizer=optimizer),
    relative.rate * start.learning_rate,
    {**relative.own, **RATES, **WEIGHT_DECAY},
    start.best.scale.many_seeds,
  )
  return improved.points


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
