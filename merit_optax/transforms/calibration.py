"""OrScale's calibration: trust ratios relative to those of the first step."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal.dtypes import widen
from merit_optax._internal.sharding import sharded_as, unsplit
from merit_optax._internal.trees import as_arrays
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
  check_params,
  matrix_axes,
)
from merit_optax.matrices.norms import Norm, Ratio
from merit_optax.matrices.per_parameter import match_to_params
from merit_optax.transforms.trust_ratio import (
  Ratios,
  TrustRatioRule,
  ratio,
  trust_ratios,
)

# An update counts as weight decay alone if it is at least this many times as
# long as the part of it that does not point along the parameter.
_MOSTLY_DECAY = 100


class CalibrationState(NamedTuple):
  """First ratios of all parameters.

  Attributes:
    first_ratios: Shape (ratios,), dtype float32, one parameter after the
      other. Zero before the first step of a ratio, infinite if a parameter was
      zero then.
  """

  first_ratios: jax.Array


def calibrated(
  rule: TrustRatioRule,
  norm: Norm,
  weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
  """Returns the transform that scales by ratios relative to the first ones.

  Args:
    rule: The rule whose ratios are calibrated.
    norm: The norm of its ratios.
    weight_dimension_numbers: As the user gave them.
  """

  def init_fn(params: optax.Params) -> CalibrationState:
    params = as_arrays(params)
    check_params(weight_dimension_numbers, params)
    # Placeholders of optax.tree.map_params have no leaves.
    if not jax.tree.leaves(params):
      return CalibrationState(_join(()))
    axes = matrix_axes(weight_dimension_numbers, params)
    _refuse_parts(params, axes)
    ratios = jax.eval_shape(
      lambda x: _join(jax.tree.map(rule.ratios, x, x, axes)), params
    )
    # A type may tell that a mesh splits parameters, which these are not.
    return CalibrationState(jnp.zeros(ratios.shape, jnp.float32))

  def update_fn(
    updates: optax.Updates,
    state: CalibrationState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, CalibrationState]:
    updates, params, axes = match_to_params(
      updates, params, weight_dimension_numbers
    )
    ratios = jax.tree.map(rule.ratios, updates, params, axes)
    if not jax.tree.leaves(ratios):
      return updates, state
    first = jax.tree.map(
      functools.partial(_first_ratios, norm),
      updates,
      params,
      axes,
      ratios,
      _split(state.first_ratios, ratios),
    )
    relative = jax.tree.map(_relative, ratios, first)
    return (
      jax.tree.map(rule.scale, updates, params, relative),
      CalibrationState(_join(first)),
    )

  return optax.GradientTransformation(init_fn, update_fn)


def _refuse_parts(params: optax.Params, axes: Any) -> None:
  """Raises ``ValueError`` for matrices that lie side by side in one kernel."""
  structure: Any = jax.tree.structure(params)
  if any(a.parts for a in structure.flatten_up_to(axes)):
    raise ValueError(
      'weight_dimension_numbers must not hold FusedDimensionNumbers with '
      'calibrate=True.'
    )


def _first_ratios(
  norm: Norm,
  update: jax.Array,
  param: jax.Array,
  axes: MatrixAxes,
  ratios: Ratios,
  before: Ratios,
) -> Ratios:
  """Returns the first ratios, given those known before this step."""

  def first(name: Ratio) -> jax.Array:
    # What would be zero if the update were a multiple of the parameter. It is
    # NaN where something is not finite. (The ratios may have other norms.)
    plain = trust_ratios(update, param, axes, names=(name,), norm=norm)[name]
    rest = widen(update) - widen(param) / plain
    lengths = trust_ratios(rest, update, axes, names=(name,), norm=norm)[name]
    is_first = (before[name] == 0) & (lengths < _MOSTLY_DECAY)
    return jnp.where(is_first, ratios[name], before[name])

  return {name: first(name) for name in ratios}


def _relative(now: jax.Array, first: jax.Array) -> jax.Array:
  """Returns ratios relative to the first ones, where these say something."""
  is_known = (first > 0) & (first < jnp.inf)
  relative = ratio(now, jnp.where(is_known, first, 1))
  return jnp.where(is_known, jnp.where(now == jnp.inf, now, relative), 1)


def _join(ratios: Any) -> jax.Array:
  """Returns all ratios as one array with a single axis.

  As a counter, it needs no sharding of its own, and no parameter has to share
  its rank. Without ratios it has a zero, since Orbax saves no empty array.
  """
  parts = [
    unsplit(x).ravel().astype(jnp.float32) for x in jax.tree.leaves(ratios)
  ]
  is_empty = not any(part.size for part in parts)
  return jnp.zeros(1, jnp.float32) if is_empty else jnp.concatenate(parts)


def _split(joined: jax.Array, like: Any) -> Any:
  """Returns the parts of a joined array in a tree of arrays like them.

  Raises:
    ValueError: If it was joined of more or fewer elements.
  """
  leaves, structure = jax.tree.flatten(like)
  ends = list(itertools.accumulate(x.size for x in leaves))
  size = max([0, *ends])
  if size and joined.size != size:
    raise ValueError(
      'updates must hold arrays for the parameters that init was given (zeros '
      f'where there is no gradient, not None): the state has {joined.size} '
      f'numbers, for these parameters there would be {size}.'
    )
  parts = jnp.split(joined, ends)[:-1]
  return jax.tree.unflatten(
    structure,
    [
      sharded_as(x, part.reshape(x.shape).astype(x.dtype))
      for part, x in zip(parts, leaves, strict=True)
    ],
  )
