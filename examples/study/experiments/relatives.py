"""Published relatives of MERIT and Hyperball, as chains of the kit."""

from collections.abc import Callable
from typing import Any, NamedTuple

from examples.study.analysis import tables as t
from examples.study.chains import Chain
from examples.study.optimizers import ADAMW, LAMB, MERIT, PAPER
from examples.study.points import Point
from examples.study.scales import DECAY, Scale
from examples.study.tuning import Case, Plan, at_batches, gather
from examples.study.tuning.coordinates import (
  ChainField,
  Coordinate,
  Coordinates,
  Improved,
)
from examples.study.tuning.rest import (
  KEPT,
  RATES,
  RATIO,
  RMS,
  everything_tuned,
  tune_again,
)

TITLE = 'Relatives'
TEXT = """\
Optimizers for large batches side by side. AdamW, LAMB and MERIT have the
warm-up, b1, initial weights and weight decay that suited each best, and one
learning rate for all parameters; Muon and Hyperball, of hidden matrices, the
rest tuned. All others begin with what was best for one of these, and are tuned
again: the learning rate, warm-up, b1, initial weights, the rate of embeddings,
the decay, and settings of their own. So are Muon and Hyperball. Of learning
rates the best is taken, even if the next larger one is unstable. What was tried
has losses of one seed, what was chosen those of eight fresh ones."""


class _Relative(NamedTuple):
  """An optimizer that begins with what was best for another.

  Attributes:
    start: Name of that one.
    change: What makes it of that one.
    own: Settings to tune that only it has, or other values of those of all.
    rate: First guess of the learning rate over that of the start.
  """

  start: str
  change: Callable[[Case], Case]
  own: Coordinates = {}
  rate: float = 1.0


def _parts(*parts: str, **changes: Any) -> Callable[[Case], Case]:
  return lambda case: case.with_chain(parts=parts, **changes)


_MUON, _HYPERBALL = 'Muon, tuned again', 'Hyperball, tuned again'
_ADAMW = 'AdamW, rest tuned'
_INSIDE = 'Muon, decay in the l2 ratio'
_MONA = tuple(
  (f'accelerate {x}', 'muon', 'rms', 'decay') for x in (0.9, 0.975, 0.99)
)
_SMALL_DECAYS = Coordinate('weight_decay', (0.0, 1e-3, 3e-3, DECAY, 0.03, 0.1))
_RELATIVES = {
  _MUON: _Relative(RMS, lambda case: case),
  _HYPERBALL: _Relative(KEPT, lambda case: case),
  _ADAMW: _Relative(
    ADAMW.name,
    lambda case: case.with_optimizer(
      chain=Chain(('adam corrected', 'decay'), 'adam corrected', 0.66)
    ),
    RATES,
  ),
  # Its decay is added to gradients, which are clipped to a norm of 1. A
  # momentum that sums steps makes them larger by 1 / (1 - b1).
  'LARS': _Relative(
    LAMB.name, _parts('decay', 'l2', 'trace'), {'decay': _SMALL_DECAYS}, 0.2
  ),
  _INSIDE: _Relative(RATIO, _parts('muon', 'decay', 'l2')),
  'OrScale-LM': _Relative(RMS, _parts('muon', 'rms', 'decay', 'l2 calibrated')),
  'MONA': _Relative(
    RMS,
    _parts(*_MONA[1]),
    {'acceleration': ChainField('parts', _MONA, form='{0[0]}')},
  ),
  # Square matrices of width 64 have an RMS of 1/8, Muon's one of 0.2.
  'Scion': _Relative(
    RMS,
    _parts('muon momentum', 'spectral', 'shrink', others='lmo row'),
    {'norm': ChainField('others', ('lmo row', 'lmo max'), form='{}'), **RATES},
    1.6,
  ),
}
_PAIRS = (
  *((x.name, _MUON) for x in PAPER),
  *((x, _MUON) for x in _RELATIVES if x not in (_MUON, 'LARS')),
  ('OrScale-LM', _INSIDE),
  (_ADAMW, ADAMW.name),
  (MERIT.name, ADAMW.name),
  (MERIT.name, LAMB.name),
  ('LARS', LAMB.name),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all at the largest batch."""
  return at_batches(_plan_batch, scale, scale.few_batch_sizes[-1:])


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  paper = [x.name for x in PAPER]
  tuned = yield from everything_tuned(scale, size, (*paper, RMS, RATIO, KEPT))
  found = yield from gather(
    {name: _tune(name, x, tuned[x.start]) for name, x in _RELATIVES.items()}
  )
  chosen = [*(tuned[x] for x in paper), *found.values()]
  return [point for x in chosen for point in x.points]


def _tune(name: str, relative: _Relative, start: Improved) -> Plan[Improved]:
  """Plans to tune a relative from what it begins with."""
  case = relative.change(start.best.with_optimizer(name=name))
  return tune_again(case, relative.rate * start.learning_rate, relative.own)


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
