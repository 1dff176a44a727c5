"""Masks: which parameters are decayed, and which are scaled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from merit_optax._dimension_numbers import matrix_axes


def checked(name: str, mask: Any) -> Callable[[Any], Any]:
  """Returns a mask as a function from parameters to a tree of booleans.

  Args:
    name: Name of the argument, for the message.
    mask: Tree of booleans, or a function from parameters to one.

  Returns:
    A function that raises ``ValueError`` if the mask holds anything else, or is
    one boolean for several parameters. That is what becomes of a function that
    ``optax.inject_hyperparams`` took for a schedule.
  """

  def check(params: Any) -> Any:
    resolved = mask(params) if callable(mask) else mask
    is_one_for_all = _is_boolean(mask) and len(jax.tree.leaves(params)) > 1
    if is_one_for_all or not all(map(_is_boolean, jax.tree.leaves(resolved))):
      raise ValueError(
        f'{name} must be a tree of booleans like the parameters, or a function '
        f'from parameters to one, got {resolved!r}. Under '
        'optax.inject_hyperparams, which calls functions with the step count, '
        f'name {name!r} in static_args.'
      )
    return resolved

  return check


def broadcast_mask(name: str, mask: Any, params: Any) -> Any:
  """Returns a mask as a tree of the structure of the parameters."""
  resolved = True if mask is None else checked(name, mask)(params)
  return jax.tree.map(
    lambda keep, part: jax.tree.map(lambda _: keep, part), resolved, params
  )


def scaled_axes(
  dimension_numbers: Any, trust_ratio_mask: Any, params: Any
) -> Any:
  """Returns the axes of each parameter's matrices, None where masked out.

  As in the optimizer, a parameter without trust ratios needs no spec.
  """
  kept = jax.tree.map(
    lambda param, keep: param if keep else None,
    params,
    broadcast_mask('trust_ratio_mask', trust_ratio_mask, params),
  )
  return matrix_axes(dimension_numbers, kept)


def _is_boolean(x: Any) -> bool:
  is_array = isinstance(x, jax.Array) and x.dtype == jnp.bool_
  return isinstance(x, (bool, np.bool_)) or is_array
