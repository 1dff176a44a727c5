"""Layers that say in which dtype and order their gradients are summed.

The gradient of a parameter is a sum over tokens and devices. Flax's layers make
one in the dtype of the activations: each device rounds its part to bfloat16,
and devices add those; the gradient of an embedding is added up token by token,
of which a common one has thousands. Here the sum is float32, as it is by
default in Megatron-LM and torchtitan, or bfloat16, which sends half the bytes.

GPUs add the gradient of an embedding up in the order in which their threads
arrive. Here the bits of the sum do not depend on it, so that a run that was
killed and resumed ends as one that was not.

Axes: S shards of the batch, B sequences, T positions, N tokens of all sequences
or of a shard, D features, V rows of an embedding.
"""

import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from examples.gpt2.devices.sharding import num_shards

# Together they have 24 bits or more, of up to 2**18 tokens.
_DIGITS = 2


class Linear(nnx.LinearGeneral):
  """Linear layer of one input axis."""

  def __init__(self, *args: Any, reduce_dtype: jnp.dtype, **kwargs: Any):
    """Makes a layer whose gradients are summed in ``reduce_dtype``."""
    super().__init__(*args, **kwargs)
    self.reduce_dtype = reduce_dtype

  def __call__(self, x_ND: jax.Array) -> jax.Array:  # type: ignore[override]
    """Returns an array of shape (N, *features), in the layer's dtype."""
    kernel = self.kernel.get_value()
    y = _matmul(x_ND.astype(self.dtype), kernel, self.reduce_dtype)
    if self.bias is None:
      return y
    bias = self.bias.get_value().astype(self.reduce_dtype)
    # The conversion is behind what the backward pass turns into a sum.
    return y + jnp.broadcast_to(bias, y.shape).astype(self.dtype)


class Embed(nnx.Embed):
  """Table of features."""

  def __init__(self, *args: Any, reduce_dtype: jnp.dtype, **kwargs: Any):
    """Makes a table whose gradient is summed in ``reduce_dtype``."""
    super().__init__(*args, **kwargs)
    self.reduce_dtype = reduce_dtype

  def __call__(self, tokens: Any) -> jax.Array:  # type: ignore[override]
    """Returns rows that are rounded to the layer's dtype, in reduce_dtype."""
    table_VD = self.embedding.get_value()
    return _look_up(table_VD, tokens, self.dtype, self.reduce_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(
  x_ND: jax.Array, kernel: jax.Array, reduce_dtype: jnp.dtype
) -> jax.Array:
  del reduce_dtype
  return jnp.tensordot(x_ND, kernel.astype(x_ND.dtype), axes=1)


def _matmul_forward(
  x_ND: jax.Array, kernel: jax.Array, reduce_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _matmul(x_ND, kernel, reduce_dtype), (x_ND, kernel)


def _matmul_backward(
  reduce_dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x_ND, kernel = residuals
  features = tuple(range(1, g.ndim))
  x_gradient = jnp.tensordot(
    g, kernel.astype(g.dtype), axes=(features, features)
  )
  product = functools.partial(
    jnp.tensordot, axes=(0, 0), preferred_element_type=reduce_dtype
  )
  gradient = jax.lax.platform_dependent(
    x_ND,
    g,
    # XLA for CPU has no such product with features of several axes.
    cpu=lambda x_ND, g: product(x_ND, g.reshape(len(g), -1)).reshape(
      kernel.shape
    ),
    default=product,
  )
  return x_gradient, gradient.astype(kernel.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(
  table_VD: jax.Array,
  tokens: jax.Array,
  dtype: jnp.dtype,
  reduce_dtype: jnp.dtype,
) -> jax.Array:
  rows = jnp.take(table_VD.astype(dtype), tokens, axis=0)
  return rows.astype(reduce_dtype)


def _look_up_forward(
  table_VD: jax.Array, tokens: jax.Array, *dtypes: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _look_up(table_VD, tokens, *dtypes), (table_VD, tokens)


def _look_up_backward(
  dtype: jnp.dtype,
  reduce_dtype: jnp.dtype,
  residuals: tuple[jax.Array, jax.Array],
  g: jax.Array,
) -> tuple[jax.Array, None]:
  table_VD, tokens = residuals

  def add(tokens: jax.Array, g: jax.Array) -> jax.Array:
    return jnp.zeros(table_VD.shape, reduce_dtype).at[tokens].add(g)

  def add_on_gpu(tokens: jax.Array, g: jax.Array) -> jax.Array:
    return add_by_shard(tokens, g, len(table_VD)).astype(reduce_dtype)

  gradient_VD = jax.lax.platform_dependent(
    tokens, g, default=add, cuda=add_on_gpu, rocm=add_on_gpu
  )
  if dtype != table_VD.dtype:
    # Else XLA adds to the gradient of a tied head, which it gathers for that.
    gradient_VD = jax.lax.optimization_barrier(gradient_VD)
  return gradient_VD.astype(table_VD.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def add_by_shard(
  tokens_BT: jax.Array, x_BTD: jax.Array, num_rows: int
) -> jax.Array:
  """Returns the same as :func:`add_in_any_order` for sequences on a mesh.

  Devices add up their own, and then send the sum and not its digits. Without
  an axis of sequences, as positions are, all add up the same.
  """
  shards = math.gcd(math.prod(tokens_BT.shape[:-1]), num_shards())
  add = functools.partial(add_in_any_order, num_rows=num_rows)
  sums_SVD = jax.vmap(add)(
    tokens_BT.reshape(shards, -1), x_BTD.reshape(shards, -1, x_BTD.shape[-1])
  )
  return sums_SVD.sum(0)


def add_in_any_order(
  tokens_N: jax.Array, x_ND: jax.Array, num_rows: int
) -> jax.Array:
  """Returns the sums of each token's numbers, float32, (num_rows, D).

  Their bits do not depend on the order of the addition: numbers are cut into
  digits, integers of so few bits that sums of them are exact.
  """
  # Of 31 bits, what the largest sum needs is left.
  bits = 31 - (len(tokens_N) - 1).bit_length()
  rest_ND = x_ND.astype(jnp.float32)
  largest_D = jnp.max(jnp.abs(rest_ND), axis=0)
  _, exponent_D = jnp.frexp(largest_D)
  power_D = jnp.ldexp(jnp.float32(1), jnp.clip(exponent_D, -120, 127))
  rest_ND /= power_D
  zeros_VD = jnp.zeros([num_rows, len(largest_D)], jnp.int32)
  total_VD = jnp.zeros(zeros_VD.shape)
  for i in range(1, 1 + _DIGITS):
    unit = 2.0 ** (1 - bits * i)
    digit_ND = jnp.round(rest_ND / unit)
    rest_ND -= digit_ND * unit
    sum_VD = zeros_VD.at[tokens_N].add(digit_ND.astype(jnp.int32))
    total_VD += sum_VD * unit
  # Integers are always finite.
  return total_VD * jnp.where(jnp.isfinite(largest_D), power_D, jnp.nan)
