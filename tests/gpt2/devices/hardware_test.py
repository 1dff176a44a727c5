import math
from pathlib import Path
import sys
import types

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from examples.gpt2.devices import hardware
from examples.gpt2.devices.sharding import make_mesh


@pytest.mark.parametrize(
  ('kind', 'tera'),
  [
    # Names as jax gives them, of which others are a part.
    ('TPU v5 lite', 197),
    ('TPU v5', 459),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA GB200', 2500),
    ('NVIDIA GH200 144G HBM3e', 989),
    ('NVIDIA A10', 125),
    ('NVIDIA A10G', 70),
    ('NVIDIA L4', 121),
    ('NVIDIA L40S', 362),
    ('NVIDIA GeForce RTX 4090', 165.2),
    # Not known, or a smaller chip whose name begins alike.
    ('cpu', math.nan),
    ('NVIDIA GeForce RTX 4090 Laptop GPU', math.nan),
    ('NVIDIA RTX A1000', math.nan),
    ('NVIDIA H20', math.nan),
  ],
)
def test_peaks_are_found_by_the_kind_of_device(kind: str, tera: float):
  device = types.SimpleNamespace(device_kind=kind)
  np.testing.assert_equal(hardware.peak_flops(device), tera * 1e12)


def test_bytes_of_a_device_count_its_shards():
  mesh = make_mesh('fsdp=4,tensor=2')

  def shape(dims, dtype, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

  tree = {
    'split': shape((8, 6), 'float32', 'fsdp', 'tensor'),
    'half': shape((8, 6), 'bfloat16', None, 'tensor'),
    'whole': shape((5,), 'int32'),
  }
  assert hardware.bytes_per_device(tree) == 2 * 3 * 4 + 8 * 3 * 2 + 5 * 4


@pytest.mark.parametrize(
  ('platform', 'kind', 'stats', 'expected'),
  [
    ('cpu', 'cpu', {'bytes_limit': 5}, None),
    ('tpu', 'TPU v5 lite', {'bytes_limit': 5}, 15.75 * 2**30),
    ('gpu', 'NVIDIA H100 80GB HBM3', {'bytes_limit': 5}, 5),
    ('tpu', 'TPU v5 lite', None, 15.75 * 2**30),
    ('gpu', 'NVIDIA H100 80GB HBM3', None, 0.75 * 84942979072),
    ('gpu', 'of tomorrow', {}, None),
  ],
)
def test_memory_is_what_the_kind_has_or_the_device_says(
  platform: str, kind: str, stats: dict | None, expected: float | None
):
  device = types.SimpleNamespace(
    platform=platform, device_kind=kind, memory_stats=lambda: stats
  )
  assert hardware.memory_bytes(device) == expected


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='asks the device')
def test_peak_memory_on_cpu_is_that_of_the_process():
  status = Path('/proc/self/status').read_text()
  kilobytes = int(status.split('VmHWM:')[1].split()[0])
  assert hardware.peak_memory() == pytest.approx(kilobytes * 1024, rel=0.05)
