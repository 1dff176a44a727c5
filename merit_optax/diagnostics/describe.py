"""A table of what the optimizers do with each parameter."""

import math
from typing import Any, NamedTuple
import warnings

import jax
import optax

from merit_optax._internal.arguments import check_optimizer
from merit_optax._internal.readings import recorded
from merit_optax._internal.trees import as_arrays, path_names
from merit_optax.matrices.dimension_numbers import MatrixAxes
from merit_optax.optimizers.merit import merit
from merit_optax.optimizers.muon import muon
from merit_optax.optimizers.roles import is_stack_of_vectors, roles

_PARTS = {'vector': 'vectors', 'unknown': '?'}


def describe(
  params: Any, optimizer: optax.GradientTransformation | None = None
) -> str:
  """Returns a table of what an optimizer does with each parameter.

  It has one line per parameter, with

  - its path and its shape;
  - the part it belongs to: ``hidden`` for hidden matrices, ``vectors`` for
    biases and scales, ``others`` for embeddings, heads and the like, and ``?``
    if its name does not tell. Muon and Hyperball leave all but hidden matrices
    to Adam;
  - the number of its matrices and their rows and columns, or the number of its
    vectors and their length, as the optimizer takes it; a dash stands for
    parameters that no transform of this package takes as either, since they are
    masked out or left to Adam;
  - where Muon multiplies its matrices: on one device, whole on each of several
    devices, or as the compiler chooses. The compiler chooses if a matrix is too
    large for one device, or if the mesh has no axis to spread matrices over.

  The table has what transforms read when they are initialized. What ``init``
  warns of follows below, and so does its error, with ``?`` for what was not
  read before it.

  Args:
    params: Tree of arrays, or of their shapes.
    optimizer: The optimizer, with any transforms around it; ``None`` for plain
      :func:`merit_optax.merit` and plain :func:`merit_optax.muon`, to which
      nothing but a learning rate is passed.

  Returns:
    The table as text.

  Raises:
    ValueError: If ``params`` holds anything but arrays of numbers, if
      ``optimizer`` is none, if two paths are the same as text, or if
      ``shardings`` need a mesh or do not fit it.

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
  optimizers = {'merit': merit(0.0), 'muon': muon(0.0)}
  if optimizer is not None:
    check_optimizer('optimizer', optimizer)
    optimizers = {'matrices': optimizer}
  columns = {name: _read(each, params) for name, each in optimizers.items()}
  notes = [
    f'{"init" if optimizer else name} {note}'
    for name, column in columns.items()
    for note in column.notes
  ]
  return '\n'.join([_table(params, columns), *notes])


class _Column(NamedTuple):
  """What the transforms of an optimizer read when they are initialized.

  Attributes:
    readings: By kind, the readings of each parameter.
    notes: What is wrong with them.
    default: Text of a parameter without a reading.
  """

  readings: dict[str, list[list[Any]]]
  notes: list[str]
  default: str


def _read(optimizer: optax.GradientTransformation, params: Any) -> _Column:
  leaves: list[Any] = []
  errors: list[str] = []

  # A function of its own: what is traced already is not called again.
  def init(params: Any) -> Any:
    leaves.extend(jax.tree.leaves(params))
    return optimizer.init(params)

  with recorded() as readings, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    try:
      jax.eval_shape(init, params)
    except ValueError as error:
      errors.append(f'raises: {error}')
  found = {
    kind: [readings[kind, id(x)] for x in leaves]
    for kind in ('axes', 'hidden', 'products')
  }
  vectors = ', '.join(
    f'{name} {x.shape}'
    for name, x, role, axes in zip(
      path_names(params),
      leaves,
      jax.tree.leaves(roles(params)),
      found['axes'],
      strict=True,
    )
    if is_stack_of_vectors(role, x.shape) and any(each.rows for each in axes)
  )
  notes = [f'warns: {warning.message}' for warning in caught]
  if vectors:
    notes.append(
      'takes biases or scales of stacked layers, by their names, as matrices: '
      f'{vectors}. In weight_dimension_numbers, MuonDimensionNumbers((), (1,)) '
      'stands for vectors of shape (layers, features); '
      'merit_optax.flax_dimension_numbers has them for Flax modules.'
    )
  return _Column(found, notes + errors, '?' if errors else '-')


def _table(params: Any, columns: dict[str, _Column]) -> str:
  """Returns the table, with a column for what each optimizer read."""
  leaves = jax.tree.leaves(params)
  last = [*columns.values()][-1]
  rows = [('parameter', 'shape', 'part', *columns, 'products')]
  for i, (name, x, role) in enumerate(
    zip(path_names(params), leaves, jax.tree.leaves(roles(params)), strict=True)
  ):
    is_hidden = any(last.readings['hidden'][i] or [role == 'hidden'])
    part = 'hidden' if is_hidden else _PARTS.get(role, 'others')
    matrices = (
      '; '.join(_matrices(x, axes) for axes in dict.fromkeys(read))
      or column.default
      for column in columns.values()
      for read in [column.readings['axes'][i]]
    )
    rows.append(
      (name, str(x.shape), part, *matrices, _products(i, leaves, last))
    )
  cells = [[cell or '-' for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return '\n'.join(
    '  '.join(map(str.ljust, row, widths)).rstrip() for row in cells
  )


def _products(i: int, leaves: list[Any], column: _Column) -> str:
  """Returns where the products of a parameter are computed, if there are."""
  found = column.readings['products'][i]
  if not found:
    return ''
  where, index = found[0]
  return str(where()[index])


def _sizes(shape: tuple[int, ...], axes: MatrixAxes) -> tuple[int, ...]:
  """Returns count, rows and columns, or count and length."""
  named = axes.rows + axes.columns
  batch = [axis for axis in range(len(shape)) if axis not in named]
  parts = (batch, axes.rows, axes.columns) if axes.rows else (batch, named)
  return tuple(math.prod(shape[axis] for axis in part) for part in parts)


def _matrices(x: Any, axes: MatrixAxes) -> str:
  """Returns the sizes of all matrices, also of those side by side."""
  counts: dict[tuple[int, ...], int] = {}
  for part in jax.eval_shape(axes.split, x):
    count, *sizes = _sizes(part.shape, axes)
    counts[*sizes,] = counts.get((*sizes,), 0) + count
  return ' + '.join(
    ' x '.join(map(str, (count, *sizes))) for sizes, count in counts.items()
  )
