"""Coordinate search: one setting after the other, from the best so far."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple, TypeAlias

from examples.study.points import Point, Tuned
from examples.study.tuning.cases import Case
from examples.study.tuning.plans import K, Plan, gather

PROMISING = 0.005
"""Nats by which a variant may be worse at the learning rate of the best one,
and gets its own nevertheless. (At the two largest batches all do.)"""

Cases: TypeAlias = Mapping[str, Case]
"""Variants of an optimizer at a batch size, by name."""


class Variant(NamedTuple):
  """A case with a learning rate.

  Attributes:
    case: The case.
    tuned: What chose its learning rate, with one seed.
  """

  case: Case
  tuned: Tuned

  def evaluate(self, num_seeds: int | None = None) -> Plan[Point]:
    """Plans fresh seeds, as :meth:`Case.evaluate` does."""
    return self.case.evaluate(self.tuned, num_seeds)


Variants: TypeAlias = dict[str, Variant]
"""What was tried, by name."""


@dataclasses.dataclass(frozen=True)
class Coordinate:
  """Values of a setting, of which neighbors of the best so far are tried.

  Attributes:
    setting: Keyword of :meth:`Scale.run`.
    values: The values, the smallest first.
    form: How a value is written, as for :meth:`str.format`.
    promising: As ``PROMISING``, for these values.
  """

  setting: str
  values: tuple[Any, ...]
  form: str = '{:g}'
  promising: float = PROMISING

  def value(self, case: Case) -> Any:
    """Returns the value of a case."""
    settings = case.optimizer.settings
    if self.setting in settings:
      return settings[self.setting]
    # The trainer has no setting of that name for the size of initial weights.
    return getattr(case.trial(1.0, seed=0).config, self.setting, 1.0)

  def changed(self, case: Case, value: Any) -> Case:
    """Returns a case with another value."""
    return case.with_settings(**{self.setting: value})

  def name(self, case: Case) -> str:
    """Returns what the value of a case is called."""
    return self.form.format(self.value(case))

  def neighbors(self, case: Case) -> Cases:
    """Returns the same case with this value and the next ones."""
    i = self.values.index(self.value(case))
    cases = [self.changed(case, x) for x in self.values[max(0, i - 1) : i + 2]]
    return {self.name(x): x for x in cases}


Coordinates: TypeAlias = Mapping[str, Coordinate]
"""Settings to tune, in order, by their names in tables."""


class ChainField(Coordinate):
  """Values of a field of the chain, such as what updates all others."""

  def value(self, case: Case) -> Any:
    """Returns the value of the chain of a case."""
    return getattr(case.optimizer.chain, self.setting)

  def changed(self, case: Case, value: Any) -> Case:
    """Returns a case with another value."""
    return case.with_chain(**{self.setting: value})


class GroupRate(Coordinate):
  """Learning rates of a group of parameters, of a chain that has others.

  ``setting`` is one of :data:`examples.study.chains.GROUPS`.
  """

  def value(self, case: Case) -> float:
    """Returns the rate over that of the hidden matrices."""
    chain = case.optimizer.chain
    return dict(chain.rates).get(self.setting, chain.others_rate)

  def changed(self, case: Case, value: float) -> Case:
    """Returns a case with another rate."""
    rates = dict(case.optimizer.chain.rates) | {self.setting: value}
    return case.with_chain(rates=tuple(sorted(rates.items())))


def best(tried: Mapping[K, Variant]) -> tuple[K, Variant]:
  """Returns the variant with the lowest loss, after its name."""
  return min(tried.items(), key=lambda item: item[1].tuned.loss)


def improve(start: Variant, coordinate: Coordinate) -> Plan[Variants]:
  """Plans to tune a further setting, and returns what was tried of its values.

  These are the next ones, and those beyond where one of them is the best.
  """
  tried = {coordinate.name(start.case): start}
  for _ in coordinate.values[1:]:
    _, found = best(tried)
    around = coordinate.neighbors(found.case)
    proposed = {x: y for x, y in around.items() if x not in tried}
    tried |= yield from tune(proposed, tried, coordinate.promising)
  return tried


class Improved(NamedTuple):
  """What came of tuning several settings, one after the other.

  Attributes:
    best: The best of all values.
    chosen: Its values as text.
    tried: Points of all values that were tried, with the role ``'tried'``.
  """

  best: Variant
  chosen: str
  tried: list[Point]

  def evaluate(self) -> Plan[list[Point]]:
    """Plans fresh seeds for the best.

    Returns its point, with the role ``'best'`` and the values ``chosen``, and
    those of what was tried.
    """
    point = yield from self.best.evaluate(self.best.case.scale.many_seeds)
    return [point.labelled(role='best', chosen=self.chosen), *self.tried]


def improve_all(
  case: Case, learning_rate: float, coordinates: Coordinates
) -> Plan[Improved]:
  """Plans to tune settings, one after the other.

  Args:
    case: What is tuned.
    learning_rate: First guess of its learning rate.
    coordinates: The settings.
  """
  tuned = yield from case.find_rate(learning_rate, case.scale.tuning_seeds[:1])
  found = Variant(case, tuned)
  points, chosen = [], []
  for setting, coordinate in coordinates.items():
    tried = yield from improve(found, coordinate)
    name, found = best(tried)
    chosen.append(f'{setting} {name}')
    labels = case.labels | {'role': 'tried', 'setting': setting}
    points += [
      Point(labels | {'value': value}, x.tuned) for value, x in tried.items()
    ]
  values = ', '.join(chosen) or 'only the learning rate'
  return Improved(found, values, points)


def tune(
  proposed: Cases, tried: Variants, promising: float = PROMISING
) -> Plan[Variants]:
  """Plans to tune proposals; at smaller batches only those that promise.

  They are tuned around the learning rate of the best that was tried so far.
  """
  _, lowest = best(tried)
  start = lowest.tuned.learning_rate
  limit = lowest.tuned.loss + promising
  small = {x: y for x, y in proposed.items() if not y.is_large}
  screened = yield from gather(
    {name: _screen(case, start) for name, case in small.items()}
  )
  tuned = yield from gather(
    {
      name: case.find_rate(start, seeds=case.scale.tuning_seeds[:1])
      for name, case in proposed.items()
      if name not in screened or screened[name].loss <= limit
    }
  )
  found = screened | tuned
  return {name: Variant(proposed[name], x) for name, x in found.items()}


def _screen(case: Case, learning_rate: float) -> Plan[Tuned]:
  """Plans a trial at one learning rate."""
  results = yield [case.trial(learning_rate, case.scale.tuning_seeds[0])]
  return Tuned(tuple(results), learning_rate)
