"""What runs measure of their final weights."""

from collections.abc import Callable
import importlib
from typing import Any, TypeAlias

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.run.step import Trainer, TrainState

Measure: TypeAlias = Callable[[Trainer, Config, Tokens, TrainState], Any]
"""Function from a trainer, the settings and tokens of a run, and the state at
its end to JSON values."""

_MODULES = {
  'rows': 'examples.study.rows',
  'curvature': 'examples.study.curvature',
  'preconditioned curvature': 'examples.study.preconditioned',
}
"""Modules with a function ``measure``, by the name that a run gives. They are
imported when they are needed, since some need packages that others do not. A
run is known by this name: what measures otherwise needs another."""


def find(name: str) -> Measure:
  """Returns a measure.

  Raises:
    UsageError: If it needs a package that is missing.
  """
  try:
    module = importlib.import_module(_MODULES[name])
  except ModuleNotFoundError as error:
    raise UsageError(
      f'To measure {name} a package is needed: pip install {error.name}'
    ) from error
  measure: Measure = module.measure
  return measure
