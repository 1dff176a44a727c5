"""What the machine is and can do: chips, memory, cores, versions."""

from collections.abc import Iterator
import contextlib
import math
import os
import platform
import re
import resource
import sys
from typing import Any, NamedTuple

import flax
import jax
from jax.sharding import Mesh
import jaxlib
import numpy as np
import optax
import orbax.checkpoint
import tokenizers

from examples.gpt2.command import CommandError, format_bytes
import merit_optax


class Chip(NamedTuple):
  """Peaks of a device; NaN where a value is not known."""

  flops: float  # Dense FLOP/s of matrix products in bfloat16.
  hbm: float = math.nan  # Bytes of memory that a program may use.


_GIB = 2**30

# By words of `device_kind`, to its end for those of which there are smaller
# ones with a longer name. A device of TPU7x is half a chip. FLOP/s are those
# of the data sheets, without sparsity and with sums in float32. Memory of TPUs
# is what the compiler says that it may use, a little less than the data sheets'
# 32, 16 and 96 GB. Of a GPU it is three quarters, which jax takes by default,
# and only for those that --compile-for knows: others say it themselves.
_CHIPS = {
  'TPU7x': Chip(1153.5e12),
  'TPU v6': Chip(918e12, 31.25 * _GIB),
  'TPU v6e': Chip(918e12, 31.25 * _GIB),
  'TPU v5p': Chip(459e12, 95.74 * _GIB),
  'TPU v5 lite': Chip(197e12, 15.75 * _GIB),
  'TPU v5e': Chip(197e12, 15.75 * _GIB),
  'TPU v5': Chip(459e12, 95.74 * _GIB),
  'TPU v4': Chip(275e12, 30.75 * _GIB),
  # A 72nd of a GB200 NVL72: 360 PFLOP/s with sparsity.
  'GB200': Chip(2500e12),
  'B200': Chip(2250e12, 0.75 * 191514411008),
  'GH200': Chip(989e12),
  'H200 NVL': Chip(835e12),
  'H200': Chip(989e12, 0.75 * 151397597184),
  'H100 PCIe': Chip(756e12),
  'H100 NVL': Chip(835e12),
  'H100': Chip(989e12, 0.75 * 84942979072),
  'A100': Chip(312e12, 0.75 * 85100068864),
  'A10G': Chip(70e12),
  'L40S': Chip(362e12),
  'L4': Chip(121e12),
  # Of the tables in NVIDIA's papers on Ada and RTX Blackwell; with sums in
  # float16 these two are twice as fast.
  'RTX 4090$': Chip(165.2e12),
  'RTX 5090$': Chip(209.5e12),
  'MI300X': Chip(1307.4e12),
}


def find_chip(device_kind: str) -> Chip:
  """Returns the peaks of a kind of device, as jax names it.

  The longest name counts whose words the kind has: an H200 is no GH200.
  """
  kinds = [kind for kind in _CHIPS if re.search(rf'\b{kind}\b', device_kind)]
  return _CHIPS[max(kinds, key=len)] if kinds else Chip(math.nan)


def peak_flops(device: jax.Device) -> float:
  """Returns the peak FLOP/s of a device in bfloat16, NaN if not known."""
  return find_chip(device.device_kind).flops


def memory_bytes(device: jax.Device) -> float | None:
  """Returns the bytes that programs may use of an accelerator.

  They are those of its kind, or what the device says, which comes first for a
  GPU, since it follows the settings of jax; None where neither is known, and
  for a CPU. The device may be one that is only compiled for.
  """
  if device.platform == 'cpu':
    return None
  known = find_chip(device.device_kind).hbm
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


class OutOfMemoryError(CommandError):
  """A device has too little memory; the message says what to change."""

  status = 4


def needed_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the bytes of a device that a program needs, arguments included."""
  stats = compiled.memory_analysis()
  results = stats.output_size_in_bytes - stats.alias_size_in_bytes
  return (
    stats.argument_size_in_bytes
    + results
    + stats.temp_size_in_bytes
    + stats.generated_code_size_in_bytes
  )


def check_memory(
  compiled: jax.stages.Compiled, mesh: Mesh, what: str = 'the step'
) -> None:
  """Raises ``MemoryError`` for a program that no device has the memory for."""
  needed = needed_bytes(compiled)
  available = memory_bytes(mesh.local_devices[0])
  if available is not None and needed > available:
    raise MemoryError(
      f'{what} needs {format_bytes(needed)} of a device that has '
      f'{format_bytes(available)}'
    )


@contextlib.contextmanager
def memory_advice() -> Iterator[None]:
  """Turns a failed allocation into an ``OutOfMemoryError`` with advice."""
  try:
    yield
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    first = (str(error).splitlines() or [''])[0]
    if not isinstance(error, MemoryError) and 'RESOURCE_EXHAUSTED' not in first:
      raise
    raise OutOfMemoryError(
      f'out of memory: {first}. Try half the --micro-batch-size, --remat dots '
      'or full, --mesh fsdp=N on several devices, or --dtype bfloat16, which '
      'makes a new run.'
    ) from error
