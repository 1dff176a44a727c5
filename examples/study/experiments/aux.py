"""What Hyperball's lead over Muon is made of: the norm, the ratio, the rest."""

from examples.study.analysis import tables as t
from examples.study.optimizers import HYPERBALL, MUON
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import (
  Case,
  Plan,
  at_batches,
  gather,
  initial_weights,
  tune_stage,
)
from examples.study.tuning.rest import KEPT, RATIO, RMS, everything_tuned

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
  return at_batches(_plan_batch, scale, scale.few_batch_sizes)


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  before = yield from gather(
    {x.name: _before(Case(scale, x, size)) for x in (MUON, HYPERBALL)}
  )
  found = yield from everything_tuned(scale, size, (RMS, RATIO, KEPT))
  points = [*before.values(), *(x.points for x in found.values())]
  return [point for each in points for point in each]


def _before(case: Case) -> Plan[list[Point]]:
  """Plans more fresh seeds for an optimizer as it was."""
  found = yield from tune_stage(initial_weights, case)
  return (yield from found.with_seeds(case.scale.many_seeds))


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, what each part is worth, and what was tried."""
  return t.searched(points, _PAIRS)
