"""Repairs of compilers, each with its reason and until when."""

from typing import Any

import jax
import jax.numpy as jnp

from merit_optax._internal.dtypes import widen


def largest_magnitude(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
  """Returns max |x| of real numbers along some axes, which stay with size 1.

  XLA on CPU stores |x| before it takes the maximum (jax 0.10 to 0.12), so there
  it is the larger of the maximum and minus the minimum. Elsewhere that would
  double what devices exchange.
  """
  options: Any = {'axis': axis, 'keepdims': True, 'initial': 0}

  def on_cpu(x: jax.Array) -> jax.Array:
    # Of bfloat16, both together are wrong with jax 0.12.
    wide = widen(x)
    largest = jnp.maximum(jnp.max(wide, **options), -jnp.min(wide, **options))
    return largest.astype(x.dtype)

  def by_default(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), **options)

  largest: jax.Array = jax.lax.platform_dependent(
    x, cpu=on_cpu, default=by_default
  )
  return largest
