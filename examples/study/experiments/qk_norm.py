"""Hyperball's lead over Muon where QK-norm bounds attention logits."""

import dataclasses

from examples.study.analysis import tables as t
from examples.study.optimizers import HYPERBALL, MUON
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
from examples.study.tuning.coordinates import Search, improve_all

TITLE = 'With QK-norm'
TEXT = """\
Muon and Hyperball with an RMSNorm of queries and keys in each head, all tuned
again: the learning rate, warm-up, b1, and the deviation of the initial weights,
each from what was best without QK-norm. What was tried has losses of one seed,
what was chosen those of eight fresh ones."""
_COORDINATES = {
  'warm-up': WARMUP,
  'b1': B1,
  'initial weights': INITIAL_WEIGHTS,
}


def _with_qk_norm(name: str) -> str:
  return f'{name}, QK-norm'


_PAIRS = (
  (HYPERBALL.name, MUON.name),
  (_with_qk_norm(HYPERBALL.name), _with_qk_norm(MUON.name)),
  (_with_qk_norm(MUON.name), MUON.name),
  (_with_qk_norm(HYPERBALL.name), HYPERBALL.name),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans both at the smallest, middle and largest batch."""
  return at_batches(_plan_batch, scale, scale.few_batch_sizes)


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  before = yield from muon_and_hyperball(scale, size)
  found = yield from gather(
    {
      **{x: y.with_seeds(scale.many_seeds) for x, y in before.items()},
      **{_with_qk_norm(x): _retune(y) for x, y in before.items()},
    }
  )
  return [point for points in found.values() for point in points]


def _retune(start: Search) -> Plan[list[Point]]:
  """Plans to tune with QK-norm what was tuned without."""
  plain = start.best.optimizer
  optimizer = dataclasses.replace(
    plain.with_settings(qk_norm=True), name=_with_qk_norm(plain.name)
  )
  case = dataclasses.replace(start.best, optimizer=optimizer)
  improved = yield from improve_all(
    case,
    start.point.tuned.learning_rate,
    _COORDINATES,
    case.scale.many_seeds,
  )
  return improved.points


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and what was tried."""
  return t.searched(points, _PAIRS)
