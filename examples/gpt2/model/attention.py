"""Causal self-attention, with rotary positions and grouped queries in Llama.

Axes: B sequences, T tokens, S source tokens, D features, H heads, G groups of
heads (each with a key and a value of its own), K features of a head, X queries,
key and value of a group.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from examples.gpt2.config import ModelConfig
from examples.gpt2.model import splash
from examples.gpt2.model.layers import by_token, linear
from examples.gpt2.sharding import constrain

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""Function from queries, (B, T, H, K), keys and values, (B, T, G, K), to what
attention returns, of the shape of the queries, and anything that the caller
wants to be measured."""


class Attention(nnx.Module):
  """Causal self-attention.

  The kernel of queries, keys and values has the shape (width, groups, heads of
  a group + 2, head features), which is (width, heads, 3, head features) unless
  heads share keys: a shard of the tensor axis holds whole groups, and dimension
  numbers can take it as one matrix, or as one for each place in a group, or for
  each head.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    groups = config.num_kv_heads
    columns = groups, config.num_heads // groups + 2, config.head_width
    self.qkv = linear(config, config.width, columns, rngs)
    self.out = linear(
      config, config.attention_width, config.width, rngs, residual=True
    )
    if config.qk_norm:
      norm = functools.partial(
        nnx.RMSNorm,
        config.head_width,
        epsilon=1e-6,
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
      )
      self.query_norm, self.key_norm = norm(), norm()

  def __call__(
    self, x_BTD: jax.Array, positions_T: jax.Array, attend: Attend
  ) -> tuple[jax.Array, Any]:
    """Returns what the residual stream gets, and what attend measured."""
    qkv_BTGXK = constrain(by_token(self.qkv, x_BTD), 'heads')
    *queries, key, value = jnp.moveaxis(qkv_BTGXK, 3, 0)
    heads = self.config.num_heads, self.config.head_width
    query = jnp.stack(queries, 3).reshape(*x_BTD.shape[:2], *heads)
    if hasattr(self, 'query_norm'):
      query, key = self.query_norm(query), self.key_norm(key)
    if self.config.architecture == 'llama':
      frequencies_K = rotary_frequencies(self.config)
      query, key = (rotate(x, positions_T, frequencies_K) for x in (query, key))
    y_BTHK, measured = attend(query, key, value)
    y_BTD = y_BTHK.reshape(*x_BTD.shape[:2], -1)
    return by_token(self.out, y_BTD), measured


def causal_attention(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, None]:
  """Attends from each token to itself and those before it; measures nothing."""
  platform = _platform()
  if platform == 'cpu':
    return _attention_on_cpu(query, key, value), None
  is_fused = has_kernel(platform, query.shape[1], query.dtype)
  if is_fused and platform == 'tpu':
    return splash.splash_attention(query, key, value), None
  y_BTHK = jax.nn.dot_product_attention(
    query,
    key,
    value,
    is_causal=True,
    implementation='cudnn' if is_fused else None,
  )
  return y_BTHK, None


def has_kernel(platform: str, length: int, dtype: jnp.dtype) -> bool:
  """Whether a kernel attends, which never writes the logits to memory.

  For a context of some length, in tokens, and a dtype of the activations.
  """
  if platform == 'tpu':
    return splash.is_possible(length)
  # cuDNN's kernel takes half precision.
  return platform == 'gpu' and dtype == jnp.bfloat16


def _platform() -> str:
  """Returns that of the mesh, for which a program may be compiled elsewhere."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return (device and device.platform) or jax.default_backend()


def _attention_on_cpu(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
  """Attends, and normalizes after the product with the values.

  That is quicker on CPU: the product has fewer elements than the weights.
  """
  length, head_width = query.shape[1], query.shape[-1]
  key, value = _by_head(key, query), _by_head(value, query)
  query, key, value = (
    jnp.swapaxes(x, 1, 2) for x in (query * head_width**-0.5, key, value)
  )
  einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  logits_BHTS = einsum('BHTK,BHSK->BHTS', query, key)
  visible_TS = jnp.tril(jnp.ones((length, length), bool))
  logits_BHTS = jnp.where(visible_TS, logits_BHTS, -jnp.inf)
  # Softmax ignores what is taken off, so no gradient need go through it.
  largest_BHT1 = jax.lax.stop_gradient(logits_BHTS.max(-1, keepdims=True))
  exp_BHTS = jnp.exp(logits_BHTS - largest_BHT1)
  y_BHTK = einsum('BHTS,BHSK->BHTK', exp_BHTS.astype(value.dtype), value)
  y_BHTK /= exp_BHTS.sum(-1, keepdims=True)
  return jnp.swapaxes(y_BHTK, 1, 2).astype(query.dtype)


def _by_head(x_BTGK: jax.Array, query_BTHK: jax.Array) -> jax.Array:
  """Returns the keys, or values, of each head, (B, T, H, K)."""
  group = query_BTHK.shape[2] // x_BTGK.shape[2]
  return jnp.repeat(x_BTGK, group, axis=2)


def rotary_frequencies(config: ModelConfig) -> jax.Array:
  """Returns by how much features turn from token to token, (K / 2,)."""
  half = config.head_width // 2
  frequencies = config.rope_theta ** (-jnp.arange(half) / half)
  if config.rope_scaling is None:
    return frequencies
  factor, low, high, length = config.rope_scaling
  turns = length * frequencies / (2 * math.pi)
  kept = jnp.clip((turns - low) / (high - low), 0, 1)
  return kept * frequencies + (1 - kept) * frequencies / factor


def rotate(
  x_BTHK: jax.Array, positions_T: jax.Array, frequencies_K: jax.Array
) -> jax.Array:
  """Turns features i and i + K / 2 by angles that grow with the position.

  After Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
  """
  angles = positions_T[:, None, None] * frequencies_K
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)
