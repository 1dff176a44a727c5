"""Layers as GPT-2 and Llama have them: linear, embedding, norm and MLP.

Axes: B sequences, T tokens, N tokens of all sequences, D features, F hidden
features.
"""

from collections.abc import Callable
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp

from examples.gpt2.model import sums
from examples.gpt2.model.config import ModelConfig


class MLP(nnx.Module):
  """GELU between two linear layers; Llama: SwiGLU, with a third as gate."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    width, inner = config.width, config.mlp_width
    self.is_gated = config.architecture == 'llama'
    if self.is_gated:
      self.gate = linear(config, width, inner, rngs)
    self.up = linear(config, width, inner, rngs)
    self.down = linear(config, inner, width, rngs, residual=True)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what is added to the residual stream, shape (B, T, D)."""
    return by_token(self._transform, x_BTD)

  def _transform(self, x_ND: jax.Array) -> jax.Array:
    up_NF = self.up(x_ND)
    if self.is_gated:
      return self.down(jax.nn.silu(self.gate(x_ND)) * up_NF)
    return self.down(jax.nn.gelu(up_NF, approximate=True))


def by_token(
  function: Callable[[jax.Array], jax.Array], x_BTD: jax.Array
) -> jax.Array:
  """Applies a function of (N, D) to tokens of shape (B, T, D)."""
  # With sequences and tokens as one axis, XLA copies less on CPU.
  y = function(x_BTD.reshape(-1, x_BTD.shape[-1]))
  return y.reshape(*x_BTD.shape[:2], *y.shape[1:])


def linear(
  config: ModelConfig,
  inputs: int,
  outputs: int | tuple[int, ...],
  rngs: nnx.Rngs,
  *,
  residual: bool = False,
  use_bias: bool = True,
) -> nnx.LinearGeneral:
  """Makes a linear layer; one that ends a residual branch starts smaller."""
  # GPT-2 divides by the root of the number of residual branches.
  branches = 2 * config.num_layers if residual else 1
  stddev = config.init_std / math.sqrt(branches)
  make: Callable[..., nnx.LinearGeneral] = nnx.LinearGeneral
  if config.dtype != 'float32':
    make = functools.partial(
      sums.Linear, reduce_dtype=jnp.dtype(config.reduce_dtype)
    )
  return make(
    inputs,
    outputs,
    use_bias=use_bias and config.architecture == 'gpt2',
    dtype=jnp.dtype(config.dtype),
    kernel_init=nnx.initializers.normal(stddev),
    rngs=rngs,
  )


def embedding(config: ModelConfig, rows: int, rngs: nnx.Rngs) -> nnx.Embed:
  """Makes a table of features, shape (rows, width)."""
  return sums.Embed(
    rows,
    config.width,
    dtype=jnp.dtype(config.dtype),
    reduce_dtype=jnp.promote_types(config.dtype, config.reduce_dtype),
    embedding_init=nnx.initializers.normal(config.init_std),
    rngs=rngs,
  )


def norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
  """Makes the norm that stands before a branch; it computes in float32."""
  kind = nnx.LayerNorm if config.architecture == 'gpt2' else nnx.RMSNorm
  return kind(
    config.width,
    epsilon=config.norm_epsilon,
    dtype=jnp.dtype(config.dtype),
    # The fast variance, E[x^2] - E[x]^2, cancels digits that GPT-2 keeps.
    use_fast_variance=False,
    rngs=rngs,
  )
