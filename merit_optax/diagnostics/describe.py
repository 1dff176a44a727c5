"""A table of how MERIT treats each parameter."""

from collections.abc import Callable, Collection, Hashable, Mapping
import inspect
import math
from typing import Any, NamedTuple

import jax
import optax

from merit_optax._internal import arguments
from merit_optax._internal.trees import (
  as_arrays,
  is_function,
  named_leaves,
  path_names,
)
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
)
from merit_optax.matrices.masks import (
  broadcast_mask,
  broadcast_prefix,
  scaled_axes,
)
from merit_optax.matrices.norms import RATIOS
from merit_optax.matrices.whole_matrices import (
  FROM_MESH,
  MeshAxes,
  check_mesh_axes,
  how_multiplied,
  place_of,
)
from merit_optax.optimizers.hidden import Hidden, check_matrices, is_vector
from merit_optax.transforms.trust_ratio import check_ratios

_HEADER = ('shape', 'matrices', 'ratios', 'decayed')


class _Row(NamedTuple):
  """What a table says of a parameter.

  Attributes:
    cells: Text below the header.
    is_single: Whether its matrices or vectors have one element.
  """

  cells: tuple[str, ...]
  is_single: bool = False


def describe(
  params: Any,
  *,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  ratios: Collection[str] = RATIOS,
  trust_ratio_mask: Any | Callable[[Any], Any] | None = None,
  mask: Any | Callable[[Any], Any] | None = None,
  weight_decay: optax.ScalarOrSchedule | None = None,
) -> str:
  """Returns a table of how :func:`merit_optax.merit` treats each parameter.

  Args:
    params: Tree of arrays, or of their shapes.
    weight_dimension_numbers: As given to ``merit``.
    ratios: As given to ``merit``.
    trust_ratio_mask: As given to ``merit``.
    mask: As given to ``merit``.
    weight_decay: As given to ``merit``; with 0 nothing is decayed. ``None`` to
      consider only the mask.

  Returns:
    Text with one line per parameter, which holds its path, its shape, the
    number of matrices and their rows and columns (or the number of vectors and
    their length), which ratios apply (none: masked out, Adam's step with the
    clip), and whether it is decayed. A line below names parameters whose
    matrices or vectors have one element: these cannot change sign, because a
    step is at most the learning rate times their size, unless ``min_norm`` is
    above zero.

  Raises:
    ValueError: If a spec or a mask does not fit the parameters, ``ratios`` or
      ``weight_decay`` is invalid, or two paths are the same as text.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> print(merit_optax.describe({'w': jnp.zeros((3, 2)), 'b': jnp.zeros(2)}))
    parameter  shape   matrices   ratios               decayed
    b          (2,)    1 x 2      weight               yes
    w          (3, 2)  1 x 3 x 2  weight, row, column  yes
  """
  params = as_arrays(params)
  rows = _rows(
    params,
    weight_dimension_numbers=weight_dimension_numbers,
    ratios=ratios,
    trust_ratio_mask=trust_ratio_mask,
    mask=mask,
    weight_decay=weight_decay,
  )
  table: list[tuple[str, ...]] = [('parameter', *_HEADER)]
  table += [(name, *row.cells) for name, row in rows.items()]
  return _table(table) + _note_of_signs(rows)


def describe_partition(
  params: Any,
  param_labels: Any | Callable[[Any], Any],
  parts: Mapping[Hashable, Mapping[str, Any] | None],
) -> str:
  """Returns a table of which parameter goes to which part of a partition.

  Args:
    params: Tree of arrays, or of their shapes.
    param_labels: As given to :func:`optax.partition`: a tree of labels with the
      structure of the parameters or a prefix of it, or a function from
      parameters to such a tree.
    parts: For each label, the keyword arguments of
      :func:`merit_optax.describe` for that part, or ``None`` for a part without
      trust ratios.

  Returns:
    The table of ``describe`` with an additional column for the part. Parts
    without parameters are listed below it.

  Raises:
    ValueError: If ``parts`` holds settings other than those of ``describe``, if
      ``param_labels`` does not fit the parameters, or
      if a label is not among the parts (the message names its parameters), and
      as in ``describe``.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {'w': jnp.zeros((3, 2)), 'b': jnp.zeros(2)}
    >>> labels = {'w': 'matrix', 'b': 'other'}
    >>> print(merit_optax.describe_partition(
    ...     params, labels, {'matrix': {'ratios': ('row',)}, 'other': None}))
    parameter  part    shape   matrices   ratios  decayed
    b          other   (2,)    -          -       -
    w          matrix  (3, 2)  1 x 3 x 2  row     yes
  """
  _check_parts(parts)
  params = as_arrays(params)
  if is_function(param_labels, lambda x: x in list(parts)):
    param_labels = param_labels(params)
  # None is a label too, of parameters that nothing matched.
  labels = broadcast_prefix(
    'param_labels', param_labels, params, is_leaf=lambda x: x is None
  )
  treedef: Any = jax.tree.structure(params)
  label_of = dict(
    zip(path_names(params), treedef.flatten_up_to(labels), strict=True)
  )
  unknown = {k: v for k, v in label_of.items() if v not in list(parts)}
  if unknown:
    raise ValueError(
      f'param_labels must name parts, one of {list(parts)}, got {unknown}.'
    )
  rows: dict[str, _Row] = {}
  for part, settings in parts.items():
    masked = jax.tree.map(
      lambda x, label, part=part: x if label == part else optax.MaskedNode(),
      params,
      labels,
    )
    rows |= _shapes(masked) if settings is None else _rows(masked, **settings)
  table: list[tuple[str, ...]] = [('parameter', 'part', *_HEADER)]
  table += [(k, str(v), *rows[k].cells) for k, v in label_of.items()]
  empty = [str(part) for part in parts if part not in label_of.values()]
  note = f'\nParts without a parameter: {", ".join(empty)}' if empty else ''
  return _table(table) + note + _note_of_signs(rows)


def describe_hyperball(
  params: Any,
  *,
  hidden: Hidden = None,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  mesh_axes: MeshAxes = FROM_MESH,
) -> str:
  """Returns a table of what Muon or Hyperball does with each parameter.

  Args:
    params: Tree of arrays, or of their shapes.
    hidden: As given to :func:`merit_optax.muon` or ``muon_hyperball``.
    weight_dimension_numbers: As given to that.
    mesh_axes: As given to that.

  Returns:
    Text with one line per parameter, which holds its path; its part, hidden or
    what Adam updates: others, or the vectors of ``vector_learning_rate``; its
    shape; the number of its matrices, of which Hyperball keeps a norm each, and
    their rows and columns; and where Muon multiplies them: on one device, whole
    on each of several devices, or as the compiler chooses, because a matrix is
    too large for one device or the mesh has no axis to spread matrices over,
    such as one whose axes ``fsdp`` and ``tensor`` have size 1.

  Raises:
    ValueError: As ``muon_hyperball`` does.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {
    ...     'embedding': jnp.zeros((50, 8)),
    ...     'up': {'kernel': jnp.zeros((8, 32)), 'bias': jnp.zeros(32)},
    ... }
    >>> print(merit_optax.describe_hyperball(params))
    parameter  part     shape    matrices    products
    embedding  others   (50, 8)  -           -
    up/bias    vectors  (32,)    -           -
    up/kernel  hidden   (8, 32)  1 x 8 x 32  on one device
  """
  params = as_arrays(params)
  matrices, axes = check_matrices(params, hidden, weight_dimension_numbers)
  leaves: list[Any] = jax.tree.leaves(matrices)
  place = place_of(leaves, check_mesh_axes(mesh_axes))
  treedef: Any = jax.tree.structure(matrices)
  rows = {
    name: (
      'hidden',
      str(tuple(param.shape)),
      _matrices_and_ratios(param.shape, leaf_axes, ())[0],
      how_multiplied(param.shape, leaf_axes, place),
    )
    for (name, param), leaf_axes in zip(
      named_leaves(matrices), treedef.flatten_up_to(axes), strict=True
    )
  }
  others = {
    name: (
      'vectors' if is_vector(name, param) else 'others',
      str(tuple(param.shape)),
      '-',
      '-',
    )
    for name, param in named_leaves(params)
  }
  header = ('parameter', 'part', 'shape', 'matrices', 'products')
  return _table([header, *((k, *rows.get(k, v)) for k, v in others.items())])


def _check_parts(parts: Any) -> None:
  """Raises ``ValueError`` unless parts are settings of ``describe``."""
  known = inspect.signature(_rows).parameters.keys() - {'params'}

  def fits(settings: Any) -> bool:
    is_mapping = isinstance(settings, Mapping)
    return settings is None or (is_mapping and settings.keys() <= known)

  if not isinstance(parts, Mapping) or not all(map(fits, parts.values())):
    raise ValueError(
      'parts must map each label to None or to a dictionary of arguments of '
      f'describe ({", ".join(sorted(known))}), got {parts!r}.'
    )


def _shapes(params: Any) -> dict[str, _Row]:
  """Returns the row of each parameter that has no trust ratio."""
  return {
    name: _Row((str(tuple(param.shape)), '-', '-', '-'))
    for name, param in named_leaves(params)
  }


def _rows(
  params: Any,
  *,
  weight_dimension_numbers: WeightDimensionNumbers = None,
  ratios: Collection[str] = RATIOS,
  trust_ratio_mask: Any = None,
  mask: Any = None,
  weight_decay: optax.ScalarOrSchedule | None = None,
) -> dict[str, _Row]:
  """Returns the row of each parameter by its name."""
  ratios = check_ratios(ratios)
  if weight_decay is not None:
    weight_decay = arguments.weight_decay('weight_decay', weight_decay)
  treedef: Any = jax.tree.structure(params)
  axes = scaled_axes(weight_dimension_numbers, trust_ratio_mask, params)
  has_decay = callable(weight_decay) or weight_decay != 0
  return {
    name: _Row(
      (
        str(tuple(param.shape)),
        *_matrices_and_ratios(param.shape, leaf_axes, ratios),
        'yes' if decayed and has_decay else 'no',
      ),
      _is_single(param.shape, leaf_axes),
    )
    for (name, param), leaf_axes, decayed in zip(
      named_leaves(params),
      treedef.flatten_up_to(axes),
      treedef.flatten_up_to(broadcast_mask('mask', mask, params)),
      strict=True,
    )
  }


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


def _is_single(shape: tuple[int, ...], axes: MatrixAxes | None) -> bool:
  if axes is None:
    return False
  return math.prod(shape[axis] for axis in axes.rows + axes.columns) == 1


def _note_of_signs(rows: Mapping[str, _Row]) -> str:
  """Returns a line about the parameters that cannot change sign."""
  names = [name for name, row in rows.items() if row.is_single]
  if not names:
    return ''
  return (
    '\nOf one element, which cannot change sign unless min_norm is above zero: '
    f'{", ".join(names)}'
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
