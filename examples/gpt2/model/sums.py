"""Layers that say in which dtype and order their gradients are summed.

The gradient of a parameter is a sum over tokens and devices. Flax's layers make
one in the dtype of the activations: each device rounds its part to bfloat16,
and devices add those; the gradient of an embedding is added up token by token,
of which a common one has thousands. Here the sum is float32, as it is by
default in Megatron-LM and torchtitan, or bfloat16, which sends half the bytes.

GPUs add the gradient of an embedding up with atomic operations, in the order in
which threads arrive. Here it is a reproducible sum: its bits do not depend on
the order.

Axes: S shards of the batch, B sequences, T positions, N tokens of all sequences
or of a shard, D features, V rows of an embedding.
"""

import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from examples.gpt2.devices.sharding import num_current_batch_shards


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

  on_gpu = functools.partial(
    add_by_shard, num_rows=len(table_VD), dtype=reduce_dtype
  )
  gradient_VD = jax.lax.platform_dependent(
    tokens, g, default=add, cuda=on_gpu, rocm=on_gpu
  )
  if dtype != table_VD.dtype:
    # Else XLA adds to the gradient of a tied head, which it gathers for that.
    gradient_VD = jax.lax.optimization_barrier(gradient_VD)
  return gradient_VD.astype(table_VD.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def add_by_shard(
  tokens_BT: jax.Array, x_BTD: jax.Array, num_rows: int, dtype: jnp.dtype
) -> jax.Array:
  """Returns the same as :func:`add_in_any_order` for sequences on a mesh.

  Each device adds up its own tokens; what devices then add and send are these
  sums, in ``dtype``. Positions have no axis of sequences: every device computes
  the same sum.
  """
  shards = math.gcd(math.prod(tokens_BT.shape[:-1]), num_current_batch_shards())
  add = functools.partial(add_in_any_order, num_rows=num_rows)
  sums_SVD = jax.vmap(add)(
    tokens_BT.reshape(shards, -1), x_BTD.reshape(shards, -1, x_BTD.shape[-1])
  )
  # Unlike jnp.sum, in the dtype itself.
  return jax.lax.reduce_sum(sums_SVD.astype(dtype), axes=(0,))


def add_in_any_order(
  tokens_N: jax.Array, x_ND: jax.Array, num_rows: int
) -> jax.Array:
  """Returns the sums of each token's numbers, float32, (num_rows, D).

  Their bits do not depend on the order of the addition: numbers are cut into
  digits, which are integers (fixed point) of so few bits that sums of them are
  exact. What is lost of each number is at most 2**-25 of the largest magnitude
  of its feature, or of 2**-90 if that is less (2**-33 with up to 2**14 tokens).
  Where the magnitude is infinite, not a number or 2**126 and more, all sums of
  the feature are not a number.
  """
  # Of 31 bits, what the largest sum leaves. Two digits do for 2**18 tokens.
  bits = min(17, 31 - (len(tokens_N) - 1).bit_length())
  rest_ND = x_ND.astype(jnp.float32)
  largest_D = jnp.max(jnp.abs(rest_ND), axis=0)
  _, exponent_D = jnp.frexp(largest_D)
  power_D = jnp.ldexp(jnp.float32(1), jnp.clip(exponent_D, -90, 126))
  # Powers are such that products of them, which XLA may compute first, do not
  # vanish.
  rest_ND /= power_D
  total_VD = jnp.zeros([num_rows, len(largest_D)])
  for i in range(1, 1 + math.ceil(26 / bits)):
    unit = 2.0 ** (1 - bits * i)
    digit_ND = jnp.round(rest_ND / unit)
    rest_ND -= digit_ND * unit
    integers_ND = digit_ND.astype(jnp.int32)
    total_VD += unit * jax.ops.segment_sum(integers_ND, tokens_N, num_rows)
  # Integers are always finite.
  is_in_range_D = largest_D < 2.0**126
  return total_VD * jnp.where(is_in_range_D, power_D, jnp.nan)
