"""What the machine is and can do: FLOP/s, memory, cores, versions."""

import math
import os
import platform
import resource
import sys
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
import optax
import orbax.checkpoint
import tokenizers

from examples.gpt2.devices import chips
import merit_optax


def peak_flops(device: jax.Device) -> float:
  """Returns the peak FLOP/s of a device in bfloat16, NaN if not known."""
  return chips.find(device.device_kind).flops


def memory_bytes(device: jax.Device) -> float | None:
  """Returns the bytes that programs may use of an accelerator.

  They are those of its kind, or what the device says, which comes first for a
  GPU, since it follows the settings of jax; None where neither is known, and
  for a CPU. The device may be one that is only compiled for.
  """
  if device.platform == 'cpu':
    return None
  known = chips.find(device.device_kind).hbm
  if device.platform == 'tpu' and not math.isnan(known):
    return known
  try:
    said = (device.memory_stats() or {}).get('bytes_limit')
  except (jax.errors.JaxRuntimeError, NotImplementedError):
    said = None
  return said or (None if math.isnan(known) else known)


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
