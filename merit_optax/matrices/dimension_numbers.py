"""Which axes of a parameter are the rows and the columns of its matrices."""

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any, NamedTuple, TypeAlias
import warnings

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal.arguments import is_integer
from merit_optax._internal.readings import record
from merit_optax._internal.trees import (
  MISSING,
  is_function,
  nearest_entries,
  path_namer,
)

DimensionNumbers = optax.contrib.MuonDimensionNumbers
_NOT_GIVEN = object()


class FusedDimensionNumbers(NamedTuple):
  """Axes of several matrices that lie side by side in one kernel.

  Each of them, such as those of queries, keys and values, is a matrix of its
  own. On its own, a part with small gradients takes steps as large as the
  others do; in one matrix, Muon gives it small ones.

  Attributes:
    reduction_axis: Axes of the rows, as in
      :class:`optax.contrib.MuonDimensionNumbers`.
    output_axis: Axes of the columns, likewise.
    parts: Number of equal parts along the last of ``output_axis``, or their
      sizes along it, such as ``(64, 16, 16)`` for grouped queries.
  """

  reduction_axis: int | Sequence[int]
  output_axis: int | Sequence[int]
  parts: int | Sequence[int]


Spec: TypeAlias = optax.contrib.MuonDimensionNumbers | FusedDimensionNumbers
# A spec for all (a sequence too), a (prefix) tree of them, or a function from
# parameters to these.
WeightDimensionNumbers: TypeAlias = (
  Sequence[Any] | Mapping[Any, Any] | Callable[[Any], Any] | None
)


class MatrixAxes(NamedTuple):
  """Axes of a parameter's matrices; each index of the others is a matrix.

  Attributes:
    rows: Axes that together count the rows of a matrix. If there are none, a
      matrix has the weight-wise ratio only.
    columns: Axes that together count its columns.
    parts: Sizes along the last of ``columns`` of matrices side by side; none
      for a single one.
  """

  rows: tuple[int, ...]
  columns: tuple[int, ...]
  parts: tuple[int, ...] = ()

  @property
  def single(self) -> 'MatrixAxes':
    """The axes of each of the arrays that :meth:`split` returns."""
    return self._replace(parts=())

  def split(self, x: jax.Array) -> list[jax.Array]:
    """Returns the arrays of matrices that lie side by side, mostly one."""
    if not self.parts:
      return [x]
    ends = list(itertools.accumulate(self.parts))[:-1]
    return jnp.split(x, ends, axis=self.columns[-1])

  def join(self, parts: Sequence[jax.Array]) -> jax.Array:
    """Returns what was split as one array."""
    if not self.parts:
      return parts[0]
    return jnp.concatenate(parts, axis=self.columns[-1])


def matrix_axes(dimension_numbers: Any, params: Any) -> Any:
  """Returns the :class:`MatrixAxes` of each parameter.

  Args:
    dimension_numbers: ``None``, one spec, a (prefix) tree of specs, or a
      function from parameters to one of these.
    params: Tree of arrays, or of their shapes.

  Returns:
    Tree like ``params``.

  Raises:
    ValueError: If a parameter has no spec, or one that does not fit it.
  """
  specs, _ = _specs(dimension_numbers, params)
  axes = _axes_of_each(specs, params)
  return jax.tree.unflatten(jax.tree.structure(params), axes)


def _axes_of_each(specs: list[Any], params: Any) -> list[MatrixAxes]:
  """Returns the axes of each parameter, given the spec of each."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  name = path_namer(params)
  axes = []
  for (path, param), spec in zip(leaves, specs, strict=True):
    try:
      axes.append(_axes(tuple(param.shape), spec))
    except _SpecError as error:
      raise ValueError(
        f'weight_dimension_numbers of the parameter {name(path)!r} of '
        f'shape {param.shape} {error}.'
      ) from None
  return axes


def check_params(dimension_numbers: Any, params: Any) -> None:
  """Checks specs against parameters, and warns of guesses.

  Args:
    dimension_numbers: As :func:`matrix_axes` takes them.
    params: Tree of arrays. One without leaves is let pass, since
      ``optax.tree.map_params`` passes a placeholder.

  Raises:
    ValueError: If a parameter has no spec, or one that does not fit it.

  Warns:
    UserWarning: If nothing says which axes of a parameter with more than two
      are its rows and columns, or if a spec is of no parameter.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  if not leaves:
    return
  specs, unused = _specs(dimension_numbers, params)
  record('axes', params, _axes_of_each(specs, params))
  if unused:
    warnings.warn(
      'weight_dimension_numbers has specs for what is no parameter: '
      f'{", ".join(unused)}.',
      stacklevel=2,
    )
  name = path_namer(params)
  guessed = [
    f'{name(path)} {leaf.shape}'
    for (path, leaf), spec in zip(leaves, specs, strict=True)
    if spec is _NOT_GIVEN and len(leaf.shape) > 2
  ]
  if guessed:
    warnings.warn(
      'These parameters have more than two axes and are taken as stacks of '
      f'matrices over their last two: {", ".join(guessed)}. That is wrong for '
      'attention kernels of shape (model, heads, head_dim), for example. Pass '
      'weight_dimension_numbers to say what they are; '
      'merit_optax.flax_dimension_numbers(params) makes them for Flax modules.',
      stacklevel=2,
    )


class _SpecError(Exception):
  """What is wrong with a spec, to follow its name in a sentence."""


def _specs(dimension_numbers: Any, params: Any) -> tuple[list[Any], list[str]]:
  """Returns the spec of each parameter, and the names that no parameter has."""
  if isinstance(dimension_numbers, type):
    raise ValueError(
      'weight_dimension_numbers must be specs, or a function from parameters '
      f'to specs, got the class {dimension_numbers.__name__}.'
    )
  if is_function(dimension_numbers, params):
    dimension_numbers = dimension_numbers(params)
  if dimension_numbers is None:
    return [_NOT_GIVEN] * len(jax.tree.leaves(params)), []
  return nearest_entries(dimension_numbers, params, is_leaf=_is_spec)


def _is_spec(x: Any) -> bool:
  kinds = DimensionNumbers, FusedDimensionNumbers
  return x is None or isinstance(x, kinds)


def _axes(shape: tuple[int, ...], spec: Any) -> MatrixAxes:
  """Returns the axes that a spec means for a parameter of some shape."""
  ndim = len(shape)
  if spec is _NOT_GIVEN and ndim > 1:
    return MatrixAxes(rows=(ndim - 2,), columns=(ndim - 1,))
  if spec is _NOT_GIVEN or spec is None:
    return MatrixAxes(rows=(), columns=tuple(range(ndim)))
  if spec is MISSING:
    raise _SpecError(
      'are missing: the tree of specs has no entry for it that is an '
      'optax.contrib.MuonDimensionNumbers or None'
    )
  if isinstance(spec, FusedDimensionNumbers):
    axes = _axes(shape, DimensionNumbers(*spec[:2]))
    return axes._replace(parts=_sizes_of_parts(shape, axes, spec))
  if not isinstance(spec, DimensionNumbers):
    raise _SpecError(
      f'must be an optax.contrib.MuonDimensionNumbers or None, got {spec!r}'
    )
  if ndim < 2 and any(map(_as_tuple, spec)):
    return MatrixAxes(rows=(), columns=tuple(range(ndim)))
  rows, columns = (_normalize(axes, ndim) for axes in map(_as_tuple, spec))
  if len({*rows, *columns}) < len(rows + columns):
    raise _SpecError(f'must name axes, each once, got {spec}')
  return MatrixAxes(rows, columns) if columns else MatrixAxes((), rows)


def _sizes_of_parts(
  shape: tuple[int, ...], axes: MatrixAxes, spec: FusedDimensionNumbers
) -> tuple[int, ...]:
  """Returns the sizes of the parts of a fused kernel."""
  size = shape[axes.columns[-1]] if axes.rows else 0
  given: Any = spec.parts
  if is_integer(given) and given > 0 and size % given == 0:
    given = (size // given,) * int(given)
  is_valid = isinstance(given, Sequence) and all(map(is_integer, given))
  if not is_valid or min(given, default=0) < 1 or sum(given) != size:
    raise _SpecError(
      'must have parts that divide the last of its columns, or sizes that add '
      f'up to it, got {spec}'
    )
  return tuple(given)


def _as_tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
  return tuple(axes) if isinstance(axes, Sequence) else (axes,)


def _normalize(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
  """Returns axes as numbers in [0, ndim)."""
  for axis in axes:
    if not is_integer(axis) or not -ndim <= axis < ndim:
      raise _SpecError(f'must name axes in [{-ndim}, {ndim}), got {axis!r}')
  return tuple(int(axis) % ndim for axis in axes)
