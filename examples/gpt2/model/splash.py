"""Attention on TPU with jax's splash kernel, which keeps logits on the chip.

Axes: B sequences, T tokens, H heads, G heads of keys and values, K features of
a head.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as kernels,
  splash_attention_mask as masks,
)
from jax.sharding import PartitionSpec as P

from examples.gpt2.sharding import BATCH_AXES

# Queries, and keys, whose logits are on the chip at once.
_MOST_IN_BLOCK = 512
_LEAST_IN_BLOCK = 128


def is_possible(length: int) -> bool:
  """Whether the kernel takes a context of this length, in tokens."""
  return length % _LEAST_IN_BLOCK == 0


def splash_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Returns causal attention, of the shape of the queries, (B, T, H, K).

  Keys and values have the shape (B, T, G, K), where G divides H.

  On a mesh, each device attends with its own sequences and heads, since the
  compiler cannot partition a kernel. ``interpret`` runs it without a TPU.
  """
  attend = functools.partial(_attend, interpret=interpret)
  if not jax.sharding.get_abstract_mesh().empty:
    spec = P(BATCH_AXES, None, 'tensor')
    attend = jax.shard_map(
      attend, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
  return attend(query, key, value)


def _attend(
  query: jax.Array, key: jax.Array, value: jax.Array, *, interpret: bool
) -> jax.Array:
  _, length, num_heads, head_width = query.shape
  kernel = kernels.make_splash_mha_single_device(
    masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads),
    block_sizes=_block_sizes(length),
    interpret=interpret,
  )
  query, key, value = (
    x.swapaxes(1, 2) for x in (query * head_width**-0.5, key, value)
  )
  return jax.vmap(kernel)(query, key, value).swapaxes(1, 2)


def _block_sizes(length: int) -> kernels.BlockSizes:
  size = math.gcd(length, _MOST_IN_BLOCK)
  names = (
    'block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv', 'block_q_dq',
    'block_kv_dq',
  )  # fmt: skip
  sizes: dict[str, Any] = dict.fromkeys(names, size)
  return kernels.BlockSizes(**sizes)
