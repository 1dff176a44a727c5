"""A trace of some steps, for TensorBoard or xprof."""

from pathlib import Path
from typing import Any

import jax

from examples.gpt2.run.optional import OptionalPart

_TRACED = (10, 15)
"""First and last step of a trace, after those that were done before."""


class Profile(OptionalPart):
  """Writes a trace of some steps.

  As a context, it ends a trace that an error or a signal has cut short. In a
  store, the trace is there once it has ended.
  """

  def __init__(self, folder: Path, done: int):
    super().__init__(folder, 'There is no trace of the steps: {}')
    self._first, self._last = (done + step for step in _TRACED)
    self._is_tracing = False

  def __exit__(self, *_: object) -> None:
    if self._is_tracing:
      self._is_tracing = False
      self.attempt(jax.profiler.stop_trace)
      self.upload()

  def before(self, step: int, state: Any) -> None:
    """Starts or ends the trace before a step, which ``state`` is to take."""
    if step == self._first:
      self._is_tracing = True
      self.attempt(jax.profiler.start_trace, str(self.mirror.folder))
    elif self._is_tracing and step > self._last:
      jax.block_until_ready(state)
      self.__exit__()
