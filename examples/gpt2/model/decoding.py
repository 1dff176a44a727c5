"""Generates tokens with a cache of keys and values, in one compiled loop.

Axes: B sequences, T tokens, S slots of the cache, V vocabulary, L layers, G
heads of keys and values, K features of a head.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import numpy as np

from examples.gpt2.devices.sharding import num_batch_shards
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.files import Model
from examples.gpt2.model.transformer import Transformer, as_module

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of all layers, each of shape (L, B, S, G, K)."""


def generate_tokens(
  model: Model,
  prompt_T: Sequence[int],
  num_tokens: int,
  mesh: Mesh,
  seed: int,
  temperature: float,
  top_k: int = 0,
  num_samples: int = 1,
) -> np.ndarray:
  """Continues a prompt of at least one token; all processes must call it.

  At temperature 0 the likeliest token is taken, with ``top_k`` 0 any may be.
  The parameters stay on the devices of the mesh as they are. Returns the
  generated tokens in each process, int32, shape (num_samples, num_tokens).
  """
  shards = num_batch_shards(mesh)
  # Each shard of the batch reads the prompt once, for all its continuations.
  prompt_BT = np.tile(np.asarray(prompt_T, np.int32), (shards, 1))
  sizes = num_tokens, math.ceil(num_samples / shards), top_k
  with jax.set_mesh(mesh):
    tokens_BT = _generate(
      model.config, sizes, model.params, prompt_BT,
      model.num_tokens, temperature, np.uint32(seed),
    )  # fmt: skip
  return np.asarray(tokens_BT)[:num_samples]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(
  config: ModelConfig,
  sizes: tuple[int, int, int],
  params: Any,
  prompt_BT: jax.Array,
  num_identifiers: jax.Array,
  temperature: jax.Array,
  seed: jax.Array,
) -> jax.Array:
  """Returns some continuations of each prompt, on all devices."""
  num_tokens, copies, top_k = sizes
  model = as_module(config, params)
  batch_size, length = prompt_BT.shape
  cache = empty_cache(config, batch_size, length + num_tokens)
  features_BTD, cache = extend(model, prompt_BT, cache, 0)
  state = jax.tree.map(
    lambda x, axis: jnp.repeat(x, copies, axis),
    (features_BTD[:, -1:], cache),
    (0, (1, 1)),
  )

  def step(state: Any, inputs: tuple[jax.Array, jax.Array]) -> Any:
    (features_BTD, cache), (position, key) = state, inputs
    logits_BV = model.logits(features_BTD)[:, 0]
    logits_BV = _restrict(logits_BV, num_identifiers, top_k)
    # The largest of logits with Gumbel noise is a sample of their softmax.
    noise_BV = temperature * jax.random.gumbel(key, logits_BV.shape)
    tokens_B = jnp.argmax(logits_BV + noise_BV, axis=-1)
    return extend(model, tokens_B[:, None], cache, position), tokens_B

  positions_T = length + jnp.arange(num_tokens)
  keys_T = jax.random.split(jax.random.key(seed), num_tokens)
  _, tokens_TB = jax.lax.scan(step, state, (positions_T, keys_T))
  return jax.lax.with_sharding_constraint(tokens_TB.T, P())


def _restrict(
  logits_BV: jax.Array, num_identifiers: jax.Array, top_k: int
) -> jax.Array:
  """Rules out padding of the vocabulary, and all but the largest logits."""
  size = logits_BV.shape[-1]
  logits_BV = jnp.where(jnp.arange(size) < num_identifiers, logits_BV, -jnp.inf)
  if not 0 < top_k < size:
    return logits_BV
  least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
  return jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)


def empty_cache(config: ModelConfig, batch_size: int, length: int) -> Cache:
  """Returns a cache of zeros with slots for some tokens."""
  heads = config.num_kv_heads, config.head_width
  shape = config.num_layers, batch_size, length, *heads
  zeros = jnp.zeros(shape, config.dtype)
  return zeros, zeros


def extend(
  model: Transformer,
  tokens_BT: jax.Array,
  cache: Cache,
  position: jax.typing.ArrayLike,
) -> tuple[jax.Array, Cache]:
  """Runs the model on tokens that follow those of a cache.

  Those are in its first slots, as many as the position says; the new ones must
  have room. Returns their features, shape (B, T, D), and the cache with them.
  """
  length, slots = tokens_BT.shape[1], cache[0].shape[2]
  positions_T = position + jnp.arange(length)
  visible_TS = jnp.arange(slots) <= positions_T[:, None]
  put = functools.partial(
    jax.lax.dynamic_update_slice_in_dim, start_index=position
  )

  def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array
  ) -> tuple[jax.Array, Cache]:
    keys, values = put(keys, k, axis=1), put(values, v, axis=1)
    mask = visible_TS[None, None]
    return jax.nn.dot_product_attention(q, keys, values, mask=mask), (k, v)

  features_BTD, new = model.features(
    tokens_BT, attend, first_position=position, by_layer=cache
  )
  return features_BTD, jax.tree.map(functools.partial(put, axis=2), cache, new)
