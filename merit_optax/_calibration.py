"""Ratios relative to those of the first step."""

from collections.abc import Callable
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from merit_optax._dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
  check_params,
  matrix_axes,
)
from merit_optax._joined import join, split
from merit_optax._leaves import as_arrays
from merit_optax._norms import Norm, ratio, trust_ratios, widen
from merit_optax._per_parameter import aligned

# By their names, each infinite where one of its norms is zero.
Ratios: TypeAlias = dict[str, jax.Array]
# An update has a direction of its own if it is not longer than this many times
# what is left of it without its part along the parameter.
_MOSTLY_DECAY = 100


class CalibrationState(NamedTuple):
  """First ratios of all parameters.

  Attributes:
    first_ratios: Shape (ratios,), dtype float32: those of each parameter after
      the other. Zero before the first step of a ratio, infinite if a parameter
      was zero then.
  """

  first_ratios: jax.Array


def scale_by_relative_ratios(
  ratios_of: Callable[[jax.Array, jax.Array, MatrixAxes], Ratios],
  scale: Callable[[jax.Array, jax.Array, Ratios], jax.Array],
  norm: Norm,
  weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
  """Returns the transform that scales by ratios relative to the first ones.

  Args:
    ratios_of: Function from update, parameter and axes of its matrices to
      ratios.
    scale: Function from update, parameter and relative ratios to an update.
    norm: The norm of the ratios.
    weight_dimension_numbers: As the user gave them.
  """

  def init_fn(params: optax.Params) -> CalibrationState:
    params = as_arrays(params)
    check_params(weight_dimension_numbers, params)
    # Placeholders of optax.tree.map_params have no leaves.
    if not jax.tree.leaves(params):
      return CalibrationState(join(()))
    axes = matrix_axes(weight_dimension_numbers, params)
    ratios = jax.eval_shape(
      lambda x: join(jax.tree.map(ratios_of, x, x, axes)), params
    )
    # A type may tell that a mesh splits parameters, which these are not.
    return CalibrationState(jnp.zeros(ratios.shape, jnp.float32))

  def update_fn(
    updates: optax.Updates,
    state: CalibrationState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, CalibrationState]:
    updates, params, axes = aligned(updates, params, weight_dimension_numbers)
    ratios = jax.tree.map(ratios_of, updates, params, axes)
    if not jax.tree.leaves(ratios):
      return updates, state
    first = jax.tree.map(
      functools.partial(_first_ratios, norm),
      updates,
      params,
      axes,
      ratios,
      split(state.first_ratios, ratios),
    )
    relative = jax.tree.map(_relative, ratios, first)
    return (
      jax.tree.map(scale, updates, params, relative),
      CalibrationState(join(first)),
    )

  return optax.GradientTransformation(init_fn, update_fn)


def _first_ratios(
  norm: Norm,
  update: jax.Array,
  param: jax.Array,
  axes: MatrixAxes,
  ratios: Ratios,
  before: Ratios,
) -> Ratios:
  """Returns the first ratios, given those known before this step."""

  def first(name: str) -> jax.Array:
    # What would be zero if the update were a multiple of the parameter. It is
    # NaN where something is not finite. (The ratios may have other norms.)
    plain = trust_ratios(update, param, axes, (name,), norm=norm)[name]
    rest = widen(update) - widen(param) / plain
    lengths = trust_ratios(rest, update, axes, (name,), norm=norm)[name]
    is_first = (before[name] == 0) & (lengths < _MOSTLY_DECAY)
    return jnp.where(is_first, ratios[name], before[name])

  return {name: first(name) for name in ratios}


def _relative(now: jax.Array, first: jax.Array) -> jax.Array:
  """Returns ratios relative to the first ones, where these say something."""
  is_known = (first > 0) & (first < jnp.inf)
  relative = ratio(now, jnp.where(is_known, first, 1))
  return jnp.where(is_known, jnp.where(now == jnp.inf, now, relative), 1)
