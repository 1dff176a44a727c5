"""Relatives: optimizers that begin with what was best for another."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from examples.study.scales import Scale
from examples.study.tuning.cases import Case
from examples.study.tuning.coordinates import Coordinates, Improved
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.rest import everything_tuned, tune_again


class Relative(NamedTuple):
  """An optimizer that begins with what was best for another.

  Attributes:
    start: Name of that one, as :func:`everything_tuned` takes it.
    change: What makes it of that one; by default it is the same.
    own: Settings to tune that only it has, or other values of those of all.
    rate: First guess of the learning rate over that of the start.
  """

  start: str
  change: Callable[[Case], Case] = lambda case: case
  own: Coordinates = {}
  rate: float = 1.0


def with_parts(*parts: str, **changes: Any) -> Callable[[Case], Case]:
  """Returns the change to a chain of other parts."""
  return lambda case: case.with_chain(parts=parts, **changes)


def tune_relatives(
  scale: Scale, size: int, relatives: Mapping[str, Relative]
) -> Plan[dict[str, Improved]]:
  """Plans to tune relatives at a batch, by name."""
  starts = dict.fromkeys(x.start for x in relatives.values())
  tuned = yield from everything_tuned(scale, size, tuple(starts))
  return (
    yield from gather(
      {
        name: tune_again(
          x.change(tuned[x.start].best.with_optimizer(name=name)),
          x.rate * tuned[x.start].learning_rate,
          x.own,
        )
        for name, x in relatives.items()
      }
    )
  )
