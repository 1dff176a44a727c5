"""How long a compiled step takes at least: a roofline, an estimate.

Three times are taken as if each kind of work ran alone and at its peak:

- compute: FLOPs of matrix products, recomputed ones and those of the optimizer
  too, at the peak in bfloat16; a product that takes several passes, or runs at
  another rate, counts as several (:mod:`examples.plan.passes`);
- memory: bytes to and from main memory;
- network: for each collective the bytes that the ring algorithm has a device
  send. Of TPUs, over a link in two directions for each axis of the torus along
  which its group extends; an all-to-all passes on through a quarter of a ring,
  a collective-permute goes one way. Of GPUs, over NVLink within a host; between
  hosts, over the network adapters of all GPUs of the group, each of which has
  one.

A perfect overlap takes the longest of the three, no overlap their sum. Not
counted are latencies, slices whose rings do not close, links that are shared by
several hops, matrices that fill the units badly, and work that is not a matrix
product.
"""

from collections import Counter
from collections.abc import Sequence
import math
from typing import Any

import jax

from examples.gpt2.config import ModelConfig
from examples.gpt2.hardware import Chip
from examples.plan.collectives import Collective


def estimate(
  chip: Chip,
  devices: Sequence[jax.Device],
  bfloat16_flops: float,
  hbm_bytes: float,
  collectives: Sequence[Collective],
) -> dict[str, Any]:
  """Returns the roofline of a program, as JSON values.

  They are the seconds of compute, memory and network; ``seconds``, the longest
  of them, its name, ``bound``, and the sum, ``seconds_without_overlap``. FLOPs
  and bytes are those of a device; the devices are in the order of the mesh.
  """
  seconds = (
    _seconds_of_tpus if math.isnan(chip.network_bandwidth) else _seconds_of_gpus
  )
  times = {
    'compute_seconds': bfloat16_flops / chip.flops,
    'memory_seconds': hbm_bytes / chip.hbm_bandwidth,
    'network_seconds': sum(seconds(chip, devices, x) for x in collectives),
  }
  return times | {
    'seconds': max(times.values()),
    'seconds_without_overlap': sum(times.values()),
    'bound': max(times, key=times.__getitem__).removesuffix('_seconds'),
  }


def _seconds_of_tpus(
  chip: Chip, devices: Sequence[jax.Device], collective: Collective
) -> float:
  """Returns how long the links of a torus take."""
  sent, group = collective.sent_bytes, collective.group
  if collective.kind == 'collective-permute':
    return sent / chip.link_bandwidth
  coordinates = zip(*(devices[i].coords for i in group), strict=True)
  axes = sum(len(set(values)) > 1 for values in coordinates)
  if not axes:  # The cores of one chip.
    return 0.0
  hops = 1.0
  if collective.kind == 'all-to-all':
    hops = max(1.0, len(group) ** (1 / axes) / 4)
  return hops * sent / (2 * axes * chip.link_bandwidth)


def _seconds_of_gpus(
  chip: Chip, devices: Sequence[jax.Device], collective: Collective
) -> float:
  """Returns how long NVLink or the network takes, whichever is the slower."""
  sent = collective.sent_bytes
  # A permute's group is not known: it may be all.
  group = collective.group or range(len(devices))
  hosts = Counter(devices[i].process_index for i in group)
  within = sent / chip.link_bandwidth
  if len(hosts) == 1:
    return within
  # As many rings as GPUs of the group on a host, each with an adapter.
  adapters = min(hosts.values())
  if collective.kind == 'collective-permute':
    adapters = 1
  if collective.kind == 'all-to-all':
    sent *= (len(group) - adapters) / (len(group) - 1)
    adapters = 1
  return max(within, sent / (adapters * chip.network_bandwidth))


def recomputed_flops(config: ModelConfig, flops_per_token: float) -> float:
  """Returns the FLOPs of a token that rematerialization adds to the others."""
  features = config.num_layers * config.attention_width
  attention = 4.0 * features * config.context_length
  head = 6.0 * config.vocab_size * config.width
  full = (flops_per_token - head) / 3
  return {'none': 0.0, 'dots': attention, 'full': full}[config.remat]
