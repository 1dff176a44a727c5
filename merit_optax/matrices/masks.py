"""Masks: which parameters are decayed, and which are scaled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from merit_optax._internal.trees import (
  MISSING,
  is_function,
  nearest_entries,
  path_namer,
)


def as_function(name: str, mask: Any) -> Callable[[Any], Any]:
  """Returns a mask as a function from parameters to a tree like them.

  Args:
    name: Name of the argument, for the message.
    mask: Tree of booleans with the names of the parameters, or a prefix of it;
      or a function from parameters to one.

  Returns:
    A function that raises ``ValueError`` if the mask holds anything else, does
    not fit the parameters, or is itself a boolean, as a function is that
    ``optax.inject_hyperparams`` took for a schedule.
  """

  def check(params: Any) -> Any:
    resolved = mask(params) if is_function(mask, params) else mask
    leaves = jax.tree.leaves(resolved)
    if _is_boolean(mask) or not all(map(_is_boolean, leaves)):
      raise ValueError(
        f'{name} must be a tree of booleans like the parameters, one for each '
        'or for all of a branch, or a function from parameters to one, got '
        f'{resolved!r}. Under optax.inject_hyperparams, which calls functions '
        f'with the step count, name {name!r} in static_args.'
      )
    return _broadcast_prefix(name, resolved, params)

  return check


def broadcast_mask(name: str, mask: Any, params: Any) -> Any:
  """Returns a mask as a tree of the structure of the parameters."""
  if mask is None:
    return jax.tree.map(lambda _: True, params)
  return as_function(name, mask)(params)


def _broadcast_prefix(name: str, prefix: Any, params: Any) -> Any:
  """Returns a prefix tree in the structure of the parameters.

  Raises ``ValueError`` if it is no prefix of them.
  """
  entries, unused = nearest_entries(prefix, params)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  name_of = path_namer(params)
  missing = [
    name_of(path)
    for (path, _), entry in zip(leaves, entries, strict=True)
    if entry is MISSING
  ]
  if missing or unused:
    raise ValueError(
      f'{name} must be a tree like params or a prefix of it, by the names of '
      f'its entries: missing are {missing}, too many {unused}.'
    )
  return jax.tree.unflatten(jax.tree.structure(params), entries)


def _is_boolean(x: Any) -> bool:
  is_array = isinstance(x, (jax.Array, np.ndarray))
  return isinstance(x, (bool, np.bool_)) or (
    is_array and x.dtype == jnp.bool_ and x.shape == ()
  )
