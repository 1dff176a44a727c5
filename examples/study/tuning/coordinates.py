"""Coordinate search: one setting after the other, from the best so far."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple, TypeAlias

from examples.study.points import Point, Tuned
from examples.study.tuning.cases import Case
from examples.study.tuning.plans import Plan, gather

PROMISING = 0.005
"""Nats by which a variant may be worse at the learning rate of the best one,
and gets its own nevertheless. (At the two largest batches all do.)"""

Tunings: TypeAlias = dict[str, Tuned]
"""Tunings of one seed, by the name of the variant."""
Cases: TypeAlias = Mapping[str, Case]
"""Variants of an optimizer at a batch size, by name."""


class Search(NamedTuple):
  """What was tried of an optimizer at a batch size.

  Attributes:
    tried: Tunings of the values of the last coordinate.
    best: The case with the best of them.
    point: That one, evaluated with fresh seeds.
  """

  tried: Tunings
  best: Case
  point: Point

  @property
  def points(self) -> list[Point]:
    """What was tried, and what was the best of it, as points."""
    labels = self.point.labels
    tried = [
      Point({**labels, 'role': 'tried', 'variant': name}, tuned)
      for name, tuned in self.tried.items()
    ]
    chosen = self.point.labelled(role='best', variant=best(self.tried))
    return [*tried, chosen]

  @property
  def learning_rate(self) -> float:
    """The learning rate chosen for the best case."""
    return self.point.tuned.learning_rate

  def with_seeds(self, num_seeds: int) -> Plan[list[Point]]:
    """Plans the best with more fresh seeds, beside others that are searched."""
    point = yield from self.best.evaluate(self.point.tuned, num_seeds)
    return [point.labelled(role='best', chosen='')]


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


def best(tunings: Tunings) -> str:
  """Returns the name of the variant with the lowest loss."""
  return min(tunings, key=lambda name: tunings[name].loss)


def search(found: Search, coordinate: Coordinate) -> Plan[Search]:
  """Plans to tune a further setting of what was the best so far.

  Returns what was tried of its values. The best is evaluated with fresh seeds,
  unless it is that from before.
  """
  tuned = found.tried[best(found.tried)]
  tried, chosen = yield from improve(found.best, tuned, coordinate)
  if chosen is found.best:
    return Search(tried, chosen, found.point)
  point = yield from chosen.evaluate(tried[best(tried)])
  return Search(tried, chosen, point)


def improve(
  case: Case, tuned: Tuned, coordinate: Coordinate
) -> Plan[tuple[Tunings, Case]]:
  """Plans to tune a further setting of a case, with one seed.

  Returns what was tried of its values, and the case with the best of them.
  """
  name = coordinate.name(case)
  cases, tried = {name: case}, {name: tuned}
  # The next values, and those beyond where one of them is the best.
  for _ in coordinate.values[1:]:
    around = coordinate.neighbors(cases[best(tried)])
    proposed = {x: y for x, y in around.items() if x not in tried}
    tried |= yield from tune(proposed, tried, coordinate.promising)
    cases |= proposed
  return tried, cases[best(tried)]


class Improved(NamedTuple):
  """What came of tuning several settings, one after the other.

  Attributes:
    best: The case with the best of all values.
    points: That one, evaluated with fresh seeds (role ``'best'``, with the
      values ``chosen``), then all values that were tried (role ``'tried'``).
  """

  best: Case
  points: list[Point]

  @property
  def learning_rate(self) -> float:
    """The learning rate chosen for the best case."""
    return self.points[0].tuned.learning_rate


def improve_all(
  case: Case, learning_rate: float, coordinates: Coordinates
) -> Plan[Improved]:
  """Plans to tune settings, one after the other, and to evaluate what is best.

  Args:
    case: What is tuned.
    learning_rate: First guess of its learning rate.
    coordinates: The settings.
  """
  tuned = yield from case.find_rate(learning_rate, case.scale.tuning_seeds[:1])
  labels = {
    'optimizer': case.optimizer.name,
    'batch': case.batch_size,
    'role': 'tried',
  }
  points, chosen = [], []
  for setting, coordinate in coordinates.items():
    tried, case = yield from improve(case, tuned, coordinate)
    tuned = tried[best(tried)]
    chosen.append(f'{setting} {best(tried)}')
    points += [
      Point({**labels, 'setting': setting, 'value': value}, x)
      for value, x in tried.items()
    ]
  point = yield from case.evaluate(tuned, case.scale.many_seeds)
  best_point = point.labelled(role='best', chosen=', '.join(chosen))
  return Improved(case, [best_point, *points])


def tune(
  proposed: Cases, tried: Tunings, promising: float = PROMISING
) -> Plan[Tunings]:
  """Plans to tune proposals; at smaller batches only those that promise.

  They are tuned around the learning rate of the best that was tried so far.
  """
  lowest = tried[best(tried)]
  start, limit = lowest.learning_rate, lowest.loss + promising
  small = {x: y for x, y in proposed.items() if not y.is_large}
  screened: Tunings = yield from gather(
    {name: _screen(case, start) for name, case in small.items()}
  )
  tuned = yield from gather(
    {
      name: case.find_rate(start, seeds=case.scale.tuning_seeds[:1])
      for name, case in proposed.items()
      if name not in screened or screened[name].loss <= limit
    }
  )
  return screened | tuned


def _screen(case: Case, learning_rate: float) -> Plan[Tuned]:
  """Plans a trial at one learning rate."""
  results = yield [case.trial(learning_rate, case.scale.tuning_seeds[0])]
  return Tuned(tuple(results), learning_rate)
