"""Schedules of the learning rate."""

from typing import Any

from examples.study.analysis import tables as t
from examples.study.optimizers import ADAMW, MERIT
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import Case, Plan, at_batches, gather
from examples.study.tuning.coordinates import Improved, improve_all
from examples.study.tuning.rest import KEPT, RMS, decay_of, everything_tuned

TITLE = 'Schedules'
TEXT = """\
What was best with a cosine to zero, with other schedules after the warm-up, and
a learning rate and a weight decay for each (Hyperball: none): a line to zero;
the peak, and for the last fifth of the steps 1 - sqrt (WSD); 1 - sqrt all the
way. What is 1 - sqrt falls as one minus the root of the share of its steps that
are done. Losses are those of eight fresh seeds."""
_OPTIMIZERS = (ADAMW.name, MERIT.name, RMS, KEPT)
_COSINE, _LINEAR, _WSD, _SQRT = 'cosine', 'linear', 'WSD', '1 - sqrt'
_PAIRS = (
  *(
    (f'{x}, {y}', f'{x}, {_COSINE}')
    for x in _OPTIMIZERS
    for y in (_LINEAR, _WSD, _SQRT)
  ),
  *((f'{KEPT}, {x}', f'{RMS}, {x}') for x in (_COSINE, _LINEAR, _WSD, _SQRT)),
)


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans all at the largest batch."""
  return at_batches(_plan_batch, scale, scale.few_batch_sizes[-1:])


def _plan_batch(scale: Scale, size: int) -> Plan[list[Point]]:
  tuned = yield from everything_tuned(scale, size, _OPTIMIZERS)
  found = yield from gather(
    {
      (name, schedule): _with_schedule(f'{name}, {schedule}', start, settings)
      for name, start in tuned.items()
      for schedule, settings in _schedules(start.best).items()
    }
  )
  return [x.points[0] for x in found.values()]


def _with_schedule(
  name: str, start: Improved, settings: dict[str, Any]
) -> Plan[Improved]:
  """Plans a learning rate and a decay for a schedule."""
  case = start.best.with_optimizer(name=name).with_settings(**settings)
  return improve_all(case, start.learning_rate, decay_of(case))


def _schedules(case: Case) -> dict[str, dict[str, Any]]:
  """Returns the settings of each schedule."""
  falling = dict(schedule='wsd', decay_shape='1-sqrt')
  # So many steps or, if there are fewer, all after the warm-up.
  steps = case.scale.num_steps(case.batch_size)
  return {
    _COSINE: {},
    _LINEAR: dict(schedule='linear'),
    _WSD: falling,
    _SQRT: falling | dict(decay_steps=steps),
  }


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and the learning rates."""
  return {
    'losses': t.pivot(points, ['optimizer'], 'batch'),
    **t.compare(points, _PAIRS, 'batch'),
    'tuning': t.pivot(points, ['batch', 'optimizer'], cells=t.TUNING),
  }
