"""What chips can do: peak FLOP/s, memory and bandwidths."""

import math
from typing import NamedTuple


class Chip(NamedTuple):
  """Peaks of a device; NaN where a value is not known."""

  flops: float  # Dense FLOP/s of matrix products in bfloat16.
  hbm: float = math.nan  # Bytes of memory that a program may use.
  hbm_bandwidth: float = math.nan  # Bytes a second to and from memory.
  # Bytes a second, one way: to a neighbour in a TPU's torus, to all GPUs of a
  # host over NVLink.
  link_bandwidth: float = math.nan
  # Bytes a second, one way, to other hosts; only of GPUs.
  network_bandwidth: float = math.nan


_GIB = 2**30

# By a part of `device_kind`, the most specific first. A TPU v3 chip is two
# devices, and the entry is for one. FLOP/s are those of the data sheets.
# Bandwidths are those of "How to Scale Your Model",
# https://jax-ml.github.io/scaling-book. Memory is what the TPU compiler says
# that it may use, a little less than the data sheets' 32, 16 and 96 GB; of a
# GPU it is three quarters, which jax takes by default. NVLink is half of the
# data sheets' 600, 900 and 1800 GB/s, which count both ways; networks are those
# of a DGX, an adapter of 200 (A100) or 400 Gb/s for each GPU.
_CHIPS = {
  'TPU v6': Chip(918e12, 31.25 * _GIB, 1.6e12, 9e10),
  'TPU v5p': Chip(459e12, 95.74 * _GIB, 2.8e12, 9e10),
  'TPU v5 lite': Chip(197e12, 15.75 * _GIB, 8.1e11, 4.5e10),
  'TPU v5e': Chip(197e12, 15.75 * _GIB, 8.1e11, 4.5e10),
  'TPU v5': Chip(459e12, 95.74 * _GIB, 2.8e12, 9e10),
  'TPU v4': Chip(275e12, 30.75 * _GIB, 1.2e12, 4.5e10),
  'TPU v3': Chip(61.5e12),
  'B200': Chip(2250e12, 0.75 * 191514411008, 7.67e12, 9e11, 5e10),
  'H200 NVL': Chip(835e12),
  'H200': Chip(989e12, 0.75 * 151397597184, 4.8e12, 4.5e11, 5e10),
  'H100 PCIe': Chip(756e12),
  'H100 NVL': Chip(835e12),
  'H100 80GB HBM3': Chip(989e12, 0.75 * 84942979072, 3.35e12, 4.5e11, 5e10),
  'H100': Chip(989e12),
  'A100-SXM4-80GB': Chip(312e12, 0.75 * 85100068864, 2.04e12, 3e11, 2.5e10),
  'A100': Chip(312e12),
  'L40S': Chip(362e12),
  'L40': Chip(181e12),
  'L4': Chip(121e12),
  'V100': Chip(125e12),
}


def find(device_kind: str) -> Chip:
  """Returns the peaks of a kind of device, as jax names it."""
  kinds = [kind for kind in _CHIPS if kind in device_kind]
  return _CHIPS[kinds[0]] if kinds else Chip(math.nan)
