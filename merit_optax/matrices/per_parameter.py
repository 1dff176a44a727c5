"""Stateless transforms that see the matrices of each parameter."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from merit_optax._internal.trees import as_arrays, with_update
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
  check_params,
  matrix_axes,
)

NO_PARAMS_MESSAGE = (
  'You are using a transformation that requires the current value of '
  'parameters, but you are not passing `params` when calling `update`.'
)


def per_parameter(
  change: Callable[[jax.Array, jax.Array, MatrixAxes], jax.Array],
  weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
  """Returns the transform that changes the update of each parameter.

  Args:
    change: Function from update, parameter and axes of its matrices to an
      update.
    weight_dimension_numbers: As the user gave them.
  """

  def change_parts(
    update: jax.Array, param: jax.Array, axes: MatrixAxes
  ) -> jax.Array:
    parts = zip(axes.split(update), axes.split(param), strict=True)
    return axes.join([change(u, p, axes.single) for u, p in parts])

  # Parameters of equal shape are traced, lowered and called as one function.
  change_traced = jax.jit(change_parts, static_argnums=2)

  def init_fn(params: optax.Params) -> optax.EmptyState:
    check_params(weight_dimension_numbers, as_arrays(params))
    return optax.EmptyState()

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    updates, params, axes = match_to_params(
      updates, params, weight_dimension_numbers
    )
    # Eagerly it would be compiled anew for each transform, of which
    # optax.inject_hyperparams makes one in each step.
    leaves = jax.tree.leaves((updates, params))
    is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    apply = change_traced if is_traced else change_parts
    return jax.tree.map(apply, updates, params, axes), state

  return optax.GradientTransformation(init_fn, update_fn)


def match_to_params(
  updates: optax.Updates,
  params: optax.Params | None,
  weight_dimension_numbers: WeightDimensionNumbers,
) -> tuple[Any, Any, Any]:
  """Returns updates, their parameters, and the axes of the matrices of each.

  Raises:
    ValueError: If there are no parameters, or if an update, its parameter and
      its spec do not fit together.
  """
  if params is None:
    raise ValueError(NO_PARAMS_MESSAGE)
  updates = as_arrays(updates, 'updates')
  params = with_update(params, updates)
  return updates, params, matrix_axes(weight_dimension_numbers, params)


def per_update(
  change: Callable[[jax.Array, MatrixAxes], jax.Array],
  weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
  """Returns the transform that changes each update without its parameter.

  Args:
    change: Function from update and axes of its matrices to an update.
    weight_dimension_numbers: As the user gave them.
  """
  transform = per_parameter(
    lambda update, _, axes: change(update, axes), weight_dimension_numbers
  )

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params
    if jax.tree.leaves(updates):
      updates, _ = transform.update(updates, state, updates)
    return updates, state

  return optax.GradientTransformation(transform.init, update_fn)
