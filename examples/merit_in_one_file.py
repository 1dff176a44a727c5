# Copyright 2026 The authors of merit_optax.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# ==============================================================================
"""MERIT, in one file to copy: it needs nothing but jax and optax.

Implements "MERIT: Maximum-normalized Element-wise Ratio for Language Model
Large-batch Training" (https://arxiv.org/abs/2508.20577) by Yang Luo et al.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# A tree of optax.contrib.MuonDimensionNumbers or None with the structure of the
# parameters, or a function from parameters to one.
DimensionNumbers = Any | Callable[[optax.Params], Any] | None


def _widen(x: jax.Array) -> jax.Array:
  """Returns an array in float32, or in its own dtype if that is wider."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scale_by_uncorrected_adam(
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    mu_dtype: jax.typing.DTypeLike | None,
) -> optax.GradientTransformation:
  """Adam's direction without the bias correction, which the ratio cancels."""

  def init_fn(params: optax.Params) -> optax.ScaleByAdamState:
    return optax.ScaleByAdamState(
        count=jnp.zeros([], jnp.int32),
        mu=optax.tree.zeros_like(params, dtype=mu_dtype),
        nu=optax.tree.zeros_like(params),
    )

  def update_fn(
      updates: optax.Updates,
      state: optax.ScaleByAdamState,
      params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
    del params
    g, mu, nu = jax.tree.map(_widen, (updates, state.mu, state.nu))
    mu = optax.tree.update_moment(g, mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(g, nu, b2, 2)
    direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
    # The state keeps its dtypes.
    new_state = optax.ScaleByAdamState(
        count=optax.safe_increment(state.count),
        mu=optax.tree.cast_like(mu, state.mu),
        nu=optax.tree.cast_like(nu, state.nu),
    )
    direction = jax.tree.map(
        lambda u, g, m: u.astype(jnp.promote_types(g.dtype, m.dtype)),
        direction,
        updates,
        state.mu,
    )
    return direction, new_state

  return optax.GradientTransformation(init_fn, update_fn)


def _matrix_axes(
    ndim: int, spec: optax.contrib.MuonDimensionNumbers | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the axes of rows and of columns; a vector has no rows."""
  if spec is None:
    return (), tuple(range(ndim))
  rows, columns = (
      (axes,) if isinstance(axes, int) else tuple(axes) for axes in spec
  )
  if ndim < 2 and rows + columns:
    return (), tuple(range(ndim))
  return (rows, columns) if columns else ((), rows)


def _max_norm_ratio(
    param: jax.Array,
    update: jax.Array,
    axes: tuple[int, ...],
    min_norm: jax.typing.ArrayLike,
) -> jax.Array:
  """Returns the ratio of max-norms along axes, infinite where one is zero."""
  w, z = (
      jnp.max(jnp.abs(_widen(x)), axes, keepdims=True, initial=0)
      for x in (param, update)
  )
  w, z = jnp.maximum(w, min_norm), jnp.maximum(z, min_norm)
  # Most hardware flushes numbers below this to zero.
  tiny = jnp.finfo(z.dtype).tiny
  is_zero = jnp.minimum(w, z) < tiny
  # The bound keeps the quotient finite.
  return jnp.where(is_zero, jnp.inf, w) / jnp.where(
      is_zero, 1, jnp.maximum(z, w * tiny)
  )


def scale_by_max_norm_trust_ratio(
    min_norm: jax.typing.ArrayLike = 0.0,
    weight_dimension_numbers: DimensionNumbers = None,
) -> optax.GradientTransformation:
  r"""Scales each element by the largest of its max-norm trust ratios.

  For a matrix :math:`w` and its update :math:`z`, the ratios are those of the
  whole matrix, of the element's row and of its column,

  .. math::

    s_{ij} = \max\left(
      \frac{\max |w|}{\max |z|},
      \frac{\max |w_{i:}|}{\max |z_{i:}|},
      \frac{\max |w_{:j}|}{\max |z_{:j}|}
    \right)

  and 1 where a norm is zero. Parameters with fewer than two axes have the first
  ratio only. Any sharding gives correct results under ``jax.jit``, but not
  inside ``jax.shard_map``, where a device sees its own shards only.

  Args:
    min_norm: Lower bound of every norm.
    weight_dimension_numbers: Tree like the parameters of
      :class:`optax.contrib.MuonDimensionNumbers`, or a function from parameters
      to one. Axes that are not named are batch axes; without rows, or with
      ``None`` for a parameter, there is one ratio for all of it. By default,
      the last two axes are the rows and the columns.

  Returns:
    A stateless :class:`optax.GradientTransformation`.
  """

  def update_fn(
      updates: optax.Updates,
      state: optax.EmptyState,
      params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    if params is None:
      raise ValueError(
          'You are using a transformation that requires the current value of '
          'parameters, but you are not passing `params` when calling `update`.'
      )
    specs = weight_dimension_numbers
    if callable(specs):
      specs = specs(params)
    if specs is None:
      last_two = optax.contrib.MuonDimensionNumbers(-2, -1)
      specs = jax.tree.map(lambda _: last_two, params)

    def scale(w: jax.Array, z: jax.Array, spec: Any) -> jax.Array:
      rows, columns = _matrix_axes(w.ndim, spec)
      ratio = _max_norm_ratio(w, z, rows + columns, min_norm)
      if rows:
        by_row = _max_norm_ratio(w, z, columns, min_norm)
        by_column = _max_norm_ratio(w, z, rows, min_norm)
        ratio = jnp.maximum(ratio, jnp.maximum(by_row, by_column))
      scaled = jnp.where(ratio == jnp.inf, 1, ratio) * _widen(z)
      return scaled.astype(jnp.promote_types(w.dtype, z.dtype))

    return jax.tree.map(scale, params, updates, specs), state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)


def merit(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    mu_dtype: jax.typing.DTypeLike | None = None,
    min_norm: jax.typing.ArrayLike = 0.0,
    weight_dimension_numbers: DimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
  r"""The MERIT optimizer.

  MERIT is a variant of LAMB for large batches. It scales Adam's update, without
  bias correction, by the largest of three max-norm trust ratios for each
  element, and clips the result to 1, so that the learning rate bounds the
  change of an element as a fraction of the largest weight.

  Args:
    learning_rate: Learning rate, or a schedule from steps to learning rates.
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Added to the root of the second moment.
    weight_decay: Weight decay, inside the trust ratio, or a schedule.
    mask: Tree of booleans (or a function from parameters to one) that selects
      the parameters to decay; ``None`` for all.
    mu_dtype: dtype of the first moment; ``None`` for the parameter's.
    min_norm: Lower bound of the norms in the trust ratios.
    weight_dimension_numbers: Which axes of a parameter are rows and columns,
      see :func:`scale_by_max_norm_trust_ratio`.

  Returns:
    The corresponding :class:`optax.GradientTransformationExtraArgs`, whose
    ``update`` needs ``params``.

  Examples:
    >>> import jax.numpy as jnp
    >>> params = jnp.array([[4.0, 2.0], [1.0, 0.5]])
    >>> optimizer = merit(learning_rate=0.1)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.ones((2, 2)), state, params)
    >>> print(optax.apply_updates(params, updates))
    [[3.9 1.9]
     [0.9 0.4]]

  References:
    Luo et al., `MERIT: Maximum-normalized Element-wise Ratio for Language Model
    Large-batch Training <https://arxiv.org/abs/2508.20577>`_, 2025.
  """
  return optax.chain(
      _scale_by_uncorrected_adam(b1, b2, eps, mu_dtype),
      optax.add_decayed_weights(weight_decay, mask),
      scale_by_max_norm_trust_ratio(min_norm, weight_dimension_numbers),
      optax.stateless_with_tree_map(
          lambda z, _: z / jnp.maximum(1, jnp.abs(z))
      ),
      optax.scale_by_learning_rate(learning_rate),
  )
