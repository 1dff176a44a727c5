"""Coordinate search: one setting after the other, from the best so far."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from examples.study.optimizers import Optimizer
from examples.study.points import Point, Tuned
from examples.study.scales import Scale
from examples.study.tuning.cases import Case
from examples.study.tuning.plans import Plan, gather

PROMISING = 0.005
"""Nats by which a variant may be worse at the learning rate of the best one,
and gets its own nevertheless. (At the two largest batches all do.)"""

Tunings: TypeAlias = dict[str, Tuned]
"""Tunings of one seed, by the name of the variant."""


class Search(NamedTuple):
  """What was tried of an optimizer at a batch size.

  Attributes:
    tried: Tunings of the values of the last coordinate.
    best: The optimizer with the best of them.
    point: That one, judged by fresh seeds.
  """

  tried: Tunings
  best: Optimizer
  point: Point

  @property
  def points(self) -> list[Point]:
    """What was tried, and what was the best of it, as points."""
    tried = [
      Point({**self.point.labels, 'role': 'tried', 'variant': name}, tuned)
      for name, tuned in self.tried.items()
    ]
    chosen = self.point.labelled(role='best', variant=best(self.tried))
    return [*tried, chosen]


class Coordinate(NamedTuple):
  """Values of a setting, of which neighbors of the best so far are tried.

  Attributes:
    setting: Keyword of :meth:`Scale.run`.
    values: The values, the smallest first.
    usual: The one of optimizers that do not say.
    form: How a value is written, as for :meth:`str.format`.
    promising: As ``PROMISING``, for these values.
  """

  setting: str
  values: tuple[float, ...]
  usual: float
  form: str
  promising: float

  def value(self, optimizer: Optimizer) -> float:
    """Returns the value of an optimizer."""
    return optimizer.settings.get(self.setting, self.usual)

  def name(self, optimizer: Optimizer) -> str:
    """Returns what the value of an optimizer is called."""
    return self.form.format(self.value(optimizer))

  def neighbors(
    self, optimizer: Optimizer, tried: Tunings
  ) -> dict[str, Optimizer]:
    """Returns the same with the next values, if they have not been tried."""
    i = self.values.index(self.value(optimizer))
    others = [
      optimizer.with_settings(**{self.setting: value})
      for value in self.values[max(0, i - 1) : i + 2]
    ]
    return {self.name(x): x for x in others if self.name(x) not in tried}


def best(tunings: Tunings) -> str:
  """Returns the name of the variant with the lowest loss."""
  return min(tunings, key=lambda name: tunings[name].loss)


def search(scale: Scale, found: Search, coordinate: Coordinate) -> Plan[Search]:
  """Plans to tune a further setting of what was the best so far.

  Args:
    scale: Size of the study.
    found: What was tried before.
    coordinate: Values of the setting.

  Returns:
    What was tried of these values. Fresh seeds judge the best one, unless it is
    that from before.
  """
  size = found.point['batch']
  name = coordinate.name(found.best)
  optimizers = {name: found.best}
  tried = {name: found.tried[best(found.tried)]}
  # The next values, and those beyond where one of them is the best.
  for _ in coordinate.values[1:]:
    lowest = best(tried)
    proposed = coordinate.neighbors(optimizers[lowest], tried)
    tried |= yield from tune(
      scale, proposed, size, tried[lowest], coordinate.promising
    )
    optimizers |= proposed
  chosen = optimizers[best(tried)]
  if chosen is found.best:
    return Search(tried, chosen, found.point)
  point = yield from Case(scale, chosen, size).judge(tried[best(tried)])
  return Search(tried, chosen, point)


def tune(
  scale: Scale,
  proposed: Mapping[str, Optimizer],
  size: int,
  lowest: Tuned,
  promising: float = PROMISING,
) -> Plan[Tunings]:
  """Plans to tune proposals; at smaller batches only those that promise.

  Args:
    scale: Size of the study.
    proposed: Variants by name.
    size: Global batch, sequences.
    lowest: The tuning of the best variant so far, around whose learning rate
      they are tuned.
    promising: As ``PROMISING``.
  """
  start, seeds = lowest.learning_rate, scale.tuning_seeds[:1]
  screened: Tunings = {}
  if not scale.is_large(size):
    screened = yield from _screen(scale, proposed, size, start)
  limit = lowest.loss + promising
  tuned = yield from gather(
    {
      name: Case(scale, x, size).find_rate(start, seeds=seeds)
      for name, x in proposed.items()
      if name not in screened or screened[name].loss <= limit
    }
  )
  return screened | tuned


def _screen(
  scale: Scale,
  proposed: Mapping[str, Optimizer],
  size: int,
  learning_rate: float,
) -> Plan[Tunings]:
  """Plans a trial of each at one learning rate."""
  seed = scale.tuning_seeds[0]
  results = yield [
    x.trial(scale, size, learning_rate, seed=seed) for x in proposed.values()
  ]
  return {
    name: Tuned((result,), learning_rate)
    for name, result in zip(proposed, results, strict=True)
  }
