"""Variants of an optimizer at a batch size: which of them is the best."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple, TypeAlias

from examples.study.contenders import Contender
from examples.study.plans import Plan, gather
from examples.study.points import Point, find_rate, judge
from examples.study.render import (
  format_learning_rate,
  format_loss,
  markdown,
)
from examples.study.scales import Scale
from examples.study.tuning import Tuned

MARGIN = 0.005
"""Nats by which a variant may be worse at the learning rate of the best one,
and gets its own nevertheless. (At the two largest batches all do.)"""

TUNED = {
  'tuned-initialization': 'warm-up, b1 and initial weights',
  'sensitivity': 'warm-up and b1',
}
"""What experiments tune beside the learning rate, the most first; of those that
the first page and the claims show. (The choices of ``weight-decay`` are within
the noise of seeds.)"""

Tunings: TypeAlias = dict[str, Tuned]
"""Tunings of one seed, by what is varied."""


class Varied(NamedTuple):
  """What was tried of a contender at a batch size.

  Attributes:
    tunings: What was tried.
    best: The contender with the best of them.
    point: That one, judged by fresh seeds.
  """

  tunings: Tunings
  best: Contender
  point: Point


Outcome: TypeAlias = dict[tuple[str, int], Varied]
"""What was tried, by contender and batch size."""


class Ladder(NamedTuple):
  """Values of a setting, of which neighbors of the best so far are tried.

  Attributes:
    setting: Keyword of :meth:`Scale.run`.
    values: The values, the smallest first.
    usual: The one of contenders that do not say.
    form: How a value is written, as for :meth:`str.format`.
    margin: As ``MARGIN``, for these values.
  """

  setting: str
  values: tuple[float, ...]
  usual: float
  form: str
  margin: float

  @property
  def names(self) -> list[str]:
    """What the values are called."""
    return [self.form.format(x) for x in self.values]

  def value(self, contender: Contender) -> float:
    """Returns the value of a contender."""
    return contender.settings.get(self.setting, self.usual)

  def name(self, contender: Contender) -> str:
    """Returns what the value of a contender is called."""
    return self.form.format(self.value(contender))

  def neighbors(
    self, contender: Contender, tunings: Tunings
  ) -> dict[str, Contender]:
    """Returns the same with the next values, if they have not been tried."""
    i = self.values.index(self.value(contender))
    others = [
      with_settings(contender, **{self.setting: value})
      for value in self.values[max(0, i - 1) : i + 2]
    ]
    return {self.name(x): x for x in others if self.name(x) not in tunings}


def most_tuned(outcomes: Mapping[str, Any]) -> str | None:
  """Returns the first of ``TUNED`` that is complete, None if none is."""
  return next((x for x in TUNED if x in outcomes), None)


def with_settings(contender: Contender, **settings: Any) -> Contender:
  """Returns a contender with other settings."""
  return dataclasses.replace(contender, settings=contender.settings | settings)


def best(tunings: Tunings) -> str:
  """Returns the name of the variant with the lowest loss."""
  return min(tunings, key=lambda name: tunings[name].loss)


def judged(outcome: Outcome) -> dict[tuple[str, int], Point]:
  """Returns the points that fresh seeds judged."""
  return {key: varied.point for key, varied in outcome.items()}


def climb(scale: Scale, varied: Varied, ladder: Ladder) -> Plan[Varied]:
  """Plans to tune a further setting of what was the best so far.

  Args:
    scale: Size of the study.
    varied: What was tried before.
    ladder: Values of the setting.

  Returns:
    What was tried of these values. Fresh seeds judge the best one, unless it is
    that from before.
  """
  size = varied.point.batch_size
  name = ladder.name(varied.best)
  tried = {name: varied.best}
  tunings = {name: varied.tunings[best(varied.tunings)]}
  # The next values, and those beyond where one of them is the best.
  for _ in ladder.values[1:]:
    lowest = best(tunings)
    proposed = ladder.neighbors(tried[lowest], tunings)
    tunings |= yield from tune(
      scale, proposed, size, tunings[lowest], ladder.margin
    )
    tried |= proposed
  chosen, tuned = tried[best(tunings)], tunings[best(tunings)]
  if chosen is varied.best:
    return Varied(tunings, chosen, varied.point)
  point = yield from judge(scale, chosen, size, tuned, scale.seeds_at(size))
  return Varied(tunings, chosen, point)


def tune(
  scale: Scale,
  proposed: Mapping[str, Contender],
  size: int,
  lowest: Tuned,
  margin: float = MARGIN,
) -> Plan[Tunings]:
  """Plans to tune proposals; at smaller batches only those that promise.

  Args:
    scale: Size of the study.
    proposed: Variants by name.
    size: Global batch, sequences.
    lowest: The tuning of the best variant so far, around whose learning rate
      they are tuned.
    margin: As ``MARGIN``.
  """
  start, seeds = lowest.learning_rate, scale.tuning_seeds[:1]
  screened: Tunings = {}
  if not scale.is_large(size):
    screened = yield from _screen(scale, proposed, size, start)
  limit = lowest.loss + margin
  tuned = yield from gather(
    {
      name: find_rate(scale, x, size, start=start, stride=1, seeds=seeds)
      for name, x in proposed.items()
      if name not in screened or screened[name].loss <= limit
    }
  )
  return screened | tuned


def _screen(
  scale: Scale,
  proposed: Mapping[str, Contender],
  size: int,
  learning_rate: float,
) -> Plan[Tunings]:
  """Plans a run of each at one learning rate."""
  seed = scale.tuning_seeds[0]
  results = yield [
    x.run(scale, size, learning_rate, seed=seed) for x in proposed.values()
  ]
  return {
    name: Tuned({learning_rate: {seed: result.loss}}, learning_rate)
    for name, result in zip(proposed, results, strict=True)
  }


def format_tuned(tuned: Tuned) -> str:
  """Returns the loss, and the learning rate in brackets."""
  return f'{format_loss(tuned.loss)} ({format_learning_rate(tuned)})'


def table(
  outcome: Outcome, contenders: Sequence[Contender], ladder: Ladder
) -> str:
  """Returns what was tried of a setting, a row for each batch and contender."""
  rows = []
  for size in dict.fromkeys(size for _, size in outcome):
    for contender in contenders:
      tunings = outcome[contender.name, size].tunings
      row = {'batch': str(size), 'optimizer': contender.name}
      for name in ladder.names:
        row[name] = format_tuned(tunings[name]) if name in tunings else ''
      rows.append(row)
  return markdown(rows)
