"""How long a compiled step takes at least: a roofline, an estimate.

Three times are taken as if each went on alone and at its peak:

- compute: FLOPs of the matrix products, recomputed ones too, at the peak of
  bfloat16;
- memory: bytes to and from main memory at its bandwidth;
- network: for each collective the bytes that the ring algorithm has a device
  send, at the bandwidth of a link times two directions times the axes of the
  torus along which its group extends. An all-to-all passes on through a
  quarter of a ring. A collective-permute goes one way.

A perfect overlap takes the longest of the three, no overlap their sum. Not
counted are latencies, slices whose rings do not close, links that are shared by
several hops, matrices that fill the units badly, and work that is not a matrix
product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from examples.gpt2.devices.chips import Chip
from examples.gpt2.model.config import ModelConfig
from examples.plan.collectives import Collective


class Estimate(NamedTuple):
  """Seconds of a step.

  Attributes:
    compute: Seconds of matrix products.
    memory: Seconds of traffic to and from main memory.
    network: Seconds of collectives.
  """

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    """Seconds if all overlap."""
    return max(self)

  @property
  def seconds_without_overlap(self) -> float:
    """Seconds if nothing overlaps."""
    return sum(self)

  @property
  def bound(self) -> str:
    """Name of the longest."""
    return max(zip(self, self._fields, strict=True))[1]


def estimate(
  chip: Chip,
  devices: Sequence[jax.Device],
  flops: float,
  hbm_bytes: float,
  collectives: Sequence[Collective],
) -> Estimate:
  """Returns the roofline of a program.

  Args:
    chip: What a device can do.
    devices: Devices of the mesh, in its order.
    flops: FLOPs of a device.
    hbm_bytes: Bytes that a device moves to and from main memory.
    collectives: What is sent.
  """
  return Estimate(
    flops / chip.flops,
    hbm_bytes / chip.hbm_bandwidth,
    sum(collective_seconds(x, chip, devices) for x in collectives),
  )


def collective_seconds(
  collective: Collective, chip: Chip, devices: Sequence[jax.Device]
) -> float:
  """Returns the seconds of all executions of a collective."""
  if collective.kind == 'collective-permute':
    return collective.sent_bytes / chip.link_bandwidth
  group = collective.groups[0]
  axes = torus_axes([devices[number] for number in group])
  if not axes:  # The cores of one chip.
    return 0.0
  hops = 1.0
  if collective.kind == 'all-to-all':
    hops = max(1.0, len(group) ** (1 / axes) / 4)
  return hops * collective.sent_bytes / (2 * axes * chip.link_bandwidth)


def torus_axes(devices: Sequence[jax.Device]) -> int:
  """Returns along how many axes of the torus devices differ."""
  coordinates = zip(*(device.coords for device in devices), strict=True)
  return sum(len(set(values)) > 1 for values in coordinates)


def recomputed_flops(config: ModelConfig, flops_per_token: float) -> float:
  """Returns the FLOPs of a token that the backward pass computes anew.

  Args:
    config: What the model is.
    flops_per_token: Those of a forward and backward pass without that.
  """
  attention = 4.0 * config.num_layers * config.width * config.context_length
  head = 6.0 * config.vocab_size * config.width
  return {
    'none': 0.0,
    'dots': attention,
    'full': (flops_per_token - head) / 3,
  }[config.remat]
