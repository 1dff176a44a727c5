"""Plans: which trials an experiment asks for, step by step.

A plan is a generator. It yields lists of trials, is sent their results in the
same order, and returns what it found out. It computes nothing itself, so that
the same plan counts trials ahead, has them trained, and reads them again.
Several plans go on independently of each other (see :class:`Independent`).
"""

from collections.abc import Callable, Generator, Hashable, Mapping
import math
from typing import Any, TypeAlias, TypeVar

from examples.study.trial import Result, Trial, make_result

T = TypeVar('T')
K = TypeVar('K', bound=Hashable)

Plan: TypeAlias = Generator[list[Trial], list[Any], T]


class Independent(list[Trial]):
  """Trials of several plans, which may be sent None for what has no result yet.

  Then they ask again, also for what follows from the results that were sent. So
  no plan waits for another one's trials.
  """


def gather(plans: Mapping[K, Plan[T]]) -> Plan[dict[K, T]]:
  """Makes one plan of several, which ask for their trials at the same time."""
  answers: dict[K, T] = {}
  asked: dict[K, list[Trial]] = {}
  ready: dict[K, Any] = dict.fromkeys(plans)
  while ready or asked:
    for key, results in ready.items():
      try:
        asked[key] = plans[key].send(results)
      except StopIteration as end:
        asked.pop(key, None)
        answers[key] = end.value
    trials = Independent(x for part in asked.values() for x in part)
    results = iter((yield trials) if trials else ())
    found = {key: [next(results) for _ in part] for key, part in asked.items()}
    ready = {
      key: results
      for key, results in found.items()
      if None not in results or isinstance(asked[key], Independent)
    }
  return {key: answers[key] for key in plans}


def gather_lists(plans: Mapping[K, Plan[list[T]]]) -> Plan[list[T]]:
  """Makes one plan of several, which returns all that they return."""
  found = yield from gather(plans)
  return [x for each in found.values() for x in each]


def execute(plan: Plan[T], run_all: Callable[[list[Trial]], list[Any]]) -> T:
  """Executes a plan with a function from trials to their results.

  For trials that are :class:`Independent`, it may leave None in their place.
  """
  results: Any = None
  while True:
    try:
      trials = plan.send(results)
    except StopIteration as end:
      return end.value
    results = run_all(trials)


def count_trials(
  plan: Plan[Any], known: Callable[[Trial], Result | None]
) -> int:
  """Returns how many trials a plan will still ask for, about.

  ``known`` returns the result of a trial, None if it has none yet.
  """
  missing: set[str] = set()

  def guess(trials: list[Trial]) -> list[Result]:
    missing.update(x.key for x in trials if known(x) is None)
    return [known(x) or _guess(x) for x in trials]

  execute(plan, guess)
  return len(missing)


def _guess(trial: Trial) -> Result:
  """Returns what a trial may leave: a loss that falls with the steps."""
  return make_result(trial, -0.3 * math.log(trial.config.steps))
