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
from examples.gpt2.model.config import ModelConfig
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


def memory_bytes(device: jax.Device) -> float | None:
  """Returns the bytes that programs may use of an accelerator.

  Args:
    device: Device, perhaps one that is only compiled for.

  Returns:
    What the device says, or what is known of its kind; None if neither is, and
    for a CPU.
  """
  if device.platform == 'cpu':
    return None
  try:
    stats = device.memory_stats() or {}
  except (jax.errors.JaxRuntimeError, NotImplementedError):
    stats = {}
  known = chips.find(device.device_kind).hbm
  return stats.get('bytes_limit') or (None if math.isnan(known) else known)


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
