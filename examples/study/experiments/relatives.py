"""Published relatives of MERIT and Hyperball, as chains of the kit."""

from typing import NamedTuple

from examples.study.analysis import tables as t
from examples.study.optimizers import ADAMW, LAMB, MERIT, PAPER
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import (
  B1,
  Plan,
  at_batches,
  gather,
)
from examples.study.tuning.coordinates import (
  ChainField,
  Coordinates,
  Improved,
  improve_all,
)
from examples.study.tuning.rest import (
  KEPT,
  RATES,
  RATIO,
  RMS,
  WEIGHT_DECAY,
  everything_tuned,
)

TITLE = 'Relatives'
TEXT = """\
Optimizers for large batches side by side. AdamW, LAMB, MERIT and LARS update
all parameters, with the warm-up, b1 and initial weights that suited each best
(LARS has those of LAMB, but for b1), and then the weight decay tuned. The
others update hidden matrices: Muon and Hyperball with the rest tuned, and
relatives that begin with what was best for the l2 ratio (OrScale, and Muon with
the decay in the ratio) or for the RMS, and then have their own settings, the
rates of embeddings and of gains and biases, and the decay tuned. Each value has
its own learning rate; what was tried has losses of one seed, what was chosen
those of eight fresh ones."""


class _Relative(NamedTuple):
  """An optimizer, and what is tuned of it beside rates and decay.

  Attributes:
    start: Name of the one whose settings it begins with.
    parts: Parts of its chain.
    own: Settings that only it has.
    others: Optimizer of all other parameters; if empty, that of the start.
    rate: First guess of the learning rate over that of the start.
  """

  start: str
  parts: tuple[str, ...]
  own: Coordinates = {}
  others: str = ''
  rate: float = 1.0


_PAPER = tuple(x.name for x in PAPER)
_MUON = (RMS, RATIO, KEPT)
_INSIDE = 'Muon, decay in the l2 ratio'
_MONA = tuple(
  (f'accelerate {x}', 'muon', 'rms', 'decay') for x in (0.9, 0.975, 0.99)
)
_RELATIVES = {
  # A momentum that sums steps makes them larger by 1 / (1 - b1).
  'LARS': _Relative(LAMB.name, ('decay', 'l2', 'trace'), {'b1': B1}, rate=0.2),
  _INSIDE: _Relative(RATIO, ('muon', 'decay', 'l2')),
  'OrScale': _Relative(RATIO, ('muon', 'decay', 'l2 bounded')),
  'OrScale-LM': _Relative(RMS, ('muon', 'rms', 'decay', 'l2 calibrated')),
  'MONA': _Relative(
    RMS, _MONA[1], {'acceleration': ChainField('parts', _MONA, form='{0[0]}')}
  ),
  'Scion': _Relative(
    RMS,
    ('muon momentum', 'spectral', 'shrink'),
    {
      'norm': ChainField('others', ('lmo row', 'lmo max'), form='{}'),
      'b1': B1,
    },
    others='lmo row',
    # Square matrices of width 64 have an RMS of 1/8, Muon's one of 0.2.
    rate=1.6,
  ),
}
_PAIRS = (
  *((x, RMS) for x in (*_PAPER, KEPT, *_RELATIVES) if x != 'LARS'),
  (_INSIDE, RATIO),
  ('OrScale', _INSIDE),
  (MERIT.name, ADAMW.name),
  (MERIT.name, LAMB.name),
  ('LARS', LAMB.name),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all at the largest batch."""
  return at_batches(_plan_batch, scale, scale.few_batch_sizes[-1:])


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  tuned = yield from everything_tuned(scale, size, (*_PAPER, *_MUON))
  found = yield from gather(
    {name: _tune(name, x, tuned[x.start]) for name, x in _RELATIVES.items()}
  )
  return [
    *(tuned[x].points[0].labelled(chosen='') for x in _MUON),
    *(point for x in _PAPER for point in tuned[x].points),
    *(point for x in found.values() for point in x.points),
  ]


def _tune(name: str, relative: _Relative, start: Improved) -> Plan[Improved]:
  """Plans to tune a relative from what it begins with."""
  case = start.best.with_optimizer(name=name)
  case = case.with_chain(
    parts=relative.parts,
    others=relative.others or case.optimizer.chain.others,
  )
  rates = RATES if case.optimizer.chain.others else {}
  return improve_all(
    case,
    relative.rate * start.learning_rate,
    {**relative.own, **rates, **WEIGHT_DECAY},
  )


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
