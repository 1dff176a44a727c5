"""A table that says how MERIT sees each parameter."""

from collections.abc import Callable, Collection
import math
from typing import Any

import jax

from merit_optax._dimension_numbers import MatrixAxes, matrix_axes, path_name
from merit_optax._norms import RATIOS
from merit_optax._trust_ratio import WeightDimensionNumbers, check_ratios

_HEADER = ('parameter', 'shape', 'matrices', 'ratios', 'decayed')


def describe(
  params: Any,
  *,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  ratios: Collection[str] = RATIOS,
  trust_ratio_mask: Any | Callable[[Any], Any] | None = None,
  mask: Any | Callable[[Any], Any] | None = None,
) -> str:
  """Returns a table of how :func:`merit_optax.merit` sees each parameter.

  Args:
    params: Tree of arrays, or of their shapes.
    weight_dimension_numbers: As given to ``merit``.
    ratios: As given to ``merit``.
    trust_ratio_mask: As given to ``merit``.
    mask: As given to ``merit``.

  Returns:
    Text with a line for each parameter, which has its path, its shape, how many
    matrices of which rows and columns it holds (or vectors of which length),
    which ratios apply (none: masked out, plain Adam step), and whether it is
    decayed.

  Raises:
    ValueError: If a spec does not fit its parameter, or ``ratios`` is wrong.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> print(merit_optax.describe({'w': jnp.zeros((3, 2)), 'b': jnp.zeros(2)}))
    parameter  shape   matrices   ratios               decayed
    b          (2,)    1 x 2      weight               yes
    w          (3, 2)  1 x 3 x 2  weight, row, column  yes
  """
  ratios = check_ratios(ratios)
  treedef: Any = jax.tree.structure(params)
  axes = scaled_axes(weight_dimension_numbers, trust_ratio_mask, params)
  rows = [
    (
      path_name(path),
      str(tuple(param.shape)),
      *_matrices_and_ratios(param.shape, leaf_axes, ratios),
      'yes' if decayed else 'no',
    )
    for (path, param), leaf_axes, decayed in zip(
      jax.tree_util.tree_leaves_with_path(params),
      treedef.flatten_up_to(axes),
      treedef.flatten_up_to(broadcast_mask(mask, params)),
      strict=True,
    )
  ]
  return _table([_HEADER, *rows])


def _matrices_and_ratios(
  shape: tuple[int, ...], axes: MatrixAxes | None, ratios: Collection[str]
) -> tuple[str, str]:
  """Returns 'count x rows x columns' or 'count x length', and the ratios."""
  if axes is None:
    return '-', 'none'
  rows = math.prod(shape[axis] for axis in axes.rows)
  columns = math.prod(shape[axis] for axis in axes.columns)
  named = axes.rows + axes.columns
  count = math.prod(n for axis, n in enumerate(shape) if axis not in named)
  sizes = (count, rows, columns) if axes.rows else (count, columns)
  names = ratios if axes.rows else ('weight',)
  return ' x '.join(map(str, sizes)), ', '.join(names)


def scaled_axes(
  dimension_numbers: Any, trust_ratio_mask: Any, params: Any
) -> Any:
  """Returns the axes of each parameter's matrices, None where masked out.

  As in the optimizer, a parameter without trust ratios needs no spec.
  """
  kept = jax.tree.map(
    lambda param, keep: param if keep else None,
    params,
    broadcast_mask(trust_ratio_mask, params),
  )
  return matrix_axes(dimension_numbers, kept)


def broadcast_mask(mask: Any, params: Any) -> Any:
  """Returns a mask as a tree of the structure of the parameters."""
  if callable(mask):
    mask = mask(params)
  if mask is None:
    mask = True
  return jax.tree.map(
    lambda keep, part: jax.tree.map(lambda _: keep, part), mask, params
  )


def _table(rows: list[tuple[str, ...]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = (
    '  '.join(
      f'{cell:{width}}' for cell, width in zip(row, widths, strict=True)
    )
    for row in rows
  )
  return '\n'.join(line.rstrip() for line in lines)
