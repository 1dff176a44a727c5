"""The processes of a run: how they meet, and what asks them to stop."""

from collections.abc import Callable
import contextlib
import itertools
import json
import os
import re
import signal
import threading
from types import FrameType
from typing import Any, Self
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np
from orbax.checkpoint import multihost

from examples.gpt2.command import UsageError
from examples.gpt2.config import Config

_CONNECT_SECONDS = 30 * 60
_SHUTDOWN_SECONDS = 30
_WAIT_SECONDS = 3600
_CALLS = itertools.count(1)


def connect(config: Config) -> None:
  """Joins the processes of a run, if there are several.

  To be called before anything that makes jax look for devices. Without
  ``--coordinator``, the processes are those of the cluster that jax detects: a
  TPU pod, Slurm, Open MPI, Kubernetes. Raises ``UsageError`` if it detects none
  and ``--distributed on`` asks for it.
  """
  if config.distributed == 'off' or jax.distributed.is_initialized():
    return
  try:
    jax.distributed.initialize(
      config.coordinator,
      config.num_processes,
      config.process_id,
      initialization_timeout=_CONNECT_SECONDS,
      # A process that failed alone waits so long for the others to leave.
      shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
  except (ValueError, RuntimeError) as error:
    is_wanted = config.distributed == 'on' or config.coordinator is not None
    if is_wanted or not _is_alone(error):
      raise UsageError(
        f'--distributed {config.distributed}: the processes of this run '
        f'cannot be found ({error}). Give --coordinator, --num-processes and '
        '--process-id, or --distributed off for a process without others.'
      ) from error
    return
  if _has_a_node_for_itself():
    # jax assumes a process for each GPU under Slurm and Open MPI.
    for platform in ('cuda', 'rocm'):
      jax.config.update(f'jax_{platform}_visible_devices', 'all')
  if jax.process_count() > 1:
    # The first collective has a time limit, which slow work before it would
    # exceed in the processes that wait.
    multihost_utils.sync_global_devices('all processes are there')


def _is_alone(error: Exception) -> bool:
  """Returns whether jax says that there is no cluster, or no more to join."""
  return bool(re.search('coordinator_address|before any JAX calls', str(error)))


def _has_a_node_for_itself() -> bool:
  """Returns whether Slurm or Open MPI started one process on each node."""
  # Open MPI first, as jax does: it may have been started by Slurm.
  tasks = os.environ.get('OMPI_COMM_WORLD_LOCAL_SIZE') or os.environ.get(
    'SLURM_STEP_TASKS_PER_NODE', ''
  )
  is_chosen = 'JAX_LOCAL_DEVICE_IDS' in os.environ
  return not is_chosen and bool(re.fullmatch(r'1(\(x\d+\))?', tasks))


def wait_for_all(name: str) -> None:
  """Waits until all processes are here, for up to an hour.

  Collectives wait for half a minute only. So this belongs behind work that may
  take much longer in one process than in another, such as compilation. A name
  serves once.
  """
  if jax.process_count() > 1:
    everyone = set(range(jax.process_count()))
    multihost.sync_global_processes(
      name, timeout=_WAIT_SECONDS, processes=everyone
    )


def is_process_0() -> bool:
  """Returns whether this is process 0, which writes what is shared."""
  return jax.process_index() == 0


def print_once(text: str) -> None:
  """Prints, in process 0."""
  if is_process_0():
    print(text, flush=True)


def on_process_0(function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function in process 0, and gives its result, JSON values, to all.

  An error is raised in all, so that none waits for the others: in other
  processes than 0 as ``UsageError`` if it is one or an ``OSError``, else as
  ``RuntimeError``. The function must not wait for other processes.
  """
  if jax.process_count() == 1:
    return function(*args)
  outcome: dict[str, Any] = {}
  raised = None
  if is_process_0():
    try:
      outcome = {'result': function(*args)}
    except Exception as error:
      raised = error
      is_known = isinstance(error, (UsageError, OSError))
      outcome = {'error': str(error) if is_known else repr(error)}
      outcome['is_known'] = is_known
  outcome = _broadcast(outcome)
  if raised is not None:
    raise raised
  if 'error' in outcome:
    kind = UsageError if outcome['is_known'] else RuntimeError
    raise kind(outcome['error'])
  return outcome['result']


def _broadcast(value: Any) -> Any:
  """Returns the JSON value of process 0 in all processes."""
  content = np.frombuffer(json.dumps(value).encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
  # Powers of two: each shape is a program to compile.
  padded = np.zeros(1 << (size - 1).bit_length(), np.uint8)
  if is_process_0():
    padded[:size] = content
  return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)[:size]))


def check_same(values: dict[str, str]) -> None:
  """Raises ``UsageError`` in all processes unless all have the same values."""
  if jax.process_count() == 1:
    return
  for name, value in values.items():
    try:
      multihost_utils.assert_equal(np.uint32(zlib.crc32(value.encode())))
    except AssertionError as error:
      raise UsageError(
        'All processes must have the same settings and data, but they differ '
        f'in {name} (here: {value}).'
      ) from error


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
