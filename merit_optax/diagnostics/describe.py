"""A table of what the optimizers do with each parameter."""

from collections.abc import Callable, Collection, Iterable
import math
from typing import Any
import warnings

import jax
import optax

from merit_optax._internal.readings import recorded
from merit_optax._internal.trees import as_arrays, path_names
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
  matrix_axes,
)
from merit_optax.matrices.masks import broadcast_mask, scaled_axes
from merit_optax.matrices.norms import RATIOS, Ratio
from merit_optax.matrices.roles import roles
from merit_optax.matrices.whole_matrices import (
  FROM_MESH,
  MeshAxes,
  check_mesh_axes,
  how_multiplied,
  spread_of,
)
from merit_optax.optimizers.hidden import (
  Hidden,
  hidden_dimension_numbers,
  hidden_matrices,
)
from merit_optax.transforms.trust_ratio import check_ratios


def describe(
  params: Any,
  optimizer: optax.GradientTransformation | None = None,
  *,
  hidden: Hidden = None,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  ratios: Iterable[Ratio] = RATIOS,
  trust_ratio_mask: Any | Callable[[Any], Any] | None = None,
  mask: Any | Callable[[Any], Any] | None = None,
  mesh_axes: MeshAxes = FROM_MESH,
) -> str:
  """Returns a table of what an optimizer does with each parameter.

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

  Given an ``optimizer``, the table has what its transforms read when they are
  initialized, such as the part that :func:`merit_optax.partition_hidden`
  chooses; a dash stands for parameters that no transform of this package reads
  as matrices. The columns of ratios and decay are left out, and the arguments
  that follow have no effect.

  Without one, hidden matrices are those of :func:`merit_optax.muon`, all other
  parameters those of :func:`merit_optax.merit`. A line below names the
  parameters with more than two axes that ``merit`` would guess.

  Another line names the parameters whose matrices or vectors have one element.
  A step of MERIT is at most the learning rate times their size, so they cannot
  change sign unless ``min_norm`` is above zero.

  Args:
    params: Tree of arrays, or of their shapes.
    optimizer: The optimizer, with any transforms around it.
    hidden: Which parameters are hidden matrices, as given to
      :func:`merit_optax.muon`.
    weight_dimension_numbers: As given to the optimizer.
    ratios: As given to ``merit``.
    trust_ratio_mask: As given to ``merit``.
    mask: As given to ``merit``.
    mesh_axes: As given to ``muon``.

  Returns:
    The table as text.

  Raises:
    ValueError: If an argument is invalid or does not fit the parameters, if
      ``init`` of the optimizer raises it, or if two paths are the same as text.

  Warns:
    UserWarning: If ``init`` of the optimizer does.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {
    ...     'embedding': jnp.zeros((50, 8)),
    ...     'mlp': {'up': {'kernel': jnp.ones((8, 32)), 'bias': jnp.ones(32)}},
    ... }
    >>> print(merit_optax.describe(params, ratios=['weight']))
    parameter      shape    part     matrices    ratios  decayed  products
    embedding      (50, 8)  others   1 x 50 x 8  weight  yes      -
    mlp/up/bias    (32,)    vectors  1 x 32      weight  yes      -
    mlp/up/kernel  (8, 32)  hidden   1 x 8 x 32  weight  yes      on one device
    >>> print(merit_optax.describe(params, merit_optax.muon(0.02)))
    parameter      shape    part     matrices    products
    embedding      (50, 8)  others   -           -
    mlp/up/bias    (32,)    vectors  -           -
    mlp/up/kernel  (8, 32)  hidden   1 x 8 x 32  on one device
  """
  params = as_arrays(params)
  names, leaves = path_names(params), jax.tree.leaves(params)
  each_role = jax.tree.leaves(roles(params))
  if optimizer is not None:
    return _table_of(optimizer, params, names, each_role)
  ratios = check_ratios(ratios)
  treedef: Any = jax.tree.structure(params)
  with warnings.catch_warnings():
    # The table says the same.
    warnings.simplefilter('ignore')
    chosen = jax.tree.leaves(hidden_matrices(params, hidden))
    matrices = {
      name: x for name, x, y in zip(names, leaves, chosen, strict=True) if y
    }
    spread = spread_of([*matrices.values()], check_mesh_axes(mesh_axes))
  scaled = treedef.flatten_up_to(
    scaled_axes(weight_dimension_numbers, trust_ratio_mask, params)
  )
  decayed = jax.tree.leaves(broadcast_mask('mask', mask, params))
  axes_of_muon: dict[str, MatrixAxes] = {}
  notes: list[str] = []
  if weight_dimension_numbers is None:
    axes_of_muon, notes = _guesses(names, leaves, matrices)
  rows: list[tuple[str, ...]] = [
    ('parameter', 'shape', 'part', 'matrices', 'ratios', 'decayed', 'products')
  ]
  single = []
  for name, param, role, is_hidden, by_merit, is_decayed in zip(
    names, leaves, each_role, chosen, scaled, decayed, strict=True
  ):
    shape = tuple(param.shape)
    axes = by_merit and axes_of_muon.get(name, by_merit)
    rows.append(
      (
        name,
        str(shape),
        _part(role, is_hidden, hidden is not None),
        '-' if axes is None else _matrices(shape, axes),
        _ratios(axes, ratios),
        'yes' if is_decayed else 'no',
        how_multiplied(shape, axes, spread)
        if is_hidden and axes is not None and axes.rows
        else '-',
      )
    )
    if axes is not None and math.prod(_sizes(shape, axes)[1:]) == 1:
      single.append(name)
  if single:
    notes.append(
      'Of one element, which cannot change sign unless min_norm is above zero: '
      f'{", ".join(single)}'
    )
  return '\n'.join([_table(rows), *notes])


def _guesses(
  names: list[str], leaves: list[Any], matrices: dict[str, Any]
) -> tuple[dict[str, MatrixAxes], list[str]]:
  """Returns the axes that Muon takes from names, and notes of all guesses."""
  by_merit = [
    name for name, x in zip(names, leaves, strict=True) if len(x.shape) > 2
  ]
  notes = [
    'Without weight_dimension_numbers, merit takes these as stacks of matrices '
    f'over their last two axes: {", ".join(by_merit)}'
  ]
  try:
    found = matrix_axes(hidden_dimension_numbers, matrices)
  except ValueError as error:
    found = {}
    reason, *_ = str(error).split('. ')
    notes.append(f'Without weight_dimension_numbers, muon raises: {reason}.')
  return found, notes if by_merit else []


def _table_of(
  optimizer: optax.GradientTransformation,
  params: Any,
  names: list[str],
  each_role: list[str],
) -> str:
  """Returns the table of what transforms read when they are initialized."""
  with recorded() as readings:
    # A function of its own: what is traced already is not called again.
    jax.eval_shape(lambda x: optimizer.init(x), params)  # noqa: PLW0108
  rows: list[tuple[str, ...]] = [
    ('parameter', 'shape', 'part', 'matrices', 'products')
  ]
  multiplied = readings['mesh_axes']
  leaves = dict(zip(names, jax.tree.leaves(params), strict=True))
  for (name, param), role in zip(leaves.items(), each_role, strict=True):
    shape = tuple(param.shape)
    is_chosen = any(readings['hidden'].get(name, [role == 'hidden']))
    all_axes = [*dict.fromkeys(readings['axes'][name])]
    products = '-'
    if name in multiplied:
      mesh_axes = multiplied[name][0]
      beside = [leaves[x] for x in multiplied if mesh_axes in multiplied[x]]
      spread = spread_of(beside, mesh_axes)
      products = how_multiplied(shape, all_axes[0], spread)
    rows.append(
      (
        name,
        str(shape),
        _part(role, is_chosen, bool(readings['hidden'])),
        '; '.join(_matrices(shape, axes) for axes in all_axes) or '-',
        products,
      )
    )
  return _table(rows)


def _part(role: str, is_hidden: bool, is_sure: bool) -> str:
  if is_hidden:
    return 'hidden'
  parts = {'vector': 'vectors', 'unknown': 'others' if is_sure else 'not sure'}
  return parts.get(role, 'others')


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
