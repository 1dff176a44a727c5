"""What the machine is and can do: peak FLOP/s, memory, processes, signals."""

import math
import os
import platform
import resource
import signal
import sys
import threading
from types import FrameType
from typing import Any

import flax
import jax
from jax.experimental import multihost_utils
import jaxlib
import numpy as np
import optax
import orbax.checkpoint
import tokenizers

from examples.gpt2.config import Config
from examples.gpt2.devices import chips
from examples.gpt2.model.layers import ModelConfig
import merit_optax


def peak_flops(device: jax.Device) -> float:
  """Returns the peak FLOP/s of a device in bfloat16, NaN if not known."""
  return chips.find(device.device_kind).flops


def flops_per_token(config: ModelConfig, params: Any) -> float:
  """Returns the FLOPs of a forward and backward pass, for each token.

  Six for each weight of a matrix product and 12 T a feature of a layer for
  attention, the masked half of it included, as is usual; recomputation does not
  count.

  Args:
    config: What the model is.
    params: Tree of parameters, or of their shapes.
  """
  matrices = sum(
    x.size
    for path, x in jax.tree.leaves_with_path(params)
    if jax.tree_util.keystr(path[-1:], simple=True) == 'kernel'
  )
  if not config.untied_head:
    matrices += config.vocab_size * config.width
  attention = config.num_layers * config.width * config.context_length
  return 6.0 * matrices + 12.0 * attention


def peak_memory() -> int:
  """Returns the most bytes in use so far: of a device, or of this process."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in stats:
    return int(stats['peak_bytes_in_use'])
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return size if sys.platform == 'darwin' else size * 1024


def bytes_per_device(shapes: Any) -> int:
  """Returns the bytes that each device holds of a tree of sharded shapes."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
    for x in jax.tree.leaves(shapes)
  )


def usable_cores() -> list[int]:
  """Returns the numbers of the CPU cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


def versions() -> dict[str, Any]:
  """Returns versions and devices, as JSON values."""
  modules = (
    merit_optax, jax, jaxlib, optax, flax, orbax.checkpoint, tokenizers,
  )  # fmt: skip
  return {
    'versions': {'python': platform.python_version()}
    | {module.__name__: module.__version__ for module in modules},
    'devices': [f'{d.platform}:{d.id} {d.device_kind}' for d in jax.devices()],
    'processes': jax.process_count(),
    'cpu_cores': os.cpu_count(),
  }


def say(text: str) -> None:
  """Prints, in one of several processes."""
  if jax.process_index() == 0:
    print(text, flush=True)


def connect(config: Config) -> None:
  """Joins the processes of a run, if there are several.

  Args:
    config: Settings. Without ``--coordinator``, processes find each other on a
      TPU pod and under Slurm.
  """
  if config.coordinator is not None:
    jax.distributed.initialize(
      config.coordinator, config.num_processes, config.process_id
    )
  elif _has_peers() and not jax.distributed.is_initialized():
    jax.distributed.initialize()


def _has_peers() -> bool:
  """Whether a TPU pod's or Slurm's environment tells of other processes."""
  tasks = os.environ.get('SLURM_STEP_NUM_TASKS', '1')
  return tasks != '1' or ',' in os.environ.get('TPU_WORKER_HOSTNAMES', '')


class StopRequest:
  """Notes SIGTERM and control-C, so that a run can save before it stops.

  As a context, it handles the signals. The second control-C interrupts at once.
  """

  def __init__(self) -> None:
    self._received: int | None = None
    self._before: dict[int, Any] = {}

  def __enter__(self) -> 'StopRequest':
    # Only the main thread may. With several processes, jax notes SIGTERM
    # itself, and tells the others of it.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and jax.process_count() == 1:
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def received(self, step: int) -> int | None:
    """Returns the signal, or None; in each process the same at each step."""
    if jax.process_count() > 1:
      if multihost_utils.reached_preemption_sync_point(step):
        return signal.SIGTERM
      return None
    return self._received

  def _note(self, number: int, _: FrameType | None) -> None:
    if self._received is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self._received = number
    name = signal.Signals(number).name
    print(f'{name}: stopping after this step', file=sys.stderr, flush=True)
