"""A trace of some steps, for TensorBoard or xprof."""

from collections.abc import Callable
import contextlib
from pathlib import Path

import jax

from examples.gpt2.run.optional import OptionalPart

_TRACED = (10, 15)
"""First and last step of a trace, after those that were done before."""


class Profile(OptionalPart):
  """Writes a trace of some steps.

  As a context, it ends a trace that an error or a signal has cut short. In a
  store, the trace is there once it has ended.
  """

  def __init__(self, folder: Path, done: int, wait: Callable[[], object]):
    """Names the folder, the steps done, and what waits for the last one."""
    super().__init__(folder, 'There is no trace of the steps: {}')
    self.first, self._last = (done + step for step in _TRACED)
    self._wait = wait
    self._is_tracing = False

  def __exit__(self, *_: object) -> None:
    if self._is_tracing:
      # A trace that ends while a step is under way can crash the process. After
      # an error there may be nothing to wait for.
      with contextlib.suppress(Exception):
        self._wait()
      self._end()

  def before(self, step: int) -> None:
    """Starts or ends the trace before a step."""
    if step == self.first:
      self._is_tracing = True
      self.attempt(jax.profiler.start_trace, str(self.mirror.folder))
    elif self._is_tracing and step > self._last:
      self._wait()
      self._end()

  def _end(self) -> None:
    self._is_tracing = False
    self.attempt(jax.profiler.stop_trace)
    self.upload()
