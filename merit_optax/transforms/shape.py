"""A factor of each update that depends on the shape of its matrices."""

from collections.abc import Callable
import math
from typing import Any

import jax
import optax

from merit_optax._internal import arguments
from merit_optax._internal.dtypes import widen
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
)
from merit_optax.matrices.per_parameter import per_update


def scale_by_shape(
  factor: Callable[[int, int], Any],
  *,
  weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
  r"""Multiplies updates by a function of the shape of their matrices.

  With :math:`m` rows (inputs) and :math:`n` columns (outputs), some factors of
  Muon's update are

  ==========================================  ================================
  ``factor``                                  what for
  ==========================================  ================================
  ``lambda m, n: 0.2 * max(m, n) ** 0.5``     RMS of 0.2, similar to AdamW's
                                              (Moonlight)
  ``lambda m, n: max(1, n / m) ** 0.5``       learning rates that transfer
                                              between widths
  ``lambda m, n: (n / m) ** 0.5``             the same, and also to narrower
                                              layers (Scion)
  ==========================================  ================================

  Trust ratios without weight decay cancel the factor, and so does
  :func:`merit_optax.scale_by_lmo`, except after it.

  Args:
    factor: Function from the numbers of rows and columns to a number. Under
      ``optax.inject_hyperparams``, which takes functions for schedules, name
      ``'factor'`` in ``static_args``.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`. A
      parameter that has only the weight-wise ratio there is a matrix of one
      row.

  Returns:
    A stateless :class:`optax.GradientTransformation` that preserves shapes and
    dtypes.

  Raises:
    ValueError: If ``factor`` is not a function; by ``init`` and ``update`` if a
      spec does not fit its parameter; by ``update`` if ``factor`` returns no
      finite number.

  Warns:
    UserWarning: By ``init``, if nothing specifies the rows and columns of a
      parameter with more than two axes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> transform = merit_optax.scale_by_shape(lambda m, n: (n / m) ** 0.5)
    >>> updates = jnp.ones((1, 4))
    >>> updates, _ = transform.update(updates, transform.init(updates))
    >>> print(updates)
    [[2. 2. 2. 2.]]

  References:
    Liu et al., `Muon is Scalable for LLM Training
    <https://arxiv.org/abs/2502.16982>`_, 2025 (Moonlight).

    Pethick et al., `Training Deep Learning Models with Norm-Constrained LMOs
    <https://arxiv.org/abs/2502.07529>`_, 2025 (Scion).
  """
  if not callable(factor):
    raise ValueError(
      'factor must be a function from the numbers of rows and columns to a '
      f'number, got {factor!r}.'
    )

  def scale(update: jax.Array, axes: MatrixAxes) -> jax.Array:
    if not update.size:
      return update
    rows, columns = (
      math.prod(update.shape[axis] for axis in part)
      for part in (axes.rows, axes.columns)
    )
    number = arguments.number('factor(rows, columns)', factor(rows, columns))
    scaled: jax.Array = number * widen(update)
    return scaled.astype(update.dtype)

  return per_update(scale, weight_dimension_numbers)
