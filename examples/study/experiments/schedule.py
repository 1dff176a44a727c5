"""Schedules of the learning rate."""

from collections.abc import Iterable, Mapping
import functools
from typing import Any

from examples.study.analysis import tables as t
from examples.study.optimizers import ADAMW, MERIT
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Plan
from examples.study.tuning.coordinates import Improved, improve_all
from examples.study.tuning.rest import (
  ADAMW_REST,
  KEPT,
  MERIT_REST,
  RMS,
  WITH_REST,
  Relative,
  Tuning,
  at_batches,
  decay_of,
  tune_rest,
)

TITLE = 'Schedules'
TEXT = """\
What was best with a cosine to zero (of AdamW and MERIT when tuned again; of
MERIT at the middle batch, as it was run before, also when tuned once; of both
also with the rest tuned, as in the table of relatives), with other schedules
after the warm-up, and a learning rate and a weight decay for each (Hyperball:
none): linear to zero; the peak, and for the last fifth of the steps 1 - sqrt
(WSD); 1 - sqrt all the way. Here 1 - sqrt is one minus the square root of the
share of the steps of the decay that are done. Warm-up, b1 and initial weights
were tuned with the cosine. AdamW with the rest tuned took a decay of 0.1 with
the linear schedule at the largest batch, which was not tried with the cosine: a
part of that gain may be the decay. That MERIT and AdamW with one learning rate
are compared was decided after their losses were known. Losses are those of
eight fresh seeds."""
_ONCE = 'MERIT, tuned once'
_STARTS: dict[str, Tuning] = {
  ADAMW.name: Relative(ADAMW.name).tune,
  MERIT.name: Relative(MERIT.name).tune,
  RMS: tune_rest,
  KEPT: tune_rest,
}
_WITH_REST: dict[str, Tuning] = {x: y.tune for x, y in WITH_REST.items()}
_COSINE, _LINEAR, _SQRT = 'cosine', 'linear', '1 - sqrt'
_FALLING = dict(schedule='wsd', decay_shape='1-sqrt')
_SCHEDULES: dict[str, dict[str, Any]] = {
  _COSINE: {},
  _LINEAR: dict(schedule='linear'),
  'WSD': _FALLING,
  _SQRT: _FALLING,
}
_PAIRS = (
  *(
    (f'{x}, {y}', f'{x}, {_COSINE}')
    for x in (*_STARTS, _ONCE)
    for y in _SCHEDULES
    if y != _COSINE
  ),
  *((f'{x}, WSD', f'{x}, linear') for x in (*_STARTS, _ONCE)),
  *((f'{KEPT}, {x}', f'{RMS}, {x}') for x in _SCHEDULES),
  *((f'{MERIT.name}, {x}', f'{ADAMW.name}, {x}') for x in _SCHEDULES),
  *((f'{_ONCE}, {x}', f'{ADAMW.name}, {x}') for x in _SCHEDULES),
  *((f'{x}, {_LINEAR}', f'{x}, {_COSINE}') for x in _WITH_REST),
  *(
    (f'{x}, {_LINEAR}', f'{y}, {_LINEAR}')
    for x, y in (
      (ADAMW_REST, ADAMW.name),
      (MERIT_REST, MERIT.name),
      (MERIT_REST, ADAMW_REST),
      (MERIT_REST, RMS),
    )
  ),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all at the largest batch, what gained there at the middle one too."""
  *_, middle, largest = scale.few_batch_sizes
  once = {_ONCE: lambda scale, size, _: tune_rest(scale, size, MERIT.name)}
  gained = _with_schedules(_STARTS | once, (_COSINE, _LINEAR, 'WSD'))
  every = _with_schedules(_STARTS, _SCHEDULES)
  rest = _with_schedules(_WITH_REST, (_COSINE, _LINEAR))
  return at_batches(scale, {middle: gained | rest, largest: every | rest})


def _with_schedules(
  starts: Mapping[str, Tuning], schedules: Iterable[str]
) -> dict[str, Tuning]:
  return {
    f'{name}, {schedule}': functools.partial(_tune, start, name, schedule)
    for name, start in starts.items()
    for schedule in schedules
  }


def _tune(
  tune: Tuning,
  optimizer: str,
  schedule: str,
  scale: Scale,
  size: int,
  name: str,
) -> Plan[Improved]:
  """Plans a learning rate and a decay for a schedule."""
  start = (yield from tune(scale, size, optimizer)).best
  steps = scale.num_steps(size)
  settings = {'steps': steps, **_SCHEDULES[schedule]}
  if schedule == _SQRT:
    # If there are fewer steps after the warm-up, all of these.
    settings['decay_steps'] = steps
  case = start.case.with_optimizer(name=name).with_settings(**settings)
  rate = start.tuned.learning_rate
  return (yield from improve_all(case, rate, decay_of(case)))


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and the learning rates."""
  points = t.select(points, role='best')
  return {
    'losses': t.pivot(points, ['optimizer'], 'batch'),
    **t.compare(points, _PAIRS, 'batch'),
    'tuning': t.pivot(points, ['batch', 'optimizer'], cells=t.TUNING),
  }
