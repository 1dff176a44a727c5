"""What an optimizer reads of parameters in `init`, for `describe`.

Optax's chains and partitions are closures: only their `init` can tell what is
in them, and it returns nothing but the state.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import contextvars
from typing import Any, TypeAlias

import jax

# By the kind of reading and the id of a parameter, what each transform read.
# (Combinators may give parameters other paths: lookahead does.)
Readings: TypeAlias = dict[tuple[str, int], list[Any]]
_current: contextvars.ContextVar[Readings | None] = contextvars.ContextVar(
  'readings', default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[Readings]:
  """Collects what transforms read while the context lasts."""
  readings: Readings = collections.defaultdict(list)
  token = _current.set(readings)
  try:
    yield readings
  finally:
    _current.reset(token)


def record(kind: str, params: Any, values: Sequence[Any]) -> None:
  """Adds what was read of each parameter, if anybody wants to know."""
  readings = _current.get()
  if readings is not None:
    for param, value in zip(jax.tree.leaves(params), values, strict=True):
      readings[kind, id(param)].append(value)
