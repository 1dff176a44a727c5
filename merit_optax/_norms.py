"""Norms of matrices, of their rows and of their columns, and their ratios."""

from collections.abc import Callable, Collection, Iterable, Mapping
import functools
import math
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from merit_optax._dimension_numbers import MatrixAxes

# Norms along some axes, which stay with size 1, so that any sharding of the
# array passes through.
Norm: TypeAlias = Callable[[jax.Array, tuple[int, ...]], jax.Array]
RATIOS = ('weight', 'row', 'column')


# Inlined, it leaves the program as it is, and equal shapes are traced once: of
# 200 matrices, in a third of the time.
@functools.partial(jax.jit, static_argnames='axis', inline=True)
def max_norm(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
  """Returns the largest magnitudes along some axes, which stay with size 1."""
  if not jnp.issubdtype(x.dtype, jnp.floating):  # Complex numbers, integers.
    x = jnp.abs(widen(x))

  def on_cpu(largest: jax.Array, x: jax.Array) -> jax.Array:
    # As with_nan, but XLA reads what it sums up in place, and would store a
    # test of each number. Finite numbers whose sum may be NaN, because they
    # overflow in both directions, are taken for numbers.
    total = jnp.sum(x, axis, common_dtype(x, jnp.float32), keepdims=True)
    count = math.prod(x.shape[a] for a in axis)
    limit = float(jnp.finfo(total.dtype).max) / max(count, 1)
    may_overflow = (largest.astype(total.dtype) > limit) & (largest < jnp.inf)
    return jnp.where(jnp.isnan(total) & ~may_overflow, jnp.nan, largest)

  return _only_on_cpu(on_cpu, _largest(x, axis), x)


def _largest(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
  """Returns the largest magnitudes of real numbers, on CPU less NaN."""
  options: Any = {'axis': axis, 'keepdims': True, 'initial': 0}

  def on_cpu(x: jax.Array) -> jax.Array:
    # XLA on CPU would store |x|. Elsewhere this would double what devices
    # exchange. Of bfloat16, both together are wrong with jax 0.12.
    wide = widen(x)
    largest = jnp.maximum(jnp.max(wide, **options), -jnp.min(wide, **options))
    return largest.astype(x.dtype)

  def by_default(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), **options)

  largest: jax.Array = jax.lax.platform_dependent(
    x, cpu=on_cpu, default=by_default
  )
  return largest


def with_nan(
  extreme: jax.Array, x: jax.Array, axis: int | tuple[int, ...] | None = None
) -> jax.Array:
  """Returns maxima or minima along some axes, NaN where a number is NaN.

  XLA on CPU drops NaN from those of 4,096 numbers or more (jax 0.10 to 0.12).
  Elsewhere nothing is computed.

  Args:
    extreme: Maxima or minima; their axes may stay with size 1.
    x: Numbers of which they are.
    axis: Axes along which they are, ``None`` for all.
  """

  def on_cpu(extreme: jax.Array, x: jax.Array) -> jax.Array:
    is_nan = jnp.isnan(x).any(axis, keepdims=extreme.ndim == x.ndim)
    return jnp.where(is_nan, jnp.nan, extreme)

  return _only_on_cpu(on_cpu, extreme, x)


def _only_on_cpu(
  change: Callable[[jax.Array, jax.Array], jax.Array],
  extreme: jax.Array,
  x: jax.Array,
) -> jax.Array:
  changed: jax.Array = jax.lax.platform_dependent(
    extreme, x, cpu=change, default=lambda extreme, x: extreme
  )
  return changed


def l2_norm(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
  """Returns the Euclidean norms along some axes, which stay with size 1.

  Numbers below 1e-32, in float32, lose digits and at last count as zeros.
  As long as an axis has at most 2**22 elements, none of them above 1e33 in
  float32, their bits do not depend on the order in which devices add them up.
  """
  x = widen(x)
  if jnp.iscomplexobj(x):
    x = _norm_along(jnp.stack([x.real, x.imag]), 0)[0]
  for a in sorted(axis, reverse=True):
    x = _norm_along(x, a)
  return x if axis else jnp.abs(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _norm_along(x: jax.Array, axis: int) -> jax.Array:
  """Returns Euclidean norms of real numbers along an axis.

  The squares are cut into digits, integers of so few bits that any sum of them
  is exact. Before, numbers are divided by a power of two, to magnitudes of at
  most 3/4. There are as many digits as a square of the norm's size has bits.
  Very small and very large numbers are first brought to a moderate size.
  """
  limits = jnp.finfo(x.dtype)
  carries = max(x.shape[axis] - 1, 1).bit_length()
  # An even number, so that a digit is half as many bits before squaring.
  bits = max(2, (1 + limits.nmant - carries) // 2 * 2)
  # A NaN is in the digits anyway.
  largest = _largest(x, (axis,))
  # The squares of all factors have to be in range, because XLA may multiply
  # those of a constant first.
  limit = 2.0 ** (limits.maxexp // 2 - 10)
  boost = jnp.where(largest > limit**0.75, 1 / limit, 1.0)
  boost = jnp.where(largest < limit**-0.75, limit, boost).astype(x.dtype)
  # Without a mantissa, it is rounded to the nearest power of two.
  power = jax.lax.reduce_precision(
    largest * boost / 4, limits.nexp, mantissa_bits=0
  )
  power = jnp.clip(power, 1 / limit, limit)
  square = jnp.zeros_like(largest)
  for i in reversed(range(math.ceil((limits.nmant + 3 + carries) / bits))):
    # Each digit is computed from x, or XLA on CPU would store what they share.
    root = x * (boost * 2.0 ** (i * bits // 2 - 3)) * (1 / power)
    scaled = root * root
    digit = jnp.floor(scaled * 2.0**bits)
    if i > 0:
      digit = digit - jnp.floor(scaled) * 2.0**bits
    digit_sum = jnp.sum(digit, axis, keepdims=True)
    square = square + digit_sum * 2.0 ** (-bits * (i + 1))
  norm = jnp.sqrt(square) * 8 * power * (1 / boost)
  # The digits of an infinite one are no numbers. Not a number stays that.
  return jnp.where(largest < jnp.inf, norm, largest)


@_norm_along.defjvp
def _norm_along_jvp(
  axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  (x,), (tangent,) = primals, tangents
  norm = _norm_along(x, axis)
  # The root has no gradient at zero, nor may there be an infinite one from what
  # comes after it.
  is_zero = norm == 0
  change = jnp.where(is_zero, 0, x / jnp.where(is_zero, 1, norm) * tangent)
  return norm, jnp.sum(change, axis=axis, keepdims=True)


NORMS: Mapping[str, Norm] = MappingProxyType({'max': max_norm, 'l2': l2_norm})


def widen(x: jax.typing.ArrayLike) -> jax.Array:
  """Returns an array in float32, or in its own dtype if that is wider."""
  # Without a dtype first, as NumPy's 64 bits may not be enabled in JAX.
  x = jnp.asarray(x)
  return x.astype(common_dtype(x.dtype, jnp.float32))


def common_dtype(*values: Any) -> jnp.dtype:
  """Returns the dtype to which arrays or dtypes promote."""
  # Where users forbid implicit promotions, this one is still explicit.
  with jax.numpy_dtype_promotion('standard'):
    return functools.reduce(jnp.promote_types, map(jnp.result_type, values))


def matrix_norms(x: jax.Array, axes: MatrixAxes, norm: Norm) -> jax.Array:
  """Returns the norm of each matrix, in float32 or wider."""
  return _norms(x, axes, norm, 0, ())['weight']


def trust_ratios(
  update: jax.Array,
  param: jax.Array,
  axes: MatrixAxes,
  ratios: Collection[str] = RATIOS,
  min_norm: jax.typing.ArrayLike = 0.0,
  trust_coefficient: jax.typing.ArrayLike = 1.0,
  eps: jax.typing.ArrayLike = 0.0,
  norm: Norm = max_norm,
) -> dict[str, jax.Array]:
  """Returns the trust ratios of a parameter by their names.

  Each has float32 or a wider dtype, broadcasts to the parameter's shape, and is
  infinite where one of its norms is zero; all others are finite if the norms
  are.

  Args:
    update: Update, of any shape.
    param: Parameter of that shape.
    axes: Axes of the parameter's matrices.
    ratios: Names of the ratios wanted, if the parameter has matrices.
    min_norm: Lower bound of every norm.
    trust_coefficient: Multiplier of the ratios.
    eps: Added to the norm of the update.
    norm: The norm.
  """
  names = ratios if axes.rows else ('weight',)
  param_norms = _norms(param, axes, norm, min_norm, names)
  update_norms = _norms(update, axes, norm, min_norm, names)
  return {
    name: ratio(
      jnp.multiply(trust_coefficient, param_norms[name]),
      update_norms[name],
      eps,
    )
    for name in names
  }


def largest_ratio(
  ratios: Iterable[jax.Array], without_norm: jax.typing.ArrayLike = 1
) -> jax.Array:
  """Returns the largest of the ratios.

  An infinite one has a norm that is zero. Where that is the update's, there is
  nothing to multiply, and any ratio will do: ``without_norm``.
  """
  ratio = functools.reduce(jnp.maximum, ratios)
  return jnp.where(ratio == jnp.inf, without_norm, ratio)


def ratio(
  param_norm: jax.Array,
  update_norm: jax.Array,
  eps: jax.typing.ArrayLike = 0.0,
) -> jax.Array:
  """Returns the ratio of two norms, infinite where one of them is zero."""
  limits = jnp.finfo(update_norm.dtype)
  # Subnormal norms count as zero, since most hardware flushes them.
  vanished = (param_norm < limits.tiny) | (update_norm < limits.tiny)
  # An infinite ratio would turn the zeros of the update into NaN, so quotients
  # that overflow are bounded by 1 / tiny.
  least = jnp.maximum(update_norm + eps, param_norm * limits.tiny)
  # The division comes last: XLA does it once for each norm, and what comes
  # after it, once for each element.
  return jnp.where(
    vanished, jnp.inf, jnp.minimum(param_norm, limits.max)
  ) / jnp.where(vanished, 1, least)


def _norms(
  x: jax.Array,
  axes: MatrixAxes,
  norm: Norm,
  min_norm: jax.typing.ArrayLike,
  names: Collection[str],
) -> dict[str, jax.Array]:
  """Returns the norms of each matrix, its rows and, if named, its columns."""
  row = norm(x, axes.columns)
  # A matrix has the norm of the norms of its rows, as both norms allow.
  norms = {'weight': norm(row, axes.rows), 'row': row}
  if 'column' in names:
    norms['column'] = norm(x, axes.rows)
  return {
    name: jnp.maximum(widen(value), min_norm) for name, value in norms.items()
  }
