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

from examples.gpt2.config import ModelConfig


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
  return nnx.LinearGeneral(
    inputs,
    outputs,
    use_bias=use_bias and config.architecture == 'gpt2',
    dtype=jnp.dtype(config.dtype),
    kernel_init=nnx.initializers.normal(stddev),
    rngs=rngs,
  )


class Embedding(nnx.Embed):
  """Table of features, whose gradient is added up in float32.

  The gradient of a row is added up token by token, of which a common one has
  thousands. Flax's table adds in the dtype of the activations: bfloat16 would
  round each sum, and is slow on GPUs.
  """

  def __call__(self, tokens: jax.Array) -> jax.Array:  # type: ignore[override]
    """Returns the rows of tokens in the layer's dtype, (*tokens.shape, D)."""
    return _look_up(self.embedding.get_value(), tokens, self.dtype)


# Devices send the table in the dtype of the activations. A lookup in float32
# that is rounded afterwards would have them send twice as much, once more for
# each micro-batch.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(
  table_VD: jax.Array, tokens: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  return jnp.take(table_VD.astype(dtype), tokens, axis=0)


def _look_up_forward(
  table_VD: jax.Array, tokens: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _look_up(table_VD, tokens, dtype), (table_VD, tokens)


def _look_up_backward(
  dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None]:
  table_VD, tokens = residuals
  gradient_VD = jnp.zeros_like(table_VD).at[tokens].add(g.astype(jnp.float32))
  if dtype != table_VD.dtype:
    # Else XLA adds to the gradient of a tied head, which it gathers for that.
    gradient_VD = jax.lax.optimization_barrier(gradient_VD)
  return gradient_VD, None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def embedding(config: ModelConfig, rows: int, rngs: nnx.Rngs) -> Embedding:
  """Makes a table of features, shape (rows, width)."""
  return Embedding(
    rows,
    config.width,
    dtype=jnp.dtype(config.dtype),
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
