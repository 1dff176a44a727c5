"""Layers of a decoder block, of GPT-2 and of Llama.

Letters at the end of a name give the axes of an array: B sequences, T tokens,
N all tokens of all sequences, D features, H heads, K features of a head.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, Literal

from flax import nnx
import jax
import jax.numpy as jnp

from examples.gpt2.devices.sharding import constrain

_STDDEV = 0.02
_ROTARY_BASE = 10_000.0
# Sizes that a power of two divides are quicker, and split over a tensor axis.
_VOCAB_MULTIPLE = 64

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""Function from queries, keys and values, each (B, T, H, K), to what attention
returns, of the same shape, and anything that the caller wants to have seen."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What the model is.

  Attributes:
    vocab_size: Number of token identifiers.
    context_length: Largest number of tokens in a sequence.
    num_layers: Transformer blocks.
    num_heads: Attention heads in a block, a divisor of ``width``.
    width: Features of the residual stream.
    mlp_width: Hidden features of the MLP.
    architecture: ``'gpt2'`` (LayerNorm, learned positions, GELU, biases) or
      ``'llama'`` (RMSNorm, rotary positions, SwiGLU, no biases).
    qk_norm: Whether queries and keys of each head go through an RMSNorm.
    untied_head: Whether the output head has a matrix of its own.
    dtype: Data type of activations; parameters are float32.
    remat: What the backward pass computes anew in each block: ``'none'``,
      ``'dots'`` (all but matrix products with weights) or ``'full'``.
    unroll: Layers that are compiled one by one in a turn of the loop.
  """

  vocab_size: int
  context_length: int
  num_layers: int
  num_heads: int
  width: int
  mlp_width: int
  architecture: Literal['gpt2', 'llama'] = 'gpt2'
  qk_norm: bool = False
  untied_head: bool = False
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  remat: Literal['none', 'dots', 'full'] = 'none'
  unroll: int = 1

  @property
  def head_width(self) -> int:
    """Features of a head."""
    return self.width // self.num_heads


def padded_vocab_size(num_tokens: int) -> int:
  """Returns the rows of the embedding for a number of token identifiers."""
  return -(-num_tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


class Attention(nnx.Module):
  """Causal self-attention.

  The kernel of queries, keys and values has the shape (width, heads, 3, head
  features): a shard of the tensor axis holds whole heads, and dimension numbers
  can take it as one matrix, as three, or as three for each head.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.is_rotary = config.architecture == 'llama'
    self.qkv = nnx.LinearGeneral(
      config.width,
      (config.num_heads, 3, config.head_width),
      **_linear_options(config, _STDDEV, rngs),
    )
    self.out = linear(config, config.width, config.width, rngs, residual=True)
    if config.qk_norm:
      self.query_norm = rms_norm(config, config.head_width, rngs)
      self.key_norm = rms_norm(config, config.head_width, rngs)

  def __call__(
    self, x_BTD: jax.Array, positions_T: jax.Array, attend: Attend
  ) -> tuple[jax.Array, Any]:
    """Returns what is added to the residual stream, and what attend saw."""
    y_BTHK, seen = attend(*self.project(x_BTD, positions_T))
    return _by_token(self.out, y_BTHK.reshape(x_BTD.shape)), seen

  def project(
    self, x_BTD: jax.Array, positions_T: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values, each of shape (B, T, H, K)."""
    qkv_BTHXK = constrain(_by_token(self.qkv, x_BTD), 'heads')
    query, key, value = jnp.moveaxis(qkv_BTHXK, 3, 0)
    if hasattr(self, 'query_norm'):
      query, key = self.query_norm(query), self.key_norm(key)
    if self.is_rotary:
      query, key = (rotate(x, positions_T) for x in (query, key))
    return query, key, value


def causal_attention(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, None]:
  """Attends from each token to itself and those before it.

  Args:
    query: Queries, shape (B, T, H, K).
    key: Keys, of the same shape.
    value: Values, of the same shape.

  Returns:
    Weighted values, of the same shape, and None.
  """
  # That of the mesh, for which a program may be compiled elsewhere.
  device = jax.sharding.get_abstract_mesh().abstract_device
  platform = (device and device.platform) or jax.default_backend()
  if platform == 'cpu':
    return _attention_on_cpu(query, key, value), None
  # cuDNN's kernel never writes the logits to memory; it takes half precision.
  is_fused = platform == 'gpu' and query.dtype == jnp.bfloat16
  y_BTHK = jax.nn.dot_product_attention(
    query,
    key,
    value,
    is_causal=True,
    implementation='cudnn' if is_fused else None,
  )
  return y_BTHK, None


def _attention_on_cpu(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
  """Attends as ``jax.nn.dot_product_attention`` does.

  Weights are normalized after the product with the values, which is
  quicker on CPU: those have fewer elements.
  """
  length, head_width = query.shape[1], query.shape[-1]
  query, key, value = (
    jnp.swapaxes(x, 1, 2) for x in (query * head_width**-0.5, key, value)
  )
  einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  logits_BHTS = einsum('BHTK,BHSK->BHTS', query, key)
  visible_TS = jnp.tril(jnp.ones((length, length), bool))
  logits_BHTS = jnp.where(visible_TS, logits_BHTS, -jnp.inf)
  # Softmax ignores what is taken off, so no gradient need go through it.
  largest = jax.lax.stop_gradient(logits_BHTS.max(-1, keepdims=True))
  exp_BHTS = jnp.exp(logits_BHTS - largest)
  y_BHTK = einsum('BHTS,BHSK->BHTK', exp_BHTS.astype(value.dtype), value)
  y_BHTK /= exp_BHTS.sum(-1, keepdims=True)
  return jnp.swapaxes(y_BHTK, 1, 2).astype(query.dtype)


def rotate(x_BTHK: jax.Array, positions_T: jax.Array) -> jax.Array:
  """Turns pairs of features by angles that grow with the position.

  Args:
    x_BTHK: Queries or keys. Feature i is paired with i + K / 2.
    positions_T: Position of each token.

  Returns:
    Array like ``x_BTHK``, after Su et al., `RoFormer
    <https://arxiv.org/abs/2104.09864>`_, 2021.
  """
  half = x_BTHK.shape[-1] // 2
  frequencies = _ROTARY_BASE ** (-jnp.arange(half) / half)
  angles = positions_T[:, None, None] * frequencies
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)


class MLP(nnx.Module):
  """Two linear layers around GELU in the tanh approximation."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    sizes = config.width, config.mlp_width
    self.up = linear(config, *sizes, rngs)
    self.down = linear(config, *reversed(sizes), rngs, residual=True)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what is added to the residual stream, shape (B, T, D)."""
    return _by_token(self._transform, x_BTD)

  def _transform(self, x_ND: jax.Array) -> jax.Array:
    return self.down(jax.nn.gelu(self.up(x_ND), approximate=True))


class GatedMLP(nnx.Module):
  """SwiGLU: one of two linear layers gates the other through SiLU."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    sizes = config.width, config.mlp_width
    self.gate = linear(config, *sizes, rngs)
    self.up = linear(config, *sizes, rngs)
    self.down = linear(config, *reversed(sizes), rngs, residual=True)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what is added to the residual stream, shape (B, T, D)."""
    return _by_token(self._transform, x_BTD)

  def _transform(self, x_ND: jax.Array) -> jax.Array:
    return self.down(jax.nn.silu(self.gate(x_ND)) * self.up(x_ND))


def _by_token(
  function: Callable[[jax.Array], jax.Array], x_BTD: jax.Array
) -> jax.Array:
  """Applies a function of (N, D) to tokens of shape (B, T, D)."""
  # With batch and time as one axis, XLA copies less on CPU.
  y_NX = function(x_BTD.reshape(-1, x_BTD.shape[-1]))
  return y_NX.reshape(*x_BTD.shape[:2], *y_NX.shape[1:])


def linear(
  config: ModelConfig,
  inputs: int,
  outputs: int,
  rngs: nnx.Rngs,
  *,
  residual: bool = False,
  **options: Any,
) -> nnx.Linear:
  """Makes a linear layer; one that ends a residual branch starts smaller."""
  # GPT-2 divides by the root of the number of residual branches.
  stddev = _STDDEV / math.sqrt(2 * config.num_layers) if residual else _STDDEV
  options = _linear_options(config, stddev, rngs) | options
  return nnx.Linear(inputs, outputs, **options)


def _linear_options(
  config: ModelConfig, stddev: float, rngs: nnx.Rngs
) -> dict[str, Any]:
  return {
    'use_bias': config.architecture == 'gpt2',
    'dtype': jnp.dtype(config.dtype),
    'kernel_init': nnx.initializers.normal(stddev),
    'rngs': rngs,
  }


def embedding(config: ModelConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
  """Makes a table of features, shape (rows, width)."""
  return nnx.Embed(
    rows,
    config.width,
    dtype=jnp.dtype(config.dtype),
    embedding_init=nnx.initializers.normal(_STDDEV),
    rngs=rngs,
  )


def norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
  """Makes the norm that stands before a branch; it computes in float32."""
  if config.architecture == 'llama':
    return rms_norm(config, config.width, rngs)
  # The fast variance, E[x^2] - E[x]^2, cancels digits that GPT-2 keeps.
  return nnx.LayerNorm(
    config.width,
    epsilon=1e-5,
    dtype=jnp.dtype(config.dtype),
    use_fast_variance=False,
    rngs=rngs,
  )


def rms_norm(config: ModelConfig, features: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
  """Makes a root-mean-square norm."""
  return nnx.RMSNorm(
    features, epsilon=1e-6, dtype=jnp.dtype(config.dtype), rngs=rngs
  )


def remat(config: ModelConfig, function: Callable[..., Any]) -> Any:
  """Makes a function keep less for the backward pass."""
  if config.remat == 'none':
    return function
  policies = jax.checkpoint_policies
  policy = {
    'dots': policies.dots_with_no_batch_dims_saveable,
    'full': policies.nothing_saveable,
  }[config.remat]
  # In a scan nothing can be merged with the forward pass anyway.
  return jax.checkpoint(function, policy=policy, prevent_cse=False)
