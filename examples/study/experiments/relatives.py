"""Published relatives of MERIT and Hyperball, as chains of the kit."""

from examples.study.analysis import tables as t
from examples.study.optimizers import ADAMW, LAMB, MERIT, PAPER
from examples.study.points import Point
from examples.study.scales import DECAY, Scale
from examples.study.tuning import Plan
from examples.study.tuning.coordinates import ChainField, Coordinate
from examples.study.tuning.rest import (
  ADAMW_REST,
  KEPT,
  MERIT_REST,
  RATES,
  RMS,
  WITH_REST,
  Relative,
  at_batches,
  tune_rest,
  with_parts,
)

TITLE = 'Relatives'
TEXT = """\
Optimizers for large batches side by side. AdamW, LAMB and MERIT have the
warm-up, b1, initial weights and weight decay that suited each best, and one
learning rate for all parameters; Muon and Hyperball, of hidden matrices, the
rest tuned. All others begin with what was best for one of these, and are tuned
again: the learning rate, warm-up, b1, initial weights, the rate of embeddings,
the decay, and settings of their own. So are the first five themselves. With the
rest tuned, MERIT is of hidden matrices alone, and an Adam without decay (b1
0.9) updates the others, at rates of their own for embeddings and for gains and
biases. Of the learning rates of what is tuned again the best is taken, even if
the next larger one is unstable. What was tried has losses of one seed, what was
chosen those of eight fresh ones."""
_MUON, _HYPERBALL = 'Muon, tuned again', 'Hyperball, tuned again'
_ADAMW = 'AdamW, tuned again'
_LAMB = 'LAMB, tuned again'
_MERIT = 'MERIT, tuned again'
_MONA = tuple(
  (f'accelerate {x}', 'muon', 'rms', 'decay') for x in (0.9, 0.975, 0.99)
)
_SMALL_DECAYS = Coordinate('weight_decay', (0.0, 1e-3, 3e-3, DECAY, 0.03, 0.1))
_RELATIVES = {
  _MUON: Relative(RMS),
  _HYPERBALL: Relative(KEPT),
  _ADAMW: Relative(ADAMW.name),
  ADAMW_REST: WITH_REST[ADAMW_REST],
  _LAMB: Relative(LAMB.name),
  _MERIT: Relative(MERIT.name),
  MERIT_REST: WITH_REST[MERIT_REST],
  # Its decay is added to gradients, which are clipped to a norm of 1. A
  # momentum that sums steps makes them larger by 1 / (1 - b1).
  'LARS': Relative(
    LAMB.name, with_parts('decay', 'l2', 'trace'), {'decay': _SMALL_DECAYS}, 0.2
  ),
  'OrScale-LM': Relative(
    RMS, with_parts('muon', 'rms', 'decay', 'l2 calibrated')
  ),
  'MONA': Relative(
    RMS,
    with_parts(*_MONA[1]),
    {'acceleration': ChainField('parts', _MONA, form='{0[0]}')},
  ),
  # Square matrices of width 64 have an RMS of 1/8, Muon's one of 0.2.
  'Scion': Relative(
    RMS,
    with_parts('muon momentum', 'spectral', 'shrink', others='lmo row'),
    {'norm': ChainField('others', ('lmo row', 'lmo max'), form='{}'), **RATES},
    1.6,
  ),
}
_NOT_AT_SMALLEST = ('LARS', 'OrScale-LM', 'MONA', 'Scion')
_PAIRS = (
  *((x.name, _MUON) for x in PAPER),
  *((x, _MUON) for x in _RELATIVES if x not in (_MUON, 'LARS')),
  (_ADAMW, ADAMW.name),
  (ADAMW_REST, _ADAMW),
  (_LAMB, LAMB.name),
  (_MERIT, MERIT.name),
  (MERIT_REST, _MERIT),
  (MERIT.name, ADAMW.name),
  (_MERIT, _ADAMW),
  (_MERIT, ADAMW_REST),
  (MERIT_REST, ADAMW_REST),
  (MERIT.name, LAMB.name),
  (_MERIT, _LAMB),
  ('LARS', _LAMB),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all at the middle and at the largest batch, fewer at the smallest."""
  *smallest, middle, largest = scale.few_batch_sizes
  first = {x.name: tune_rest for x in PAPER}
  tunings = first | {name: x.tune for name, x in _RELATIVES.items()}
  few = {k: x for k, x in tunings.items() if k not in _NOT_AT_SMALLEST}
  return at_batches(
    scale,
    {**dict.fromkeys(smallest, few), middle: tunings, largest: tunings},
  )


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
