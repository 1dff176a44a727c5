"""Signals that ask a run to stop."""

import itertools
import signal
import sys
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

_CALLS = itertools.count(1)


class StopRequest:
  """Notes SIGTERM and control-C, so that a run can save before it stops.

  As a context, it handles the signals. The second control-C interrupts at once.
  """

  def __init__(self) -> None:
    self._received: int | None = None
    self._before: dict[int, Any] = {}

  def __enter__(self) -> 'StopRequest':
    # Only the main thread may. With several processes, jax notes SIGTERM
    # and tells the others of it.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and jax.process_count() == 1:
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def received(self) -> int | None:
    """Returns the signal, or None; all processes must ask equally often."""
    if jax.process_count() > 1:
      # jax looks for the next number after the last that it was asked of.
      if multihost_utils.reached_preemption_sync_point(next(_CALLS)):
        return signal.SIGTERM
      return None
    return self._received

  def _note(self, number: int, _: FrameType | None) -> None:
    if self._received is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self._received = number
    name = signal.Signals(number).name
    print(f'{name}: stopping after this step', file=sys.stderr, flush=True)
