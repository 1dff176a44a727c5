"""Trials and points of the study, read from the folder data."""

import gzip
import json
from pathlib import Path
import statistics
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / 'data'


class Trial(NamedTuple):
  """A training run."""

  key: str
  rate: float
  steps: int
  loss: float
  """Final validation loss."""
  logit: float | None
  """Largest attention logit of all layers and steps, if it was measured."""
  clipped: float | None
  """Largest share of a layer's elements that was clipped, if measured."""


class Point(NamedTuple):
  """Trials of one cell of a table."""

  labels: dict[str, Any]
  """What the cell is about, such as ``'optimizer'`` and ``'batch'``."""
  rate: float | None
  """The learning rate that was chosen, if one was."""
  tuning: tuple[Trial, ...]
  """Trials that chose it."""
  fresh: tuple[Trial, ...]
  """Trials of seeds that chose nothing."""

  @property
  def losses(self) -> list[float]:
    """Losses of fresh seeds; without any, the loss of the tuning."""
    if self.fresh:
      return [x.loss for x in self.fresh]
    chosen = [x.loss for x in self.tuning if x.rate == self.rate]
    return [statistics.mean(chosen)]

  @property
  def mean(self) -> float:
    """Mean loss."""
    return statistics.mean(self.losses)


Points = list[Point]


def read_points() -> dict[str, Points]:
  """Returns the points of each experiment, those that only tuned included."""
  trials = {
    x['key']: Trial(
      x['key'],
      x['learning_rate'],
      x['steps'],
      x['loss'],
      x.get('max_attention_logit'),
      x.get('clipped'),
    )
    for x in _read_lines('trials')
  }
  found: dict[str, Points] = {}
  for x in _read_lines('points'):
    tuning, fresh = (
      tuple(trials[key] for key in x.get(name, ()))
      for name in ('tuning', 'fresh')
    )
    point = Point(x['labels'], x.get('rate'), tuning, fresh)
    found.setdefault(x['experiment'], []).append(point)
  return found


def read_json(name: str) -> dict[str, Any]:
  """Returns a file of JSON: what the experiments are, or their old tables."""
  found: dict[str, Any] = json.loads((FOLDER / f'{name}.json').read_text())
  return found


def _read_lines(name: str) -> list[dict[str, Any]]:
  with gzip.open(FOLDER / f'{name}.jsonl.gz', 'rt', encoding='utf-8') as file:
    return [json.loads(line) for line in file]


def select(points: Points, **labels: Any) -> Points:
  """Returns the points that have some labels."""
  return [x for x in points if labels.items() <= x.labels.items()]


def values(points: Points, label: str) -> list[Any]:
  """Returns the values of a label, each once, in order."""
  return list(dict.fromkeys(x.labels[label] for x in points))
