"""What may be a leaf of a tree of parameters."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax

from merit_optax._paths import path_namer


def as_arrays(tree: Any, argument: str = 'params') -> Any:
  """Returns parameters or updates, with numbers as arrays.

  Args:
    tree: The parameters or updates.
    argument: What errors call them.

  Raises:
    ValueError: If a leaf is neither an array of numbers (or its shape) nor a
      number, or has a floating-point dtype of fewer than 16 bits.
  """
  name = path_namer(tree)

  def checked(path: Any, x: Any) -> Any:
    is_array = hasattr(x, 'shape') and hasattr(x, 'dtype')
    # Random keys have a dtype of JAX's own.
    if not is_array or jnp.issubdtype(x.dtype, jax.dtypes.extended):
      raise ValueError(
        f'{argument} must hold arrays of numbers, got {x!r} as {name(path)!r}. '
        'Filter such leaves out first, of an Equinox model by '
        'eqx.filter(model, eqx.is_inexact_array).'
      )
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 2:
      raise ValueError(
        f'{argument} must have dtypes of 16 bits or more, got {x.dtype} for '
        f'{name(path)!r}. Use a copy in a wider dtype.'
      )
    return x

  return jax.tree_util.tree_map_with_path(checked, numbers_as_arrays(tree))


def numbers_as_arrays(tree: Any) -> Any:
  """Returns a tree with numbers as arrays, and other leaves as they are."""

  def as_array(x: Any) -> Any:
    if getattr(x, 'dtype', None) == jax.dtypes.float0:
      return jnp.zeros(x.shape)  # What JAX gives as gradients of integers.
    is_number = isinstance(x, numbers.Number)
    return jnp.asarray(x, jnp.result_type(x)) if is_number else x

  return jax.tree.map(as_array, tree)


def with_update(params: Any, updates: Any) -> Any:
  """Returns parameters as arrays, less those that have no update.

  A function that is a leaf of a model has none, for example.

  Args:
    params: The parameters.
    updates: Arrays, and what stands for those that are left out.

  Raises:
    ValueError: As ``as_arrays`` does, and if an update has another shape than
      its parameter.
  """
  params = as_arrays(
    jax.tree.map(
      lambda update, param: update if is_absent(update) else param,
      updates,
      params,
      is_leaf=is_absent,
    )
  )
  check_shapes(params, updates)
  return params


def check_shapes(params: Any, updates: Any) -> None:
  """Raises ``ValueError`` for an update of another shape than its parameter.

  Args:
    params: The parameters, or arrays of a state like them.
    updates: Arrays; other shapes would broadcast.
  """
  name = path_namer(params)

  def check(path: Any, param: Any, update: Any) -> None:
    if is_absent(update):
      raise ValueError(
        f'updates must hold an array for {name(path)!r}, which the state or '
        f'params have, got {update!r}.'
      )
    check_shape(name(path), param, update)

  jax.tree_util.tree_map_with_path(check, params, updates)


def check_shape(name: str, param: Any, update: Any) -> None:
  """Raises ``ValueError`` if an update has another shape than its parameter."""
  if jnp.shape(update) != param.shape:
    raise ValueError(
      f'updates must have the shapes of params, got {jnp.shape(update)} for '
      f'{name!r} of shape {param.shape}.'
    )


def is_absent(x: Any) -> bool:
  """Returns whether a parameter was left out, or masked out, of a tree."""
  return x is None or isinstance(x, optax.MaskedNode)


def has_absent(tree: Any) -> bool:
  """Returns whether parameters were left out, or masked out, of a tree."""
  return any(map(is_absent, jax.tree.leaves(tree, is_leaf=is_absent)))
