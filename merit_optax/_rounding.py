"""Roundings that no compiler leaves out."""

from typing import Any

import jax
import jax.numpy as jnp


def to_dtype(x: jax.Array, dtype: jnp.dtype | None) -> jax.Array:
  """Returns an array in some dtype, ``None`` for its own."""
  if dtype == jnp.bfloat16:
    # XLA may leave a conversion there and back out, in some programs.
    x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
  return x if dtype is None else x.astype(dtype)


@jax.custom_jvp
def rounded(x: jax.Array, count: jax.Array) -> jax.Array:
  """Returns an array as it is, rounded to its dtype.

  A compiler may compute a product and a sum at once (fused multiply-add), and
  whether it does so depends on what else it computes. It cannot if the bits of
  the product are asked for. Complex numbers are returned without it.

  Args:
    x: Array of floats.
    count: A number of steps, which is never negative. No compiler knows that.
  """
  if jnp.iscomplexobj(x):
    return x
  kind = jnp.dtype(f'int{8 * x.dtype.itemsize}')
  zero = jnp.minimum(count, 0).astype(kind)
  bits = jax.lax.bitcast_convert_type(x, kind) ^ zero
  return jax.lax.bitcast_convert_type(bits, x.dtype)


@rounded.defjvp
def _rounded_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]
) -> tuple[jax.Array, jax.Array]:
  # The derivative of what is done to the bits would be zero.
  return rounded(*primals), tangents[0]
