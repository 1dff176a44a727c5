"""Generates tokens with a cache of keys and values, in one compiled loop.

Letters at the end of a name give the axes of an array: B sequences, T tokens,
S slots of the cache, V vocabulary, L layers, H heads, K features of a head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.gpt2.model.files import as_module
from examples.gpt2.model.layers import ModelConfig
from examples.gpt2.model.transformer import Transformer

Cache = tuple[jax.Array, jax.Array]
"""Keys and values of all layers, each of shape (L, B, S, H, K)."""


@functools.partial(
  jax.jit, static_argnames=('config', 'num_tokens', 'top_k', 'num_samples')
)
def generate_tokens(
  config: ModelConfig,
  params: Any,
  prompt_T: jax.typing.ArrayLike,
  num_tokens: int,
  *,
  num_identifiers: jax.typing.ArrayLike,
  temperature: jax.typing.ArrayLike,
  top_k: int = 0,
  num_samples: int = 1,
  key: jax.Array,
) -> jax.Array:
  """Continues a prompt; to be called where no mesh is set.

  Args:
    config: What the model is.
    params: Tree of its parameters.
    prompt_T: Tokens to continue, at least one.
    num_tokens: Tokens to generate.
    num_identifiers: Number that generated tokens are below.
    temperature: Temperature of the softmax; at 0, the likeliest token is taken.
    top_k: Number of likeliest tokens to choose from; 0 for all.
    num_samples: Continuations.
    key: Key of the random numbers.

  Returns:
    Generated tokens, int32, shape (num_samples, num_tokens).
  """
  model = as_module(config, params)
  length = len(prompt_T)
  features_BTD, cache = extend(
    model, prompt_T[None], empty_cache(config, 1, length + num_tokens), 0
  )
  state = jax.tree.map(
    # All samples share what was computed of the prompt.
    lambda x, axis: jnp.repeat(x, num_samples, axis),
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
  keys_T = jax.random.split(key, num_tokens)
  _, tokens_TB = jax.lax.scan(step, state, (positions_T, keys_T))
  return tokens_TB.T


def _restrict(
  logits_BV: jax.Array, num_identifiers: jax.typing.ArrayLike, top_k: int
) -> jax.Array:
  """Rules out padding of the vocabulary, and all but the largest logits."""
  size = logits_BV.shape[-1]
  known_V = jnp.arange(size) < num_identifiers
  logits_BV = jnp.where(known_V, logits_BV, -jnp.inf)
  if not 0 < top_k < size:
    return logits_BV
  largest_BK, _ = jax.lax.top_k(logits_BV, top_k)
  return jnp.where(logits_BV < largest_BK[:, -1:], -jnp.inf, logits_BV)


def empty_cache(config: ModelConfig, batch_size: int, length: int) -> Cache:
  """Returns a cache of zeros with slots for some tokens."""
  shape = (
    config.num_layers, batch_size, length, config.num_heads, config.head_width
  )  # fmt: skip
  zeros = jnp.zeros(shape, config.dtype)
  return zeros, zeros


def extend(
  model: Transformer,
  tokens_BT: jax.Array,
  cache: Cache,
  position: jax.typing.ArrayLike,
) -> tuple[jax.Array, Cache]:
  """Runs the model on tokens that follow those of a cache.

  Args:
    model: Model.
    tokens_BT: Tokens.
    cache: Keys and values of the tokens before, in the first slots.
    position: Number of the tokens before; with the new ones, there must be
      slots for all.

  Returns:
    Features of the new tokens, shape (B, T, D), and the cache with them.
  """
  length, slots = tokens_BT.shape[1], cache[0].shape[2]
  positions_T = position + jnp.arange(length)
  visible_TS = jnp.arange(slots) <= positions_T[:, None]

  def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *cache: jax.Array
  ) -> tuple[jax.Array, Cache]:
    keys, values = (
      _put(x, new, 1) for x, new in zip(cache, (k, v), strict=True)
    )
    mask = visible_TS[None, None]
    return jax.nn.dot_product_attention(q, keys, values, mask=mask), (k, v)

  def _put(x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new, position, axis)

  features_BTD, new = model.features(
    tokens_BT, attend, first_position=position, by_layer=cache
  )
  return features_BTD, jax.tree.map(lambda x, y: _put(x, y, 2), cache, new)
