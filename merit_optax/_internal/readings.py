"""What an optimizer reads of parameters in `init`, for `describe`."""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import contextvars
from typing import Any, TypeAlias

from merit_optax._internal.trees import path_names

# By the kind of reading and the path of a parameter, what each transform read.
Readings: TypeAlias = dict[str, dict[str, list[Any]]]
_current: contextvars.ContextVar[Readings | None] = contextvars.ContextVar(
  'readings', default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[Readings]:
  """Collects what transforms read while the context lasts."""
  readings: Readings = collections.defaultdict(
    lambda: collections.defaultdict(list)
  )
  token = _current.set(readings)
  try:
    yield readings
  finally:
    _current.reset(token)


def record(kind: str, params: Any, values: Sequence[Any]) -> None:
  """Adds what was read of each parameter, if anybody wants to know."""
  readings = _current.get()
  if readings is not None:
    for name, value in zip(path_names(params), values, strict=True):
      readings[kind][name].append(value)
