"""A device for each core of a CPU, since two use two cores better than one."""

import contextlib
import os

import jax

from examples.gpt2.config import Config
from examples.gpt2.devices import hardware
from examples.gpt2.presets import PRESETS
from examples.gpt2.run.memory import bytes_on_cpu

_MOST = 8
# Of the memory that is free, so that none is short where one device would do.
_MEMORY_SHARE = 0.5
# A device whose core is busy elsewhere must not end the run: XLA waits 40 s.
_PATIENCE = ' --xla_cpu_collective_call_terminate_timeout_seconds=3600'
_FORCED = 'xla_force_host_platform_device_count'


def use_cores(config: Config) -> None:
  """Makes devices of the cores, as many as divide the batch and fit.

  Each processes a micro-batch. To be called with resolved settings, after the
  processes have met and before jax looks for devices. Nothing changes with
  ``--mesh``, several processes, a number of devices that jax has been told, or
  for an accelerator.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  is_told = jax.config.jax_num_cpu_devices != -1 or _FORCED in flags
  if config.mesh or is_told or jax.distributed.is_initialized():
    return
  count = num_devices(config, hardware.num_cores(), hardware.free_memory())
  if count == 1:
    return
  # Where devices are in use, it is too late.
  with contextlib.suppress(RuntimeError):
    jax.config.update('jax_num_cpu_devices', count)
    os.environ['XLA_FLAGS'] = flags + _PATIENCE


def num_devices(config: Config, cores: int, memory: float) -> int:
  """Returns how many devices to make of some cores, with memory in bytes."""
  default = PRESETS[config.preset]['micro_batch_size']
  sequences = config.micro_batch_size or default
  fitting = _MEMORY_SHARE * memory // bytes_on_cpu(config, sequences)
  most = int(min(cores, _MOST, fitting))
  counts = [
    n for n in range(1, most + 1) if config.batch_size % (n * sequences) == 0
  ]
  return max(counts, default=1)
