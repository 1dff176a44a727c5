"""Hyperball's lead over Muon where QK-norm bounds attention logits."""

from examples.study.analysis import tables as t
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Plan, at_batches, gather
from examples.study.tuning.coordinates import Improved
from examples.study.tuning.rest import KEPT, RMS, everything_tuned, tune_again

TITLE = 'With QK-norm'
TEXT = """\
Muon and Hyperball, without and with an RMSNorm of queries and keys in each head
(QK-norm). All are tuned again from what was best with the rest tuned: the
learning rate, warm-up, b1, the deviation of the initial weights, the rate of
embeddings, and the decay of hidden matrices (Hyperball: none). What was tried
has losses of one seed, what was chosen those of eight fresh ones."""
_MUON, _HYPERBALL = 'Muon, tuned again', 'Hyperball, tuned again'
_MUON_QK, _HYPERBALL_QK = 'Muon, QK-norm', 'Hyperball, QK-norm'
_STARTS = {
  _MUON: RMS,
  _HYPERBALL: KEPT,
  _MUON_QK: RMS,
  _HYPERBALL_QK: KEPT,
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
  """Plans both at the middle and the largest batch."""
  return at_batches(_plan_batch, scale, scale.few_batch_sizes[-2:])


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  tuned = yield from everything_tuned(scale, size)
  again = yield from gather(
    {name: _retune(name, tuned[x]) for name, x in _STARTS.items()}
  )
  return [
    *(tuned[x].points[0].labelled(chosen='') for x in (RMS, KEPT)),
    *(point for x in again.values() for point in x.points),
  ]


def _retune(name: str, start: Improved) -> Plan[Improved]:
  """Plans to tune again, without QK-norm or with it."""
  case = start.best.with_optimizer(name=name)
  if name in (_MUON_QK, _HYPERBALL_QK):
    case = case.with_settings(qk_norm=True)
  return tune_again(case, start.learning_rate)


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
