"""Everything tuned, and what begins there and is tuned again.

First the decay and, with Muon's direction, what is beside hidden matrices;
then, of these and of other optimizers that begin with their settings, all.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, TypeAlias

from examples.study.chains import Chain
from examples.study.optimizers import ADAMW, HYPERBALL, MERIT, MUON, PAPER
from examples.study.points import Point
from examples.study.scales import DECAY, Scale
from examples.study.tuning.cases import Case
from examples.study.tuning.coordinates import (
  ChainField,
  Coordinate,
  Coordinates,
  GroupRate,
  Improved,
  best,
  improve_all,
)
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.stages import B1, initial_weights, tune_stage

RMS, RATIO, KEPT = (
  'Muon, rest tuned',
  'Muon, l2 ratio, rest tuned',
  'Hyperball, rest tuned',
)
"""Muon with three sizes, each with the rest tuned."""
_PARTS = {
  RMS: ('muon', 'rms', 'decay'),
  RATIO: ('muon', 'l2', 'decay'),
  KEPT: HYPERBALL.chain.parts,
}
_STARTS = {
  **{x.name: x for x in PAPER},
  RMS: MUON,
  RATIO: HYPERBALL,
  KEPT: HYPERBALL,
}
"""What each begins with, all but the rest tuned."""
_RATES = (0.04125, 0.0825, 0.165, 0.33, 0.66, 1.32, 2.64, 5.28)
RATES: Coordinates = {
  'embeddings': GroupRate('embeddings', _RATES),
  'gains and biases': GroupRate('vectors', _RATES),
}
"""Learning rates of groups over that of hidden matrices."""
_WEIGHT_DECAY: Coordinates = {
  'decay': Coordinate('weight_decay', (0.0, DECAY, 0.1, 0.3, 1.0, 3.0))
}
_ADAM: Coordinates = {
  'Adam': ChainField('others', ('adam', 'adam corrected'), form='{}')
}
_AGAIN: Coordinates = {
  'warm-up': Coordinate('warmup_share', (0.1, 0.3, 0.5)),
  'b1': B1,
  'initial weights': Coordinate(
    'init_scale', (0.5, 1.0, 2.0, 4.0), '{:g} ×', promising=0.02
  ),
}


Tuning: TypeAlias = Callable[[Scale, int, str], Plan[Improved]]
"""Plans to tune what has a name at a batch."""


def decay_of(case: Case) -> Coordinates:
  """Returns the decay to tune; it does nothing where the norm is kept."""
  chain = case.optimizer.chain
  return {} if chain and 'keep l2' in chain.parts else _WEIGHT_DECAY


def at_batches(
  scale: Scale, tunings: Mapping[int, Mapping[str, Tuning]]
) -> Plan[list[Point]]:
  """Plans tunings, by batch and name; the last batch is asked for first.

  Returns the points of each, as :meth:`Improved.evaluate` does.
  """
  found = yield from gather(
    {
      (size, name): _plan_points(tune(scale, size, name))
      for size in reversed(list(tunings))
      for name, tune in tunings[size].items()
    }
  )
  return [
    point
    for size in tunings
    for name in tunings[size]
    for point in found[size, name]
  ]


def _plan_points(plan: Plan[Improved]) -> Plan[list[Point]]:
  found = yield from plan
  return (yield from found.evaluate())


def tune_rest(scale: Scale, size: int, name: str) -> Plan[Improved]:
  """Plans an optimizer at a batch with everything tuned.

  Args:
    scale: Size of the study.
    size: Global batch, sequences.
    name: Muon with a size, or the name of one of ``PAPER``.
  """
  case = Case(scale, _STARTS[name], size)
  _, start = best((yield from tune_stage(initial_weights, case)))
  case = start.case.with_optimizer(name=name)
  coordinates: Coordinates = {}
  if name in _PARTS:
    settings = dict(case.optimizer.settings)
    rate = settings.pop('adam_rate', HYPERBALL.chain.others_rate)
    # One of those whose neighbors are tried.
    nearest = min(_RATES, key=lambda x: abs(math.log(x / rate)))
    chain = Chain(_PARTS[name], 'adam', nearest)
    case = case.with_optimizer(chain=chain, settings=settings)
    coordinates = {**_ADAM, **RATES}
  coordinates = {**coordinates, **decay_of(case)}
  return (yield from improve_all(case, start.tuned.learning_rate, coordinates))


@dataclasses.dataclass(frozen=True)
class Relative:
  """An optimizer that begins with what was best for another, and tunes again.

  What it has of its own, then warm-up, b1, initial weights, the rate of
  embeddings and the decay. Of learning rates the best one is taken, even if the
  next larger one is much worse: fresh seeds tell what it is worth.

  Attributes:
    start: Name of that one, as :func:`tune_rest` takes it.
    change: What makes it of that one; by default it is the same.
    own: Settings to tune that only it has, or other values of those of all.
    rate: First guess of the learning rate over that of the start.
  """

  start: str
  change: Callable[[Case], Case] = lambda case: case
  own: Coordinates = dataclasses.field(default_factory=dict)
  rate: float = 1.0

  def tune(self, scale: Scale, size: int, name: str) -> Plan[Improved]:
    """Plans to tune it at a batch, called by a name."""
    start = (yield from tune_rest(scale, size, self.start)).best
    case = self.change(start.case.with_optimizer(name=name))
    case = dataclasses.replace(case, margin=math.inf)
    chain = case.optimizer.chain
    has_others = chain is not None and chain.others
    embeddings = {'embeddings': RATES['embeddings']} if has_others else {}
    coordinates = {**_AGAIN, **embeddings, **decay_of(case)}
    # Its own come first, and with its own values.
    coordinates = {**self.own, **coordinates, **self.own}
    rate = self.rate * start.tuned.learning_rate
    return (yield from improve_all(case, rate, coordinates))


def with_parts(*parts: str, **changes: Any) -> Callable[[Case], Case]:
  """Returns the change to a chain of other parts."""
  return lambda case: case.with_chain(parts=parts, **changes)


ADAMW_REST, MERIT_REST = 'AdamW, rest tuned', 'MERIT, rest tuned'
WITH_REST = {
  ADAMW_REST: Relative(
    ADAMW.name,
    lambda case: case.with_optimizer(
      chain=Chain(('adam corrected', 'decay'), 'adam corrected', 0.66)
    ),
    RATES,
  ),
  MERIT_REST: Relative(
    MERIT.name,
    lambda case: case.with_optimizer(
      chain=Chain(('adam', 'decay', 'merit', 'clip'), 'adam', 0.66)
    ),
    RATES,
  ),
}
"""AdamW and MERIT of hidden matrices, with the rest tuned as Muon's is."""
