"""What Hyperball's lead over Muon is made of: the norm, the ratio, the rest."""

from examples.study.analysis import tables as t
from examples.study.optimizers import HYPERBALL, MUON
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, best, initial_weights, tune_stage
from examples.study.tuning.coordinates import Improved
from examples.study.tuning.rest import KEPT, RATIO, RMS, at_batches, tune_rest

TITLE = 'The norm, or the rest?'
TEXT = """\
Muon’s direction with three sizes: that of Adam’s updates (RMS), the l2 ratio,
and the l2 ratio with the norm kept (Hyperball). What is no hidden matrix is
updated by the same Adam, tuned as well with each: with bias correction or
without, then the rates of embeddings and of gains and biases over that of
hidden matrices, then the decay of hidden matrices, which is none where their
norm is kept. Each value has its own learning rate (at the smaller batches only
if it is at most 0.005 worse at the rate of the best one); what was tried has
losses of one seed, what was chosen those of eight fresh ones. Warm-up, b1 and
initial weights are those that suited Muon (RMS) and Hyperball (the others) best
at a batch. The first two rows are the optimizers as they were before."""
_BEFORE = {x.name: x for x in (MUON, HYPERBALL)}
_PAIRS = (
  (HYPERBALL.name, MUON.name),
  (RMS, MUON.name),
  (RATIO, RMS),
  (KEPT, RATIO),
  (KEPT, RMS),
  (KEPT, HYPERBALL.name),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans the rest of each size at the smallest, middle and largest batch."""
  tunings = dict.fromkeys(_BEFORE, _before)
  tunings |= dict.fromkeys((RMS, RATIO, KEPT), tune_rest)
  sizes = scale.few_batch_sizes
  return at_batches(scale, dict.fromkeys(sizes, tunings))


def _before(scale: Scale, size: int, name: str) -> Plan[Improved]:
  """Plans an optimizer as it was, whose tuning is shown elsewhere."""
  case = Case(scale, _BEFORE[name], size)
  _, found = best((yield from tune_stage(initial_weights, case)))
  return Improved(found, '', [])


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, what each part is worth, and what was tried."""
  return t.searched(points, _PAIRS)
