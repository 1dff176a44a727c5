import math
from pathlib import Path
import sys
import types

import jax
import numpy as np
import pytest

from examples.gpt2 import hardware
from examples.gpt2.hardware import OutOfMemoryError, memory_advice


@pytest.mark.parametrize(
  ('kind', 'tera'),
  [
    # Names as jax gives them, of which others are a part.
    ('TPU v5 lite', 197),
    ('TPU v5', 459),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA GH200 144G HBM3e', 989),
    ('NVIDIA A10G', 70),
    ('NVIDIA L40S', 362),
    ('NVIDIA GeForce RTX 4090', 165.2),
    # Not known, or a smaller chip whose name begins alike.
    ('cpu', math.nan),
    ('NVIDIA A10', math.nan),
    ('NVIDIA GeForce RTX 4090 Laptop GPU', math.nan),
  ],
)
def test_peaks_are_found_by_the_kind_of_device(kind: str, tera: float):
  device = types.SimpleNamespace(device_kind=kind)
  np.testing.assert_equal(hardware.peak_flops(device), tera * 1e12)


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='asks the device')
def test_peak_memory_on_cpu_is_that_of_the_process():
  status = Path('/proc/self/status').read_text()
  kilobytes = int(status.split('VmHWM:')[1].split()[0])
  assert hardware.peak_memory() == pytest.approx(kilobytes * 1024, rel=0.05)


@pytest.mark.parametrize(
  'error',
  [
    jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 12345\nmore'),
    MemoryError(),
  ],
  ids=type,
)
def test_a_failed_allocation_becomes_a_line_of_advice(error: Exception):
  with pytest.raises(OutOfMemoryError) as found, memory_advice():
    raise error
  (line,) = str(found.value).splitlines()
  assert '12345' in line or isinstance(error, MemoryError)
  assert '--micro-batch-size' in line
  assert found.value.__cause__ is error


def test_other_errors_are_no_lack_of_memory():
  with pytest.raises(jax.errors.JaxRuntimeError), memory_advice():
    raise jax.errors.JaxRuntimeError('INTERNAL: broken')
