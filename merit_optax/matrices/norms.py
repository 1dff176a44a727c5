"""Norms of matrices, of their rows and of their columns, and their ratios."""

from collections.abc import Callable, Collection, Mapping
import functools
from types import MappingProxyType
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from merit_optax._internal.dtypes import widen
from merit_optax.matrices.dimension_numbers import MatrixAxes

# Norms along some axes, which stay with size 1, so that any sharding of the
# array passes through.
Norm: TypeAlias = Callable[[jax.Array, tuple[int, ...]], jax.Array]
Ratio: TypeAlias = Literal['weight', 'row', 'column']
RATIOS: tuple[Ratio, ...] = ('weight', 'row', 'column')


# Inlined, it leaves the program as it is, and equal shapes are traced once: of
# 200 matrices, in a third of the time.
@functools.partial(jax.jit, static_argnames='axis', inline=True)
def max_norm(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
  """Returns the largest magnitudes along some axes, which stay with size 1."""
  if not jnp.issubdtype(x.dtype, jnp.floating):  # Complex numbers, integers.
    x = widen(x)
  return jnp.max(jnp.abs(x), axis, keepdims=True, initial=0)


def l2_norm(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
  """Returns the Euclidean norms along some axes, which stay with size 1.

  A norm whose square is subnormal counts as zero: one below 1.1e-19 in float32,
  where a norm above 1.8e19 is infinite.
  """
  x = widen(x)
  if not axis:
    return jnp.abs(x)
  square = jnp.sum(jnp.real(x * jnp.conj(x)), axis, keepdims=True)
  is_zero = square < jnp.finfo(square.dtype).tiny
  # The root has no gradient at zero.
  return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, square)))


NORMS: Mapping[str, Norm] = MappingProxyType({'max': max_norm, 'l2': l2_norm})


def matrix_norms(x: jax.Array, axes: MatrixAxes, norm: Norm) -> jax.Array:
  """Returns the norm of each matrix, in float32 or wider."""
  return norms_by_name(x, axes, norm, ())['weight']


def norms_by_name(
  x: jax.Array, axes: MatrixAxes, norm: Norm, names: Collection[str]
) -> dict[str, jax.Array]:
  """Returns the norms of each matrix, its rows and, if named, its columns."""
  row = norm(x, axes.columns)
  # The maximum of the rows' maxima is the matrix's. An l2 norm of the rows'
  # would miss those that count as zero.
  weight = (
    norm(row, axes.rows)
    if norm is max_norm
    else norm(x, axes.rows + axes.columns)
  )
  norms = {'weight': weight, 'row': row}
  if 'column' in names:
    norms['column'] = norm(x, axes.rows)
  return {name: widen(value) for name, value in norms.items()}
