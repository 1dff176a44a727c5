"""Plans: which runs an experiment asks for, step by step.

A plan is a generator. It yields lists of runs, is sent their results in the
same order, and returns what it found out. It computes nothing itself, so that
the same plan counts runs ahead, has them trained, and reads them for a report.
Several plans go on independently of each other (see :class:`Independent`).
"""

from collections.abc import Callable, Generator, Hashable, Mapping
import dataclasses
import functools
import math
from typing import Any, TypeAlias, TypeVar

from examples.gpt2.config import Config, digest
from examples.gpt2.presets import identity

T = TypeVar('T')
K = TypeVar('K', bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Run:
  """A training run.

  Attributes:
    config: Resolved settings.
    arm: Name of the study's own optimizer, if it is not the trainer's.
    with_diagnostics: Whether attention and updates are measured, which takes a
      program of its own and some time.
    attention: ``'mean'`` for a model in whose layers each token takes the mean
      of the values so far.
    task: What is learned: ``'gpt'``, the next token; ``'masked'``, masked
      tokens; ``'vit'`` and ``'mixer'``, images (see
      :mod:`examples.study.tasks`).
    first: Run whose state after half of its steps starts this one.
    fresh_moments: Whether only the weights of that are taken.
    measure: Name of what is measured of the final weights, if anything is (see
      :mod:`examples.study.measures`).
  """

  config: Config
  arm: str = ''
  with_diagnostics: bool = False
  attention: str = 'softmax'
  task: str = 'gpt'
  first: 'Run | None' = None
  fresh_moments: bool = False
  measure: str = ''

  @functools.cached_property
  def identity(self) -> dict[str, Any]:
    """What decides the numbers of the run, but for its text; JSON values.

    Settings that have their default are left out, so that a new setting leaves
    old runs what they are.
    """
    defaults = {
      field.name: field.default for field in dataclasses.fields(Config)
    }
    settings = {
      name: str(value) if value == math.inf else value
      for name, value in identity(self.config).items()
      if value != defaults[name]
    }
    if self.attention != 'softmax':
      settings['attention'] = self.attention
    if self.task != 'gpt':
      settings['task'] = self.task
    if self.first is not None:
      settings['first'] = self.first.identity
      settings['fresh_moments'] = self.fresh_moments
    if self.measure:
      settings['measure'] = self.measure
    return settings | {
      'arm': self.arm,
      'with_diagnostics': self.with_diagnostics,
    }

  @functools.cached_property
  def key(self) -> str:
    """Hash of the identity."""
    return digest(self.identity)[:16]

  @property
  def label(self) -> dict[str, Any]:
    """Key, optimizer, batch size, learning rate and seed; JSON values."""
    return {
      'key': self.key,
      'optimizer': self.config.optimizer,
      'arm': self.arm,
      'batch_size': self.config.batch_size,
      'learning_rate': self.config.learning_rate,
      'seed': self.config.seed,
    }


@dataclasses.dataclass(frozen=True)
class Result:
  """What came out of a run.

  Attributes:
    loss: Final validation loss, nats a token, of images the final training
      loss, nats an image; infinite if the run diverged.
    diagnostics: Of a run with diagnostics, lists by name with an entry for each
      diagnostics step: ``step``, ``train_loss`` and, with an entry for each
      layer in turn, ``max_attention_logit``, ``attention_entropy`` and, of
      MERIT, ``clipped``. Of images, with an entry for the last step: ``step``,
      ``train_loss``, ``test_loss`` and ``test_errors``, a share.
    measured: What the run's measure found; None if it has none or diverged.
  """

  loss: float
  diagnostics: dict[str, list[Any]]
  measured: Any = None


Plan: TypeAlias = Generator[list[Run], list[Any], T]


class Independent(list[Run]):
  """Runs of several plans, which may be sent None for what has no result yet.

  Then they ask again, also for what follows from the results that were sent. So
  no plan waits for another one's runs.
  """


def gather(plans: Mapping[K, Plan[T]]) -> Plan[dict[K, T]]:
  """Makes one plan of several, which ask for their runs at the same time."""
  answers: dict[K, T] = {}
  asked: dict[K, list[Run]] = {}
  ready: dict[K, Any] = dict.fromkeys(plans)
  while ready or asked:
    for key, results in ready.items():
      try:
        asked[key] = plans[key].send(results)
      except StopIteration as end:
        asked.pop(key, None)
        answers[key] = end.value
    runs = Independent(run for runs in asked.values() for run in runs)
    flat = iter((yield runs) if runs else [])
    found = {key: [next(flat) for _ in runs] for key, runs in asked.items()}
    ready = {
      key: results
      for key, results in found.items()
      if None not in results or isinstance(asked[key], Independent)
    }
  return {key: answers[key] for key in plans}


def execute(plan: Plan[T], run_all: Callable[[list[Run]], list[Any]]) -> T:
  """Executes a plan with a function from runs to their results.

  For runs that are :class:`Independent`, it may leave None in their place.
  """
  results: Any = None
  while True:
    try:
      runs = plan.send(results)
    except StopIteration as end:
      return end.value
    results = run_all(runs)


def _guess(run: Run) -> Result:
  """Returns what a run may leave: a loss that falls with the steps."""
  return Result(-0.3 * math.log(run.config.steps), {})


def count_runs(plan: Plan[Any], known: Callable[[Run], Result | None]) -> int:
  """Returns how many runs a plan will still ask for, about.

  Args:
    plan: A plan that nobody has started.
    known: Function from a run to its result, None if it has none yet.
  """
  missing = set()

  def guess(runs: list[Run]) -> list[Result]:
    missing.update(run.key for run in runs if known(run) is None)
    return [known(run) or _guess(run) for run in runs]

  execute(plan, guess)
  return len(missing)
