"""How far an update moves each parameter, for any optimizer."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal.dtypes import widen
from merit_optax._internal.trees import (
  named_leaves,
  numbers_as_arrays,
)
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
  matrix_axes,
)
from merit_optax.matrices.norms import l2_norm, max_norm


def update_statistics(
  updates: optax.Updates,
  params: optax.Params,
  *,
  weight_dimension_numbers: WeightDimensionNumbers = None,
) -> dict[str, jax.Array]:
  r"""Measures how far the updates of any optimizer move each parameter.

  Args:
    updates: Tree of updates, as returned by ``optimizer.update``.
    params: Tree of the corresponding parameters, before the step.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`.

  Returns:
    A flat dictionary of float32 scalars. Keys are the path of a parameter, a
    slash, and one of the following (parameters without elements have none):

    - ``update_to_weight``: :math:`\max |\Delta w| / \max |w|`, the largest
      float32 if a parameter that is zero moves;
    - ``l2_update_to_weight``: :math:`\|\Delta w\|_2 / \|w\|_2`, likewise;
    - each of the two with ``_min`` and ``_max``: the smallest and the largest
      among the matrices of a stack;
    - ``unmoved_rows``: share of the rows (a vector is one) that the step leaves
      unchanged, because their update is zero or too small for the dtype of the
      parameter;
    - ``not_finite``: share of elements of the update that are NaN or infinite.

  Raises:
    ValueError: If the trees differ in the number or the shapes of their arrays,
      or have some of their names in other places, if two paths are the same
      when written with slashes, or if a spec does not fit its parameter.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {'w': jnp.array([[4.0, 2.0], [1.0, 0.5]])}
    >>> updates = {'w': jnp.array([[1.0, 0.0], [0.0, 0.0]])}
    >>> measured = merit_optax.update_statistics(updates, params)
    >>> print(measured['w/update_to_weight'], measured['w/unmoved_rows'])
    0.25 0.5
  """
  params = numbers_as_arrays(params)
  updates = align(updates, params)
  axes = matrix_axes(weight_dimension_numbers, params)
  return by_name(_leaf_statistics, params, updates, axes)


def update_to_weight(size: jax.Array, param_size: jax.Array) -> jax.Array:
  """Returns the ratio of two sizes, the largest float if zeros move."""
  limits = jnp.finfo(size.dtype)
  # No division by zero, which jax_debug_nans and jax_debug_infs would report.
  is_zero = param_size < limits.tiny
  ratio = size / jnp.where(is_zero, 1, param_size)
  return jnp.where(is_zero & (size > 0), limits.max, ratio)


def by_name(
  measure: Callable[..., dict[str, jax.Array]], params: Any, *trees: Any
) -> dict[str, jax.Array]:
  """Returns the statistics of all parameters in one dictionary, as float32.

  Parameters without elements have none. Trees have the parameters' structure.
  """
  treedef: Any = jax.tree.structure(params)
  columns = (treedef.flatten_up_to(tree) for tree in trees)
  return {
    f'{name}/{key}': value.astype(jnp.float32)
    for (name, param), *rest in zip(named_leaves(params), *columns, strict=True)
    if param.size
    for key, value in measure(param, *rest).items()
  }


def align(tree: Any, params: Any) -> Any:
  """Returns the leaves of a tree in the structure of the parameters.

  Containers of other types may have the same names in another order. Raises
  ``ValueError`` if the trees do not fit.
  """
  found = dict(named_leaves(numbers_as_arrays(tree)))
  expected = dict(named_leaves(params))
  shape_of, expected_of = (
    {name: x.shape for name, x in leaves.items()}
    for leaves in (found, expected)
  )
  if shape_of != expected_of:
    differing = sorted({*shape_of.items()} ^ {*expected_of.items()})
    raise ValueError(
      'gradients or updates, state and params must belong together, with the '
      f'same names and shapes, got different ones: {differing}.'
    )
  leaves = [found[name] for name in expected]
  return jax.tree.unflatten(jax.tree.structure(params), leaves)


# Parameters of equal shape are traced and lowered once.
@functools.partial(jax.jit, static_argnames='axes')
def _leaf_statistics(
  param: jax.Array, update: jax.Array, axes: MatrixAxes
) -> dict[str, jax.Array]:
  """Returns the statistics of one parameter."""
  everywhere = tuple(range(param.ndim))
  result: dict[str, jax.Array] = {}
  for prefix, norm in (('', max_norm), ('l2_', l2_norm)):
    moves, sizes = (
      widen(norm(x, axes.rows + axes.columns)) for x in (update, param)
    )
    of_each = update_to_weight(moves, sizes)
    # The norm of the norms of all matrices is the norm of all elements.
    of_all = update_to_weight(norm(moves, everywhere), norm(sizes, everywhere))
    result |= {
      f'{prefix}update_to_weight': of_all.squeeze(),
      f'{prefix}update_to_weight_min': jnp.min(of_each),
      f'{prefix}update_to_weight_max': jnp.max(of_each),
    }
  moved = widen(param) + widen(update)
  stays = moved.astype(param.dtype) == param
  return result | {
    'unmoved_rows': jnp.mean(jnp.all(stays, axis=axes.columns)),
    'not_finite': jnp.mean(~jnp.isfinite(update)),
  }
