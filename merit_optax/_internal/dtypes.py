"""dtypes of arithmetic and of moments."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

# A moment that should lose less than half a unit in its last place would round
# back to its old value. (Units of the dtype's eps.)
_LEAST_LOSS = 0.5


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


def moment_dtype(
  name: str, dtype: jax.typing.DTypeLike | None
) -> jnp.dtype | None:
  """Returns the dtype of a moment, checked to be a floating one."""
  if dtype is None:
    return None
  try:
    canonical = jax.dtypes.canonicalize_dtype(dtype)
  except TypeError:
    canonical = None
  is_real = canonical is not None and jnp.issubdtype(canonical, jnp.floating)
  if not is_real or jnp.finfo(canonical).bits < 16:
    raise ValueError(
      f'{name} must be None or a real floating-point dtype of 16 bits or more, '
      f'got {dtype!r}. Under optax.inject_hyperparams, which calls types with '
      f'the step count, name {name!r} in static_args.'
    )
  return canonical


def check_decay(
  name: str,
  rate: jax.typing.ArrayLike,
  dtype: jnp.dtype | None,
  params: optax.Params = (),
) -> None:
  """Raises ``ValueError`` if a moment of the parameters would never decay.

  Args:
    name: Name of the decay rate, for the message.
    rate: The decay rate.
    dtype: dtype of the moment, ``None`` for that of each parameter.
    params: Tree of arrays.
  """
  if isinstance(rate, jax.core.Tracer):
    return
  dtypes = _dtypes(params) if dtype is None else {dtype}
  for found in dtypes:
    least = _LEAST_LOSS * float(jnp.finfo(found).eps)
    # Less a little, since a rate in float32 may have been rounded up.
    if 1 - float(jax.device_get(rate)) < 0.999 * least:
      raise ValueError(
        f'{name} must be at most {1 - least:.8g} for a moment in {found} (it '
        'would round back to its old value and never decay; mu_dtype and '
        f'nu_dtype say how moments are stored), got {rate!r}.'
      )


def check_real(
  name: str, dtype: jnp.dtype | None, params: optax.Params
) -> None:
  """Raises ``ValueError`` if a real dtype is given for complex parameters."""
  is_complex = any(
    jnp.issubdtype(x, jnp.complexfloating) for x in _dtypes(params)
  )
  if dtype is not None and is_complex:
    raise ValueError(
      f'{name} must be None for complex parameters, got {dtype}.'
    )


def _dtypes(params: optax.Params) -> set[jnp.dtype]:
  return {x.dtype for x in jax.tree.leaves(params)}


def corrected(moment: Any, decay: Any, count: jax.Array) -> Any:
  """Returns a tree of moments corrected for their start at zero."""
  # optax promotes the count implicitly.
  with jax.numpy_dtype_promotion('standard'):
    return optax.tree.bias_correction(moment, decay, count)


def cast_to_both(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns an array in the dtype to which those of two others promote."""
  return x.astype(common_dtype(a, b))
