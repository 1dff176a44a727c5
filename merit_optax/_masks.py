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
    itself a boolean. That is what becomes of a function that
    ``optax.inject_hyperparams`` took for a schedule.
  """

  def check(params: Any) -> Any:
    resolved = mask(params) if callable(mask) else mask
    if _is_boolean(mask) or not all(
      map(_is_boolean, jax.tree.leaves(resolved))
    ):
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
  return broadcast_prefix(name, resolved, params)


def broadcast_prefix(
  name: str,
  prefix: Any,
  params: Any,
  is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
  """Returns a prefix tree in the structure of the parameters.

  Args:
    name: Name of the argument, for the message.
    prefix: Tree whose leaves stand for all parameters below them.
    params: Tree of parameters.
    is_leaf: What is a leaf of the prefix, though it looks like a tree.

  Raises:
    ValueError: If it is no prefix of the parameters.
  """
  try:
    return jax.tree.map(
      lambda entry, part: jax.tree.map(lambda _: entry, part),
      prefix,
      params,
      is_leaf=is_leaf,
    )
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'{name} must be a tree like params or a prefix of it: {error}'
    ) from None


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
