"""Trials by rule and batch, and statistics of their differences."""

import collections
from collections.abc import Callable, Iterable
import dataclasses
import itertools
import math
from pathlib import Path
import statistics
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from examples.study.large_batch import (
  choose,
  facts_of,
  loss_of,
  near_best,
  read,
)
from examples.study.settings import Trial

NEAR = 0.02
"""Rates whose loss of seed 0 is this near the best are tried with all seeds."""

Line: TypeAlias = dict[str, Any]
"""A trial, as it stands in the file."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """The trials of a rule at a batch.

  Attributes:
    tuning: Trials of seed 0, by the power of two of their rate.
    others: Trials of other seeds, likewise.
  """

  tuning: dict[float, Line]
  others: dict[float, list[Line]]

  @property
  def seeds(self) -> list[Line]:
    """Trials of other seeds at the rate with their best mean loss.

    Of the rates near the best one of seed 0, those that most seeds have.
    """
    losses = {k: loss_of(x) for k, x in self.tuning.items()}
    near = near_best(losses, NEAR) if losses else self.others
    trials = [self.others[x] for x in near if x in self.others]
    most = max(map(len, trials), default=0)
    return min(
      (x for x in trials if len(x) == most),
      key=lambda x: statistics.mean(map(loss_of, x)),
      default=[],
    )

  @property
  def losses(self) -> list[float]:
    """Final losses of the seeds, in nats per token."""
    return [loss_of(x) for x in self.seeds]

  def by_seed(self) -> dict[int, float]:
    """Returns the final losses by seed."""
    return {x['trial']['seed']: loss_of(x) for x in self.seeds}

  def at(self, rate: float) -> dict[int, Line]:
    """Returns the trials by seed whose rate is this, but for its rounding."""
    trials = [*self.tuning.values(), *itertools.chain(*self.others.values())]
    return {
      x['trial']['seed']: x
      for x in trials
      if math.isclose(x['rate'], rate, rel_tol=0.02)
    }

  def chosen(self) -> tuple[float, bool]:
    """Returns the power of two that seed 0 chose, and whether it was close."""
    return choose({k: loss_of(x) for k, x in self.tuning.items()})

  def rate(self) -> float:
    """Returns the learning rate of the seeds, or that which seed 0 chose."""
    return float((self.seeds or [self.tuning[self.chosen()[0]]])[0]['rate'])


Cells: TypeAlias = dict[str, dict[int, Cell]]
"""Cells by rule, then by tokens of a step."""


def read_cells(results: Path) -> Cells:
  """Returns the trials of a file.

  A rule has the settings in its name that differ from those of the last line.

  Raises:
    FileNotFoundError: If there are none.
  """
  lines = read(results)
  if not lines:
    raise FileNotFoundError(f'results: {results} holds no trial.')
  usual = facts_of(lines[-1])

  def label(x: Line) -> str:
    rule = x['trial']['rule']
    others = [f'{k}={v}' for k, v in facts_of(x).items() if v != usual.get(k)]
    return ', '.join([rule, *others])

  return group(lines, label)


def group(lines: Iterable[Line], label: Callable[[Line], str]) -> Cells:
  """Returns the cells of trials, by a label instead of their rule."""
  found: Cells = collections.defaultdict(dict)
  for x in lines:
    trial = Trial(**x['trial'])
    cell = found[label(x)].setdefault(trial.batch_tokens, Cell({}, {}))
    if trial.seed:
      cell.others.setdefault(trial.power, []).append(x)
    else:
      cell.tuning[trial.power] = x
  return {k: dict(sorted(x.items())) for k, x in found.items()}


def rule_of(line: Line) -> str:
  """Returns the rule of a trial."""
  return str(line['trial']['rule'])


def _steps(line: Line) -> int:
  return int(line['settings']['tokens'] // line['trial']['batch_tokens'])


def steps_of(cell: Cell) -> int:
  """Returns the number of steps of the trials of a cell."""
  trials = [*cell.tuning.values(), *itertools.chain(*cell.others.values())]
  return _steps(trials[0])


def of_equal_steps(lines: Iterable[Line]) -> dict[int, Cells]:
  """Returns rules with several batches by the number of steps, ascending."""
  found = collections.defaultdict(list)
  for x in lines:
    found[_steps(x)].append(x)
  several = {}
  for steps, own in sorted(found.items()):
    cells = group(own, rule_of)
    cells = {rule: x for rule, x in cells.items() if len(x) > 1}
    if cells:
      several[steps] = cells
  return several


def batches_of(cells: Cells) -> list[int]:
  """Returns the tokens of a step that any rule was trained with, ascending."""
  return sorted({batch for own in cells.values() for batch in own})


def top(trial: Line, key: str = 'final_logits') -> float:
  """Returns the largest attention logit of all layers.

  Args:
    trial: The trial.
    key: ``final_logits`` for those at the end, ``peak_logits`` for the largest
      of every second step: compare those of equal numbers of steps only.
  """
  return float(max(trial[key]))


def mean_logit(trials: Iterable[Line], key: str = 'final_logits') -> float:
  """Returns the mean over trials of the largest logit."""
  return statistics.mean(top(x, key) for x in trials)


def paired(first: dict[int, float], second: dict[int, float]) -> list[float]:
  """Returns first minus second, by the seeds of both."""
  return [first[x] - second[x] for x in sorted(first) if x in second]


def bounds(differences: list[float]) -> list[float]:
  """Returns the mean and its 95 % interval, which is empty for one value."""
  mean = statistics.mean(differences)
  if len(differences) == 1:
    return [mean] * 3
  low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
  return [mean, float(low), float(high)]


def pooled(cells: Cells, batch: int) -> tuple[float, int]:
  """Returns the deviation of losses, without means of rules and seeds.

  And its degrees of freedom: those of a table of rules by seeds.
  """
  rows = [x[batch].by_seed() for x in cells.values() if batch in x]
  rows = [x for x in rows if x]
  common = sorted(set.intersection(*map(set, rows))) if rows else []
  table = np.array([[x[seed] for seed in common] for x in rows])
  if min(table.shape) < 2 or not np.isfinite(table).all():
    return math.nan, 0
  rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
  free = (table.shape[0] - 1) * (table.shape[1] - 1)
  return math.sqrt((rest**2).sum() / free), free


def holm(p_values: dict[Any, float]) -> set[Any]:
  """Returns the keys that are significant at 5 % by Holm's procedure."""
  survive: set[Any] = set()
  for rank, key in enumerate(sorted(p_values, key=lambda x: p_values[x])):
    if p_values[key] > 0.05 / (len(p_values) - rank):
      break
    survive.add(key)
  return survive


def same_seeds(
  first: dict[int, Line], second: dict[int, Line]
) -> tuple[list[Line], list[Line]]:
  """Returns the trials of the seeds that both have.

  Seed 0, which chose the tuned rate, is used alone or not at all.
  """
  common = sorted({*first} & {*second})
  seeds = [x for x in common if x] or common
  return [first[x] for x in seeds], [second[x] for x in seeds]


def carried_by_16(cells: Cells, factor: float) -> dict[str, dict[int, Line]]:
  """Returns trials at 16 times the smallest batch, at its best rate.

  Args:
    cells: Of all batches.
    factor: What the rate is multiplied by: √16, or 1 to keep it.

  Returns:
    The trials by rule, then by seed.
  """
  first = min(batches_of(cells))
  return {
    rule: own[16 * first].at(factor * own[first].rate())
    for rule, own in cells.items()
    if {first, 16 * first} <= set(own) and own[first].seeds
  }


def losses_above(first: list[Line], second: list[Line]) -> list[float]:
  """Returns final losses of trials above those of as many others."""
  return [loss_of(x) - loss_of(y) for x, y in zip(first, second, strict=True)]


def at_equal_loss(small: Line, large: Line) -> tuple[float, float] | None:
  """Compares logits where a trial has the training loss that another ends with.

  Losses and logits are means of a tenth of the steps. The learning rates
  differ there: the trial that ends has none left.

  Args:
    small: The trial that ends.
    large: A trial that may reach this loss.

  Returns:
    The largest logit of ``large`` over that of ``small``, and the percentage of
    the steps of ``large`` after which it has reached the loss, if it does.
  """
  loss = tenths(small['train_losses'])[-1]
  reached = np.flatnonzero(tenths(large['train_losses']) <= loss)
  if not reached.size:
    return None
  logits, others = tenths(large['logits']), tenths(small['logits'])
  return float(logits[reached[0]] / others[-1]), float(reached[0] + 10)


def tenths(values: list[float]) -> np.ndarray:
  """Returns running means over a tenth of a run, a hundredth apart."""
  places = (np.arange(len(values)) + 0.5) / len(values)
  grid = np.arange(0.005, 1, 0.01)
  return np.convolve(np.interp(grid, places, values), np.full(10, 0.1), 'valid')
