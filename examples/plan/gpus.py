"""NVIDIA GPUs that are not there, to compile for."""

import importlib.util
import os
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from examples.gpt2.config import UsageError


class _Gpu(NamedTuple):
  """What the compiler wants to know of a GPU.

  Numbers are those of the data sheets, as in the target configurations of XLA
  (``xla/backends/gpu/target_config/specs``).
  """

  name: str  # As jax names the device.
  compute_capability: int  # The major one.
  cores: int  # Streaming multiprocessors.
  float32_units: int  # In each.
  shared_memory: int  # Bytes in each.
  shared_memory_of_block: int  # Bytes of them for one block, at most.
  cache: int  # Bytes of the second level.
  clock: float  # GHz.
  memory: int  # Bytes.
  bandwidth: int  # Bytes a second to and from memory.


_GPUS = {
  'a100': _Gpu(
    'NVIDIA A100-SXM4-80GB', 8, 108, 64, 167936, 166912, 41943040, 1.41,
    85100068864, 2039040000000,
  ),
  'h100': _Gpu(
    'NVIDIA H100 80GB HBM3', 9, 132, 128, 233472, 232448, 52428800, 1.98,
    84942979072, 3352320000000,
  ),
  'h200': _Gpu(
    'NVIDIA H200', 9, 132, 128, 233472, 232448, 52428800, 1.98, 151397597184,
    4800000000000,
  ),
  'b200': _Gpu(
    'NVIDIA B200', 10, 148, 128, 233472, 232448, 132644864, 1.965,
    191514411008, 7672320000000,
  ),
}  # fmt: skip
# The proto GpuTargetConfigProto of XLA, as text. The limits of blocks and
# registers are the same for all of them.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  shared_memory_per_block_optin: {shared_memory_of_block}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {float32_units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {compute_capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_LIBRARIES = ('jax_cuda12_plugin', 'nvidia.cudnn', 'nvidia.cuda_nvcc')
# To time kernels takes a GPU.
_NO_AUTOTUNING = '--xla_gpu_autotune_level=0'
FORMS = 'h100:1x8 and h200:16x8 (hosts x GPUs of a host), also a100 and b200'


def is_gpu(name: str) -> bool:
  """Returns whether a topology is one of GPUs."""
  return name.partition(':')[0] in _GPUS


def devices(name: str) -> list[jax.Device]:
  """Returns the GPUs of some hosts, for compilation only.

  To be called before the process uses a device: it keeps jax to the CPU. Raises
  ``UsageError`` if a library is missing, or there is no such topology.
  """
  kind, _, extents = name.partition(':')
  if not re.fullmatch(r'[1-9]\d*x[1-9]\d*', extents):
    raise UsageError(f'--topology {name}: forms that work are {FORMS}.')
  if absent := missing():
    raise UsageError(
      f'the compiler for GPUs is missing ({", ".join(absent)}): pip install '
      "-e '.[plan-cuda]', best in an environment of its own (3.6 GB)."
    )
  jax.config.update('jax_platforms', 'cpu')
  flags = os.environ.get('XLA_FLAGS', '')
  if 'xla_gpu_autotune_level' not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} {_NO_AUTOTUNING}'.strip()
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  topology = topologies.get_topology_desc(
    platform='cuda',
    # Partitions first: GPUs of one NVLink domain that spans hosts are not told.
    topology=f'1x{extents}',
    target_config=_TARGET.format(**_GPUS[kind]._asdict()),
  )
  return list(topology.devices)


def float32_flops(kind: str) -> float | None:
  """Returns the peak FLOP/s in float32, of a GPU as jax names it.

  None if it is none of those that can be compiled for. Tensor cores do not
  multiply float32; each of the other units multiplies and adds once a cycle,
  which gives the 19.5, 67 and 75 TFLOP/s of the data sheets.
  """
  for gpu in _GPUS.values():
    if gpu.name == kind:
      return 2e9 * gpu.clock * gpu.cores * gpu.float32_units
  return None


def missing() -> list[str]:
  """Returns the libraries that are needed and not installed."""
  return [x for x in _LIBRARIES if not _is_installed(x)]


def _is_installed(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:
    return False
