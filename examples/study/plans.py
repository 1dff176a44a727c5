"""Plans: which runs an experiment asks for, step by step.

A plan is a generator. It yields lists of runs, is sent their results in the
same order, and returns what it found out. It computes nothing itself, so that
the same plan counts runs ahead, makes them, and reads them for a report.
"""

from collections.abc import Callable, Generator
import dataclasses
import math
from typing import Any, TypeAlias, TypeVar

from examples.gpt2.config import Config, digest
from examples.gpt2.presets import identity

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Run:
  """A training run.

  Attributes:
    config: Resolved settings.
    arm: Name of the study's own optimizer, if it is not the trainer's.
    is_watched: Whether attention and updates are looked at, which takes a
      program of its own and some time.
  """

  config: Config
  arm: str = ''
  is_watched: bool = False

  @property
  def identity(self) -> dict[str, Any]:
    """What decides the numbers of the run, but for its text.

    Settings that have their default are left out, so that a new setting leaves
    old runs what they are.
    """
    defaults = {
      field.name: field.default for field in dataclasses.fields(Config)
    }
    settings = {
      name: value
      for name, value in identity(self.config).items()
      if value != defaults[name]
    }
    return settings | {'arm': self.arm, 'is_watched': self.is_watched}

  @property
  def key(self) -> str:
    """Hash of the identity."""
    return digest(self.identity)[:16]


@dataclasses.dataclass(frozen=True)
class Result:
  """What came out of a run.

  Attributes:
    loss: Final validation loss, nats a token; infinite if the run diverged.
    watched: Of a watched run, lists by name with an entry for each watch step:
      ``step``, ``train_loss`` and, with an entry for each layer in turn,
      ``max_attention_logit``, ``attention_entropy`` and, of MERIT, ``clipped``.
  """

  loss: float
  watched: dict[str, list[Any]]


Plan: TypeAlias = Generator[list[Run], list[Result], T]


def together(*plans: Plan[Any]) -> Plan[list[Any]]:
  """Makes one plan of several, which ask for their runs at the same time."""
  answers: list[Any] = [None] * len(plans)
  wanted: dict[int, list[Run]] = {}

  def advance(i: int, results: list[Result] | None) -> None:
    try:
      wanted[i] = plans[i].send(results)
    except StopIteration as end:
      wanted.pop(i, None)
      answers[i] = end.value

  for i in range(len(plans)):
    advance(i, None)
  while wanted:
    results = iter((yield [run for runs in wanted.values() for run in runs]))
    for i, runs in list(wanted.items()):
      advance(i, [next(results) for _ in runs])
  return answers


def carry_out(plan: Plan[T], run_all: Callable[[list[Run]], list[Result]]) -> T:
  """Carries out a plan with a function from runs to their results."""
  runs = next(plan)
  while True:
    try:
      runs = plan.send(run_all(runs))
    except StopIteration as end:
      return end.value


def count_runs(plan: Plan[Any], known: Callable[[Run], Result | None]) -> int:
  """Returns how many runs a plan will still ask for, about.

  Args:
    plan: A plan that nobody has started.
    known: Function from a run to its result, None if it has none yet. Runs
      without are taken to have the same loss.
  """
  missing = set()

  def guess(runs: list[Run]) -> list[Result]:
    missing.update(run.key for run in runs if known(run) is None)
    return [known(run) or Result(math.inf, {}) for run in runs]

  carry_out(plan, guess)
  return len(missing)
