"""A table of what the optimizers do with each parameter."""

from collections.abc import Callable, Collection
import math
from typing import Any
import warnings

import jax

from merit_optax._internal.trees import as_arrays, path_names
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
)
from merit_optax.matrices.masks import broadcast_mask, scaled_axes
from merit_optax.matrices.norms import RATIOS
from merit_optax.matrices.roles import roles
from merit_optax.matrices.whole_matrices import (
  FROM_MESH,
  MeshAxes,
  check_mesh_axes,
  how_multiplied,
  place_of,
)
from merit_optax.optimizers.hidden import Hidden, hidden_matrices
from merit_optax.transforms.trust_ratio import check_ratios

_HEADER = (
  *('parameter', 'shape', 'part', 'matrices', 'ratios', 'decayed'),
  'products',
)


def describe(
  params: Any,
  *,
  hidden: Hidden = None,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  ratios: Collection[str] = RATIOS,
  trust_ratio_mask: Any | Callable[[Any], Any] | None = None,
  mask: Any | Callable[[Any], Any] | None = None,
  mesh_axes: MeshAxes = FROM_MESH,
) -> str:
  """Returns a table of what the optimizers do with each parameter.

  It has one line per parameter, with

  - its path and its shape;
  - the part it belongs to: ``hidden`` for hidden matrices, ``vectors`` for
    biases and scales, ``others`` for embeddings, heads and the like, and ``not
    sure`` if neither its name nor ``hidden`` tells. Muon and Hyperball leave
    all but hidden matrices to Adam;
  - the number of its matrices and their rows and columns, or the number of its
    vectors and their length;
  - the trust ratios that MERIT applies. With ``none``, it takes Adam's step
    with the clip;
  - whether it is decayed;
  - where Muon multiplies its matrices, if they are hidden: on one device, whole
    on each of several devices, or as the compiler chooses. The compiler chooses
    if a matrix is too large for one device, or if the mesh has no axis to
    spread matrices over.

  A line below names the parameters whose matrices or vectors have one element.
  A step of MERIT is at most the learning rate times their size, so they cannot
  change sign unless ``min_norm`` is above zero.

  Args:
    params: Tree of arrays, or of their shapes.
    hidden: Which parameters are hidden matrices, as given to
      :func:`merit_optax.muon`.
    weight_dimension_numbers: As given to the optimizer. ``None`` for the guess
      of :func:`merit_optax.merit`: the last two axes. Muon and Hyperball guess
      by the names of Flax, so for them pass
      :func:`merit_optax.flax_dimension_numbers` if a parameter has more than
      two axes.
    ratios: As given to ``merit``.
    trust_ratio_mask: As given to ``merit``.
    mask: As given to ``merit``.
    mesh_axes: As given to ``muon``.

  Returns:
    The table as text.

  Raises:
    ValueError: If an argument is invalid or does not fit the parameters, or if
      two paths are the same as text.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {
    ...     'embedding': jnp.zeros((50, 8)),
    ...     'mlp': {'up': {'kernel': jnp.ones((8, 32)), 'bias': jnp.ones(32)}},
    ... }
    >>> table = merit_optax.describe(params, ratios=['weight'])
    >>> print(table)
    parameter      shape    part     matrices    ratios  decayed  products
    embedding      (50, 8)  others   1 x 50 x 8  weight  yes      -
    mlp/up/bias    (32,)    vectors  1 x 32      weight  yes      -
    mlp/up/kernel  (8, 32)  hidden   1 x 8 x 32  weight  yes      on one device
  """
  params = as_arrays(params)
  names = path_names(params)
  ratios = check_ratios(ratios)
  treedef: Any = jax.tree.structure(params)
  with warnings.catch_warnings():
    # The table says the same.
    warnings.simplefilter('ignore')
    chosen = hidden_matrices(params, hidden)
    matrices = jax.tree.map(lambda x, y: x if y else None, params, chosen)
    place = place_of(jax.tree.leaves(matrices), check_mesh_axes(mesh_axes))
  columns = (
    treedef.flatten_up_to(tree)
    for tree in (
      params,
      roles(params),
      chosen,
      scaled_axes(weight_dimension_numbers, trust_ratio_mask, params),
      broadcast_mask('mask', mask, params),
    )
  )
  parts = {
    'vector': 'vectors',
    'unknown': 'not sure' if hidden is None else 'others',
  }
  rows: list[tuple[str, ...]] = [_HEADER]
  single = []
  for name, param, role, is_hidden, axes, is_decayed in zip(
    names, *columns, strict=True
  ):
    shape = tuple(param.shape)
    is_multiplied = is_hidden and axes is not None and axes.rows
    rows.append(
      (
        name,
        str(shape),
        'hidden' if is_hidden else parts.get(role, 'others'),
        '-' if axes is None else _matrices(shape, axes),
        _ratios(axes, ratios),
        'yes' if is_decayed else 'no',
        how_multiplied(shape, axes, place) if is_multiplied else '-',
      )
    )
    if axes is not None and math.prod(_sizes(shape, axes)[1:]) == 1:
      single.append(name)
  note = (
    '\nOf one element, which cannot change sign unless min_norm is above zero: '
    f'{", ".join(single)}'
  )
  return _table(rows) + (note if single else '')


def _sizes(shape: tuple[int, ...], axes: MatrixAxes) -> tuple[int, ...]:
  """Returns count, rows and columns, or count and length."""
  named = axes.rows + axes.columns
  batch = [axis for axis in range(len(shape)) if axis not in named]
  parts = (batch, axes.rows, axes.columns) if axes.rows else (batch, named)
  return tuple(math.prod(shape[axis] for axis in part) for part in parts)


def _matrices(shape: tuple[int, ...], axes: MatrixAxes) -> str:
  """Returns the sizes of all matrices, also of those side by side."""
  if not axes.parts:
    return ' x '.join(map(str, _sizes(shape, axes)))
  last = axes.columns[-1]
  each = (
    _sizes((*shape[:last], size, *shape[last + 1 :]), axes)
    for size in axes.parts
  )
  return ' + '.join(' x '.join(map(str, sizes)) for sizes in each)


def _ratios(axes: MatrixAxes | None, ratios: Collection[str]) -> str:
  if axes is None:
    return 'none'
  return ', '.join(ratios) if axes.rows else 'weight'


def _table(rows: list[tuple[str, ...]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = (
    '  '.join(
      f'{cell:{width}}' for cell, width in zip(row, widths, strict=True)
    )
    for row in rows
  )
  return '\n'.join(line.rstrip() for line in lines)
