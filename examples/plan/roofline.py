"""How long a compiled step takes at least: a roofline, an estimate.

Three times are taken as if each kind of work ran alone and at its peak:

- compute: FLOPs of matrix products, recomputed ones too, in bfloat16;
- memory: bytes to and from main memory;
- network: for each collective the bytes that the ring algorithm has a device
  send, over a link in two directions for each axis of the torus along which its
  group extends. An all-to-all passes on through a quarter of a ring. A
  collective-permute goes one way.

A perfect overlap takes the longest of the three, no overlap their sum. Not
counted are latencies, slices whose rings do not close, links that are shared by
several hops, matrices that fill the units badly, and work that is not a matrix
product.
"""

from collections.abc import Sequence
from typing import Any

import jax

from examples.gpt2.devices import chips
from examples.gpt2.model.config import ModelConfig
from examples.plan.collectives import Collective


def estimate(
  devices: Sequence[jax.Device],
  flops: float,
  hbm_bytes: float,
  collectives: Sequence[Collective],
) -> dict[str, Any]:
  """Returns the roofline of a program, as JSON values.

  They are the seconds of compute, memory and network; ``seconds``, the longest
  of them, its name, ``bound``, and the sum, ``seconds_without_overlap``. FLOPs
  and bytes are those of a device; the devices are in the order of the mesh.
  """
  chip = chips.find(devices[0].device_kind)
  shares = sum(_link_bytes(x, devices) for x in collectives)
  times = {
    'compute_seconds': flops / chip.flops,
    'memory_seconds': hbm_bytes / chip.hbm_bandwidth,
    'network_seconds': shares / chip.link_bandwidth,
  }
  return times | {
    'seconds': max(times.values()),
    'seconds_without_overlap': sum(times.values()),
    'bound': max(times, key=times.__getitem__).removesuffix('_seconds'),
  }


def _link_bytes(collective: Collective, devices: Sequence[jax.Device]) -> float:
  """Returns the bytes that pass through a link, one way."""
  sent, group = collective.sent_bytes, collective.group
  if collective.kind == 'collective-permute':
    return sent
  coordinates = zip(*(devices[i].coords for i in group), strict=True)
  axes = sum(len(set(values)) > 1 for values in coordinates)
  if not axes:  # The cores of one chip.
    return 0.0
  hops = 1.0
  if collective.kind == 'all-to-all':
    hops = max(1.0, len(group) ** (1 / axes) / 4)
  return hops * sent / (2 * axes)


def recomputed_flops(config: ModelConfig, flops_per_token: float) -> float:
  """Returns the FLOPs of a token that rematerialization adds to the others."""
  attention = 4.0 * config.num_layers * config.width * config.context_length
  head = 6.0 * config.vocab_size * config.width
  full = (flops_per_token - head) / 3
  return {'none': 0.0, 'dots': attention, 'full': full}[config.remat]
