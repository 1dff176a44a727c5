"""Hyperball's lead over Muon where QK-norm bounds attention logits."""

import dataclasses

from examples.study.analysis import tables as t
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import (
  B1,
  INITIAL_WEIGHTS,
  WARMUP,
  Plan,
  at_batches,
  gather,
  muon_and_hyperball,
)
from examples.study.tuning.coordinates import Improved, improve_all
from examples.study.tuning.rest import (
  KEPT,
  RATES,
  RMS,
  decay_of,
  tune_rest,
)

TITLE = 'With QK-norm'
TEXT = """\
Muon and Hyperball with an RMSNorm of queries and keys in each head, all tuned
again from what was best without it: the learning rate, warm-up, b1, the
deviation of the initial weights, the rate of embeddings, and the decay of
hidden matrices (Hyperball: none). What was tried has losses of one seed, what
was chosen those of eight fresh ones."""
_COORDINATES = {
  'warm-up': WARMUP,
  'b1': B1,
  'initial weights': INITIAL_WEIGHTS,
  'embeddings': RATES['embeddings'],
}


def _with_qk_norm(name: str) -> str:
  return f'{name}, QK-norm'


_PAIRS = (
  (KEPT, RMS),
  (_with_qk_norm(KEPT), _with_qk_norm(RMS)),
  (_with_qk_norm(RMS), RMS),
  (_with_qk_norm(KEPT), KEPT),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans both at the smallest, middle and largest batch."""
  return at_batches(_plan_batch, scale, scale.few_batch_sizes)


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  before = yield from muon_and_hyperball(scale, size)
  tuned = yield from tune_rest(scale, before)
  retuned = yield from gather({x: _retune(x, tuned[x]) for x in (RMS, KEPT)})
  return [
    *(tuned[x].points[0].labelled(chosen='') for x in retuned),
    *(point for x in retuned.values() for point in x.points),
  ]


def _retune(name: str, start: Improved) -> Plan[Improved]:
  """Plans to tune with QK-norm what was tuned without."""
  optimizer = dataclasses.replace(
    start.best.optimizer.with_settings(qk_norm=True), name=_with_qk_norm(name)
  )
  return improve_all(
    dataclasses.replace(start.best, optimizer=optimizer),
    start.learning_rate,
    {**_COORDINATES, **decay_of(name)},
    start.best.scale.many_seeds,
  )


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
