"""A trace of some steps, for TensorBoard or xprof."""

from pathlib import Path
from typing import Any

import jax

from examples.gpt2.storage import Mirror

_TRACED = (10, 15)
"""First and last step of a trace, after those that were done before."""


class Profile:
  """Writes a trace of some steps.

  As a context, it ends a trace that an error or a signal has cut short. In a
  store, the trace is there once it has ended.
  """

  def __init__(self, folder: Path, done: int):
    self._mirror = Mirror(folder)
    self._first, self._last = (done + step for step in _TRACED)
    self._is_tracing = False

  def __enter__(self) -> 'Profile':
    return self

  def __exit__(self, *_: object) -> None:
    if self._is_tracing:
      jax.profiler.stop_trace()
      self._is_tracing = False
      self._mirror.upload()

  def before(self, step: int, state: Any) -> None:
    """Starts or ends the trace before a step, which ``state`` is to take."""
    if step == self._first:
      jax.profiler.start_trace(str(self._mirror.folder))
      self._is_tracing = True
    elif self._is_tracing and step > self._last:
      jax.block_until_ready(state)
      self.__exit__()
