"""Moments of gradients: their dtypes, and whether they decay in them."""

import jax
import jax.numpy as jnp
import optax

# A moment that should lose less than half a unit in its last place would round
# back to its old value. (Units of the dtype's eps.)
_LEAST_LOSS = 0.5


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


def inexact_dtypes(params: optax.Params) -> set[jnp.dtype]:
  """Returns the dtypes of the parameters that have moments."""
  # Placeholders of optax.tree.map_params have no dtype.
  dtypes = {x.dtype for x in jax.tree.leaves(params) if hasattr(x, 'dtype')}
  return {x for x in dtypes if jnp.issubdtype(x, jnp.inexact)}


def check_decays(
  name: str, rate: jax.typing.ArrayLike, dtypes: set[jnp.dtype]
) -> None:
  """Raises ``ValueError`` if a moment never decays in one of the dtypes."""
  if isinstance(rate, jax.core.Tracer):
    return
  for dtype in dtypes:
    least = _LEAST_LOSS * float(jnp.finfo(dtype).eps)
    # Less a little, since a rate in float32 may have been rounded up.
    if 1 - float(jax.device_get(rate)) < 0.999 * least:
      raise ValueError(
        f'{name} must be at most {1 - least:.8g} for a moment in {dtype} (it '
        'would round back to its old value and never decay; mu_dtype and '
        f'nu_dtype say how moments are stored), got {rate!r}.'
      )


def cast_like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Returns an array in the dtype of another."""
  return x.astype(like.dtype)


def cast_to_both(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns an array in the dtype to which those of two others promote."""
  return x.astype(jnp.promote_types(a.dtype, b.dtype))
