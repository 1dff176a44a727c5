"""Trials of ``large_batch``, by rule, batch and learning rate."""

import collections
import dataclasses
from typing import Any

import numpy as np

from examples.study.large_batch import loss_of
from examples.study.settings import Trial


@dataclasses.dataclass(frozen=True)
class Run:
  """A trial and what it measured.

  Attributes:
    label: Its rule, and settings in which it differs from the first line.
    trial: The trial.
    record: Its line.
  """

  label: str
  trial: Trial
  record: dict[str, Any]

  @property
  def loss(self) -> float:
    """Final loss, infinite where the run diverged."""
    return loss_of(self.record)

  @property
  def steps(self) -> list[int]:
    """Steps of the evaluations."""
    return [x['step'] for x in self.record['evaluations']]

  @property
  def losses(self) -> list[float]:
    """Losses of the evaluations."""
    return [x['loss'] for x in self.record['evaluations']]

  @property
  def logits_EL(self) -> np.ndarray:
    """Largest attention logits, (evaluations, layers)."""
    return np.array([x['max_logits'] for x in self.record['evaluations']])


Group = list[Run]
"""Runs of a label, a batch and a learning rate: one for each seed."""


def read_runs(lines: list[dict[str, Any]]) -> list[Run]:
  """Returns the runs; one that was run again counts as it was run last."""
  first = lines[0]['settings']
  found = {}
  for x in lines:
    other = [f'{k}={v}' for k, v in x['settings'].items() if v != first.get(k)]
    run = Run(', '.join([x['trial']['rule'], *other]), Trial(**x['trial']), x)
    found[run.label, run.trial] = run
  return list(found.values())


def seeds_of_each(runs: list[Run]) -> list[Group]:
  """Returns the runs with the chosen rates, those of seeds together."""
  groups = collections.defaultdict(list)
  for run in runs:
    if run.trial.seed:
      key = run.label, run.trial.batch_tokens, run.trial.power
      groups[key].append(run)
  return list(groups.values())


def mean_loss(group: Group) -> float:
  """Returns the mean final loss of a group's seeds."""
  return float(np.mean([run.loss for run in group]))


def best_at_largest_batch(runs: list[Run]) -> list[Group]:
  """Returns the groups of the largest batch, the best of each label."""
  groups = seeds_of_each(runs)
  largest = max((x[0].trial.batch_tokens for x in groups), default=0)
  best: dict[str, Group] = {}
  for group in groups:
    label = group[0].label
    if group[0].trial.batch_tokens == largest and (
      label not in best or mean_loss(group) < mean_loss(best[label])
    ):
      best[label] = group
  return list(best.values())


def by_power(runs: list[Run]) -> dict[tuple[str, int], dict[int, Run]]:
  """Returns the runs of seed 0 by label and batch, then by power of two."""
  found: dict[tuple[str, int], dict[int, Run]] = collections.defaultdict(dict)
  for run in sorted(runs, key=lambda run: run.trial.power):
    if run.trial.seed == 0:
      found[run.label, run.trial.batch_tokens][run.trial.power] = run
  order = {run.label: i for i, run in enumerate(reversed(runs))}
  return dict(sorted(found.items(), key=lambda x: -order[x[0][0]]))
