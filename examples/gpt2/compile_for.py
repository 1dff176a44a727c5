"""Compiles the training step for TPUs or GPUs that are not there.

It tells whether a step fits into their memory, and what devices send to each
other: python -m examples.gpt2.train --compile-for v5e:16x16
"""

from importlib import metadata
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from benchmarks.hlo import sent_by_kind
from examples.gpt2 import hardware, sharding
from examples.gpt2.command import UsageError, columns, format_bytes, table
from examples.gpt2.config import Config
from examples.gpt2.data import batch_shape
from examples.gpt2.init_from import find_model
from examples.gpt2.resolve import resolve
from examples.gpt2.step import Trainer

_FORMS = (
  'v4:2x2x4, v5e:16x16, v5p:4x8x8 and v6e:4x4 (chips of a slice, hosts have '
  '2x2), h100:1x8 and h200:16x8 (hosts x GPUs of a host), also a100 and b200'
)
# Axes of a slice: libtpu takes more, and dies of a 0.
_TPUS = {
  'v2': 2, 'v3': 2, 'v4': 3, 'v5e': 2, 'v5p': 3, 'v6e': 2, 'tpu7x': 3,
}  # fmt: skip
_TPU_COMPILER = ('libtpu',)
_GPU_COMPILER = (
  'jax-cuda12-plugin', 'nvidia-cudnn-cu12', 'nvidia-cuda-nvcc-cu12',
)  # fmt: skip
# Keeps libtpu from asking the metadata server, which is not there, and lets
# several processes compile at once, since there is no chip to share.
_TPU_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_MIN_LOG_LEVEL': '3',
}
# What the compiler wants to know of a GPU, from the data sheets.
_H100 = {
  'name': 'NVIDIA H100 80GB HBM3',  # As jax names the device.
  'compute_capability': 9,  # The major one.
  'cores': 132,  # Streaming multiprocessors.
  'float32_units': 128,  # In each.
  'shared_memory': 233472,  # Bytes in each.
  'cache': 52428800,  # Bytes of the second level.
  'clock': 1.98,  # GHz.
  'memory': 84942979072,  # Bytes.
  'bandwidth': 3352320000000,  # Bytes a second to and from memory.
}
_GPUS: dict[str, dict[str, Any]] = {
  'a100': {
    'name': 'NVIDIA A100-SXM4-80GB', 'compute_capability': 8, 'cores': 108,
    'float32_units': 64, 'shared_memory': 167936, 'cache': 41943040,
    'clock': 1.41, 'memory': 85100068864, 'bandwidth': 2039040000000,
  },
  'h100': _H100,
  'h200': _H100 | {
    'name': 'NVIDIA H200', 'memory': 151397597184, 'bandwidth': 4800000000000,
  },
  'b200': _H100 | {
    'name': 'NVIDIA B200', 'compute_capability': 10, 'cores': 148,
    'cache': 132644864, 'clock': 1.965, 'memory': 191514411008,
    'bandwidth': 7672320000000,
  },
}  # fmt: skip
# The proto GpuTargetConfigProto of XLA, as text. A block may use all shared
# memory of a multiprocessor but 1 KiB; the other limits are the same for all.
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


def compile_run(config: Config, name: str) -> None:
  """Compiles the step of a run for a topology, and prints what it needs.

  To be called before the process uses a device: it keeps jax to the CPU, since
  jax would start libtpu wherever it is installed.

  Raises:
    UsageError: If a setting is wrong, or the compiler is not installed.
    OutOfMemoryError: If a device has too little memory for the step.
  """
  source = find_model(config)
  mesh = sharding.make_mesh(config.mesh, devices(name))
  config = resolve(config, mesh, None if source is None else source.config)
  trainer = Trainer(config, config.model.vocab_size, mesh)
  # Nothing that is compiled here can be run, or found again by a run.
  jax.config.update('jax_enable_compilation_cache', False)
  with hardware.memory_advice():
    step = compile_step(config, trainer)
    print(_report(config, trainer, step, compile_update(trainer)))
    # The compiler for GPUs compiles what does not fit too.
    hardware.check_memory(step, mesh)


def devices(name: str) -> list[jax.Device]:
  """Returns the devices of a topology, such as 'v5e:16x16', to compile for.

  To be called before the process uses a device, see :func:`compile_run`. Raises
  ``UsageError`` if the compiler is not installed, or there is no such topology.
  """
  kind, _, extents = name.partition(':')
  if kind not in (*_GPUS, *_TPUS):
    raise UsageError(
      f'--compile-for {name}: there is no such chip. Forms that work: {_FORMS}.'
    )
  if absent := missing(kind):
    extra = 'gpu-compiler' if kind in _GPUS else 'tpu-compiler'
    raise UsageError(
      f'--compile-for {name} needs {", ".join(absent)}: pip install -e '
      f"'.[{extra}]', best in an environment of its own."
    )
  jax.config.update('jax_platforms', 'cpu')
  topology = _gpus if kind in _GPUS else _tpus
  try:
    return list(topology(kind, extents).devices)
  except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
    reason = str(error).splitlines()[0]
    raise UsageError(
      f'--compile-for {name}: {reason}. Forms that work: {_FORMS}.'
    ) from error


def missing(kind: str) -> list[str]:
  """Returns the packages of the compiler for a kind that are not installed."""
  installed = {package.name for package in metadata.distributions()}
  needed = _GPU_COMPILER if kind in _GPUS else _TPU_COMPILER
  return [package for package in needed if package not in installed]


def _tpus(kind: str, extents: str) -> Any:
  axes = _TPUS[kind]
  if not re.fullmatch('x'.join([r'[1-9]\d*'] * axes), extents):
    raise ValueError(f'a slice of {kind} has {axes} axes, each at least 1')
  for variable, value in _TPU_ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
  # Or v4 would be listed by core, of which jax makes no mesh.
  options = {'chip_config_name': 'megacore'} if kind == 'v4' else {}
  return topologies.get_topology_desc(f'{kind}:{extents}', 'tpu', **options)


def _gpus(kind: str, extents: str) -> Any:
  if not re.fullmatch(r'[1-9]\d*x[1-9]\d*', extents):
    raise ValueError('there is no such topology')
  flags = os.environ.get('XLA_FLAGS', '')
  if 'xla_gpu_autotune_level' not in flags:
    # To time kernels takes a GPU.
    os.environ['XLA_FLAGS'] = f'{flags} --xla_gpu_autotune_level=0'.strip()
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  gpu = _GPUS[kind]
  block = gpu['shared_memory'] - 1024
  return topologies.get_topology_desc(
    platform='cuda',
    # Partitions first: GPUs of one NVLink domain that spans hosts are not told.
    topology=f'1x{extents}',
    target_config=_TARGET.format(**gpu, shared_memory_of_block=block),
  )


def compile_step(config: Config, trainer: Trainer) -> jax.stages.Compiled:
  """Compiles a step of training."""
  with jax.set_mesh(trainer.mesh):
    batch = batch_shape(config, trainer.mesh)
    return trainer.step.lower(trainer.shapes, batch).compile()


def compile_update(trainer: Trainer) -> jax.stages.Compiled:
  """Compiles the end of a step: the optimizer's update and its application."""
  with jax.set_mesh(trainer.mesh):
    return trainer.update.lower(trainer.shapes, trainer.shapes.params).compile()


def _report(
  config: Config,
  trainer: Trainer,
  step: jax.stages.Compiled,
  update: jax.stages.Compiled,
) -> str:
  """Returns tables of the memory of a device and of the bytes that it sends."""
  mesh = trainer.mesh
  _, rows, _ = batch_shape(config, mesh).shape
  device = mesh.devices.flat[0]
  available = hardware.memory_bytes(device)
  sent = {'step': sent_by_kind(step), 'update': sent_by_kind(update)}
  kinds = sorted(sent['step'] | sent['update'])
  for by_kind in sent.values():
    by_kind['all'] = sum(by_kind.values())
  return '\n'.join([
    table({
      'devices': f'{mesh.size} x {device.device_kind}',
      'mesh': ','.join(f'{axis}={size}' for axis, size in mesh.shape.items()),
      'parameters': f'{trainer.num_params:,}',
      'micro-batch size': str(rows // sharding.num_batch_shards(mesh)),
      'weights and moments': format_bytes(
        hardware.bytes_per_device(trainer.shapes)
      ),
      'needed memory': format_bytes(hardware.needed_bytes(step)),
      'available memory': format_bytes(available) if available else 'unknown',
    }),
    '',
    columns([
      {'a device sends': kind}
      | {what: format_bytes(x.get(kind, 0)) for what, x in sent.items()}
      for kind in (*kinds, 'all')
    ]),
  ])  # fmt: skip
