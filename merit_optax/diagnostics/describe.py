"""A table of what the optimizers do with each parameter."""

import math
from typing import Any
import warnings

import jax
import optax

from merit_optax._internal.readings import Readings, recorded
from merit_optax._internal.trees import as_arrays, path_names
from merit_optax.matrices.dimension_numbers import MatrixAxes
from merit_optax.matrices.roles import roles
from merit_optax.matrices.whole_matrices import how_multiplied, spread_of
from merit_optax.optimizers.merit import merit
from merit_optax.optimizers.muon import muon

_PARTS = {'vector': 'vectors', 'unknown': 'not sure'}


def describe(
  params: Any, optimizer: optax.GradientTransformation | None = None
) -> str:
  """Returns a table of what an optimizer does with each parameter.

  It has one line per parameter, with

  - its path and its shape;
  - the part it belongs to: ``hidden`` for hidden matrices, ``vectors`` for
    biases and scales, ``others`` for embeddings, heads and the like, and ``not
    sure`` if its name does not tell. Muon and Hyperball leave
    all but hidden matrices to Adam;
  - the number of its matrices and their rows and columns, or the number of its
    vectors and their length, as the optimizer takes it; a dash stands for
    parameters that no transform of this package takes as either, since they are
    masked out or left to Adam;
  - where Muon multiplies its matrices: on one device, whole on each of several
    devices, or as the compiler chooses. The compiler chooses if a matrix is too
    large for one device, or if the mesh has no axis to spread matrices over.

  The table has what transforms read when they are initialized. Without an
  optimizer, it has what :func:`merit_optax.merit` and :func:`merit_optax.muon`
  read if nothing but a learning rate is passed to them; their warnings and
  errors follow below.

  Args:
    params: Tree of arrays, or of their shapes.
    optimizer: The optimizer, with any transforms around it.

  Returns:
    The table as text.

  Raises:
    ValueError: If ``init`` of the optimizer raises it, or if two paths are the
      same as text.

  Warns:
    UserWarning: If ``init`` of the optimizer does.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {
    ...     'embedding': jnp.zeros((50, 8)),
    ...     'mlp': {'up': {'kernel': jnp.ones((8, 32)), 'bias': jnp.ones(32)}},
    ... }
    >>> print(merit_optax.describe(params, merit_optax.muon(0.02)))
    parameter      shape    part     matrices    products
    embedding      (50, 8)  others   -           -
    mlp/up/bias    (32,)    vectors  -           -
    mlp/up/kernel  (8, 32)  hidden   1 x 8 x 32  on one device
    >>> print(merit_optax.describe(params))
    parameter      shape    part     merit       muon        products
    embedding      (50, 8)  others   1 x 50 x 8  -           -
    mlp/up/bias    (32,)    vectors  1 x 32      -           -
    mlp/up/kernel  (8, 32)  hidden   1 x 8 x 32  1 x 8 x 32  on one device
  """
  params = as_arrays(params)
  if optimizer is not None:
    return _table(params, {'matrices': _readings(optimizer, params)})
  readings, notes = {}, []
  for name, plain in (('merit', merit(0.0)), ('muon', muon(0.0))):
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      try:
        readings[name] = _readings(plain, params)
      except ValueError as error:
        notes.append(f'{name} raises: {error}')
      else:
        notes += [f'{name} warns: {warning.message}' for warning in caught]
  return '\n'.join([_table(params, readings), *notes])


def _readings(optimizer: optax.GradientTransformation, params: Any) -> Readings:
  """Returns what the transforms of an optimizer read when initialized."""
  with recorded() as readings:
    # A function of its own: what is traced already is not called again.
    jax.eval_shape(lambda x: optimizer.init(x), params)  # noqa: PLW0108
  return readings


def _table(params: Any, columns: dict[str, Readings]) -> str:
  """Returns the table, with a column for what each optimizer read."""
  leaves = dict(zip(path_names(params), jax.tree.leaves(params), strict=True))
  last = [*columns.values()][-1]
  rows = [('parameter', 'shape', 'part', *columns, 'products')]
  for (name, x), role in zip(
    leaves.items(), jax.tree.leaves(roles(params)), strict=True
  ):
    is_hidden = any(last['hidden'].get(name, [role == 'hidden']))
    part = 'hidden' if is_hidden else _PARTS.get(role, 'others')
    matrices = (
      '; '.join(_matrices(x.shape, axes) for axes in dict.fromkeys(each[name]))
      for each in (readings['axes'] for readings in columns.values())
    )
    rows.append(
      (name, str(x.shape), part, *matrices, _products(name, leaves, last))
    )
  cells = [[cell or '-' for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return '\n'.join(
    '  '.join(map(str.ljust, row, widths)).rstrip() for row in cells
  )


def _products(name: str, leaves: dict[str, Any], readings: Readings) -> str:
  """Returns where the products of a parameter are computed, if there are."""
  multiplied = readings['mesh_axes']
  if name not in multiplied:
    return ''
  mesh_axes = multiplied[name][0]
  beside = [leaves[x] for x in multiplied if mesh_axes in multiplied[x]]
  axes = readings['axes'][name][0]
  return how_multiplied(leaves[name].shape, axes, spread_of(beside, mesh_axes))


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
