"""A case: an optimizer at a batch size, to be tuned and evaluated."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from examples.gpt2.config import Config
from examples.gpt2.presets import resolve
from examples.study.optimizers import Optimizer
from examples.study.points import MARGIN, Point, Tuned
from examples.study.scales import Scale
from examples.study.trial import Trial
from examples.study.tuning.plans import Plan, gather
from examples.study.tuning.rates import round_rate, select
import merit_optax


@dataclasses.dataclass(frozen=True)
class Case:
  """An optimizer at a batch size.

  Attributes:
    scale: Size of the study.
    optimizer: The optimizer.
    batch_size: Global batch, sequences.
    margin: Instability margin of learning rates, nats.
  """

  scale: Scale
  optimizer: Optimizer
  batch_size: int
  margin: float = MARGIN

  @property
  def is_large(self) -> bool:
    """Whether the batch is one of the two largest."""
    return self.batch_size in self.scale.batch_sizes[-2:]

  def with_optimizer(self, **changes: Any) -> 'Case':
    """Returns the same with changes of the optimizer."""
    optimizer = dataclasses.replace(self.optimizer, **changes)
    return dataclasses.replace(self, optimizer=optimizer)

  def with_settings(self, **settings: Any) -> 'Case':
    """Returns the same with other settings, arguments of :meth:`Scale.run`."""
    return self.with_optimizer(settings=self.optimizer.settings | settings)

  def with_chain(self, **changes: Any) -> 'Case':
    """Returns the same with changes of the optimizer's chain."""
    chain: Any = self.optimizer.chain
    return self.with_optimizer(chain=dataclasses.replace(chain, **changes))

  def with_others_rate(self, factor: float) -> 'Case':
    """Returns the same with another rate for what Adam updates beside Muon."""
    chain = self.optimizer.chain
    if chain is None:
      return self.with_settings(adam_rate=factor)
    return self.with_chain(others_rate=factor * chain.others_rate)

  @property
  def labels(self) -> dict[str, Any]:
    """What points of it are about."""
    return {'optimizer': self.optimizer.name, 'batch': self.batch_size}

  @property
  def rule_rate(self) -> float | None:
    """The learning rate by the rule, None if the scale has none yet."""
    if self.scale.finds_rules or not self.optimizer.rule:
      return None
    steps = self.scale.num_steps(self.batch_size)
    if self.optimizer.rule == 'muon':
      # The stored results began with the rule of this width.
      return merit_optax.starting_learning_rate('muon', steps, width=64)
    config = Config(
      **self.scale.settings,
      optimizer=self.optimizer.rule,
      batch_size=self.batch_size,
      steps=steps,
    )
    return resolve(config).learning_rate

  def trial(self, learning_rate: float, seed: int, **changes: Any) -> Trial:
    """Returns a trial, with changes as for :meth:`Scale.run`."""
    optimizer = self.optimizer
    settings = optimizer.few_steps if self.scale.has_few_steps else {}
    return self.scale.run(
      optimizer.optimizer,
      self.batch_size,
      round_rate(learning_rate),
      seed=seed,
      **{'chain': optimizer.chain} | settings | optimizer.settings | changes,
    )

  def find_rate(
    self, start: float | None = None, seeds: Sequence[int] | None = None
  ) -> Plan[Tuned]:
    """Plans to choose a learning rate.

    Args:
      start: First guess of the learning rate, around which rates are √2 apart.
        By default that of the optimizer's rule, or its own, and the factor
        between rates that of the scale.
      seeds: Seeds that choose; those of the scale by default.
    """
    stride = 1
    if start is None:
      start = self.rule_rate or self.optimizer.start
      stride = self.scale.stride
    seeds = seeds or self.scale.tuning_seeds
    return select(self.trial, start, seeds, stride, self.margin)

  def evaluate(self, tuned: Tuned, num_seeds: int | None = None) -> Plan[Point]:
    """Plans to repeat the learning rate chosen with fresh seeds.

    Args:
      tuned: What was chosen.
      num_seeds: Number of seeds; by default that of the scale, two more at the
        two largest batches. With none, the loss of the tuning counts.
    """
    if num_seeds is None:
      count = self.scale.num_seeds
      num_seeds = count + 2 if self.is_large and count > 1 else count
    seeds = range(1, 1 + num_seeds)
    point = yield from self.run_seeds(tuned.learning_rate, seeds)
    return dataclasses.replace(point, tuned=tuned)

  def find_point(
    self, num_seeds: int | None = None, start: float | None = None
  ) -> Plan[Point]:
    """Plans to choose a learning rate, and to evaluate it with fresh seeds."""
    tuned = yield from self.find_rate(start)
    return (yield from self.evaluate(tuned, num_seeds))

  def run_seeds(
    self, learning_rate: float, seeds: Sequence[int], **changes: Any
  ) -> Plan[Point]:
    """Plans trials of some seeds at a learning rate."""
    results = yield [self.trial(learning_rate, x, **changes) for x in seeds]
    return Point(self.labels, None, tuple(results))

  def run_multiples(
    self, learning_rate: float, factors: Sequence[float], seeds: Sequence[int]
  ) -> Plan[list[Point]]:
    """Plans multiples of a learning rate with diagnostics, by ``factor``."""
    points = yield from gather(
      {
        x: self.run_seeds(x * learning_rate, seeds, with_diagnostics=True)
        for x in factors
      }
    )
    return [point.labelled(factor=x) for x, point in points.items()]

  def run_variants(
    self,
    label: str,
    variants: Mapping[str, Mapping[str, Any]],
    factors: Sequence[float],
    seeds: Sequence[int],
  ) -> Plan[list[Point]]:
    """Plans variants at multiples of the learning rate chosen without them.

    Args:
      label: Label of the points, whose values are the names of the variants.
      variants: Settings by name.
      factors: As ``run_multiples`` takes them.
      seeds: As ``run_multiples`` takes them.
    """
    rate = (yield from self.find_rate()).learning_rate
    found = yield from gather(
      {
        name: self.with_settings(**x).run_multiples(rate, factors, seeds)
        for name, x in variants.items()
      }
    )
    return [x.labelled(**{label: name}) for name in found for x in found[name]]

  def find_length_rates(self, tuned: Tuned) -> Plan[dict[float, Tuned]]:
    """Plans to choose learning rates for half and twice the steps.

    Args:
      tuned: What chose that for the steps of the scale.

    Returns:
      Tunings by length over that of the scale, the given one among them.
    """
    steps = self.scale.num_steps
    found = yield from gather(
      {
        x: self.with_settings(steps=steps(self.batch_size, x)).find_rate(
          scale_rate(tuned.learning_rate, 1 / x)
        )
        for x in (0.5, 2.0)
      }
    )
    return dict(sorted((found | {1.0: tuned}).items()))


def find_rates(scale: Scale, optimizer: Optimizer) -> Plan[dict[int, Tuned]]:
  """Plans to choose a learning rate for every batch size of the scale.

  It begins at the one of experiments that do not vary it. From there, the rate
  of a batch is the first guess for the next, moved as the rule, if it has one.
  """
  middle = scale.batch_sizes.index(scale.batch_size)
  first = yield from Case(scale, optimizer, scale.batch_size).find_rate()
  found = yield from gather(
    {
      'smaller': _find_next_rates(
        scale, optimizer, scale.batch_sizes[middle::-1], first
      ),
      'larger': _find_next_rates(
        scale, optimizer, scale.batch_sizes[middle:], first
      ),
    }
  )
  return dict(sorted((found['smaller'] | found['larger']).items()))


def _find_next_rates(
  scale: Scale, optimizer: Optimizer, sizes: Sequence[int], first: Tuned
) -> Plan[dict[int, Tuned]]:
  previous, *others = sizes
  found = {previous: first}
  for size in others:
    rate = found[previous].learning_rate
    start = scale_rate(rate, size / previous)
    case = Case(scale, optimizer, size)
    before = dataclasses.replace(case, batch_size=previous)
    rule, rule_before = case.rule_rate, before.rule_rate
    if rule and rule_before:
      start = rate * rule / rule_before
    found[size] = yield from case.find_rate(start)
    previous = size
  return found


def scale_rate(learning_rate: float, factor: float) -> float:
  """Returns a first guess for a batch that is so many times as large.

  Or for one over so many times the steps.
  """
  return learning_rate * math.sqrt(factor)
