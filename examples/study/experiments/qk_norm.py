"""Hyperball's lead over Muon where QK-norm bounds attention logits."""

from examples.study.analysis import tables as t
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan
from examples.study.tuning.coordinates import Improved
from examples.study.tuning.rest import (
  KEPT,
  RMS,
  Relative,
  at_batches,
  tune_rest,
)

TITLE = 'With QK-norm'
TEXT = """\
Muon and Hyperball, without and with an RMSNorm of queries and keys in each head
(QK-norm). All are tuned again from what was best with the rest tuned: the
learning rate, warm-up, b1, the deviation of the initial weights, the rate of
embeddings, and the decay of hidden matrices (Hyperball: none). What was tried
has losses of one seed, what was chosen those of eight fresh ones."""
_MUON, _HYPERBALL = 'Muon, tuned again', 'Hyperball, tuned again'
_MUON_QK, _HYPERBALL_QK = 'Muon, QK-norm', 'Hyperball, QK-norm'


def _with_qk_norm(case: Case) -> Case:
  return case.with_settings(qk_norm=True)


_RELATIVES = {
  _MUON: Relative(RMS),
  _HYPERBALL: Relative(KEPT),
  _MUON_QK: Relative(RMS, _with_qk_norm),
  _HYPERBALL_QK: Relative(KEPT, _with_qk_norm),
}
_PAIRS = (
  (_HYPERBALL, _MUON),
  (_HYPERBALL_QK, _MUON_QK),
  (_MUON_QK, _MUON),
  (_HYPERBALL_QK, _HYPERBALL),
  (_MUON, RMS),
  (_HYPERBALL, KEPT),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans both at a few batches."""
  tunings = {RMS: _before, KEPT: _before}
  tunings |= {name: x.tune for name, x in _RELATIVES.items()}
  sizes = scale.few_batch_sizes
  return at_batches(scale, dict.fromkeys(sizes, tunings))


def _before(scale: Scale, size: int, name: str) -> Plan[Improved]:
  """Plans what the others begin with, whose tuning is shown elsewhere."""
  found = yield from tune_rest(scale, size, name)
  return Improved(found.best, '', [])


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
