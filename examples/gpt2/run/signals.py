"""Signals that ask a run to stop."""

import contextlib
import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

_CALLS = itertools.count(1)


class StopRequest:
  """Notes a signal to stop, so that a run can save before it does.

  The signals are SIGTERM, SIGHUP (of a terminal that is closed), SIGUSR1 (which
  Slurm sends by ``--signal``) and control-C. As a context, it handles them. A
  control-C after one of them ends the process at once, whatever that is waiting
  for. To be entered before anything else: without a handler, Python ends at
  once.
  """

  def __init__(self) -> None:
    self._received: int | None = None
    self._before: dict[int, Any] = {}

  def __enter__(self) -> Self:
    if threading.current_thread() is threading.main_thread():  # No other may.
      for number in (
        signal.SIGINT,
        signal.SIGUSR1,
        signal.SIGHUP,
        # Where there are several processes, jax takes it over.
        signal.SIGTERM,
      ):
        # nohup has SIGHUP ignored, so that the run outlives its terminal.
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if number != signal.SIGHUP or not is_ignored:
          self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def received(self) -> int | None:
    """Returns the signal, or None; all processes must ask equally often."""
    if jax.process_count() > 1:
      # jax looks for the next number after the last that it was asked of.
      is_noted = multihost_utils.reached_preemption_sync_point(next(_CALLS))
      return (self._received or signal.SIGTERM) if is_noted else None
    return self._received

  def _note(self, number: int, _: FrameType | None) -> None:
    self._received = self._received or number
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if jax.distributed.is_initialized() and number != signal.SIGTERM:
      # jax notes it, and has all processes stop after the same step.
      os.kill(os.getpid(), signal.SIGTERM)
    name = signal.Signals(number).name
    # A print could come in the middle of another one, which Python refuses.
    with contextlib.suppress(OSError):
      os.write(2, f'{name}: stopping after this step\n'.encode())
