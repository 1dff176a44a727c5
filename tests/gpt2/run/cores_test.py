import math
import os
import subprocess
import sys

import pytest

from examples.gpt2.config import Config
from examples.gpt2.presets import resolve
from examples.gpt2.run.cores import num_devices
from examples.gpt2.run.memory import bytes_on_cpu


@pytest.mark.parametrize(
  ('flags', 'environment', 'count'),
  [
    ({}, {}, 2),
    ({'micro_batch_size': 64}, {}, 1),
    ({'batch_size': 4}, {}, 1),
    ({'mesh': 'data=1'}, {}, 1),
    ({}, {'JAX_NUM_CPU_DEVICES': '3'}, 3),
    ({}, {'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}, 4),
  ],
)
def test_each_core_is_a_device(
  flags: dict[str, object], environment: dict[str, str], count: int
):
  code = f"""
import jax
from examples.gpt2.config import Config
from examples.gpt2.devices import hardware
from examples.gpt2.presets import resolve
from examples.gpt2.run.cores import use_cores

hardware.num_cores = lambda: 2
use_cores(resolve(Config(**{flags!r})))
print(jax.device_count())
"""
  told = ('JAX_NUM_CPU_DEVICES', 'XLA_FLAGS')
  others = {k: x for k, x in os.environ.items() if k not in told}
  done = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    env=others | environment | {'JAX_PLATFORMS': 'cpu'},
  )
  assert int(done.stdout) == count


@pytest.mark.parametrize(
  ('preset', 'cores', 'gigabytes', 'count'),
  [
    ('demo', 1, math.inf, 1),
    ('demo', 3, math.inf, 2),  # Of 64 sequences, 8 each.
    ('demo', 64, math.inf, 8),
    ('demo', 4, 0.4, 1),
    ('small', 2, 64.0, 1),
    ('small', 2, 256.0, 2),
  ],
)
def test_there_are_as_many_devices_as_fit(
  preset: str, cores: int, gigabytes: float, count: int
):
  config = resolve(Config(preset=preset))
  assert num_devices(config, cores, 1e9 * gigabytes) == count


def test_a_device_needs_the_memory_of_a_model_and_a_micro_batch():
  config = resolve(Config())
  some, more = (bytes_on_cpu(config, n) for n in (8, 64))
  # 0.95 M parameters in float32: weights, moments and gradients.
  assert 19e6 < some < more < 9 * some
