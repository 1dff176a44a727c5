"""Which axes of a parameter are the rows and the columns of its matrices."""

from collections.abc import Callable, Sequence
import inspect
from typing import Any, NamedTuple, TypeAlias
import warnings

import jax
import optax

from merit_optax._arguments import is_integer
from merit_optax._paths import find_nearest, path_namer

DimensionNumbers = optax.contrib.MuonDimensionNumbers
WeightDimensionNumbers: TypeAlias = (
  optax.contrib.MuonDimensionNumbers
  | optax.Params
  | Callable[[optax.Params], Any]
  | None
)
_NOT_GIVEN = object()
_LIBRARIES = ('merit_optax', 'optax', 'jax', 'flax')


class MatrixAxes(NamedTuple):
  """Axes of a parameter's matrices; each index of the others is a matrix.

  Attributes:
    rows: Axes that together count the rows of a matrix. If there are none, a
      matrix has the weight-wise ratio only.
    columns: Axes that together count its columns.
  """

  rows: tuple[int, ...]
  columns: tuple[int, ...]


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
  return _axes_of_each(_spec_finder(dimension_numbers, params), params)


def _axes_of_each(
  find_spec: Callable[[tuple[Any, ...]], Any], params: Any
) -> Any:
  """Returns the axes of each parameter, whose spec a function finds."""
  name = path_namer(params)

  def axes(path: tuple[Any, ...], param: jax.Array) -> MatrixAxes:
    try:
      return _axes(len(param.shape), find_spec(path))
    except _SpecError as error:
      raise ValueError(
        f'weight_dimension_numbers of the parameter {name(path)!r} of '
        f'shape {param.shape} {error}.'
      ) from None

  return jax.tree_util.tree_map_with_path(axes, params)


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
      are its rows and columns.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  if not leaves:
    return
  find_spec = _spec_finder(dimension_numbers, params)
  _axes_of_each(find_spec, params)
  name = path_namer(params)
  guessed = [
    f'{name(path)} {leaf.shape}'
    for path, leaf in leaves
    if len(leaf.shape) > 2 and find_spec(path) is _NOT_GIVEN
  ]
  if guessed:
    warnings.warn(
      'These parameters have more than two axes and are taken as stacks of '
      f'matrices over their last two: {", ".join(guessed)}. That is wrong for '
      'attention kernels of shape (model, heads, head_dim), for example. Pass '
      'weight_dimension_numbers to say what they are; '
      'merit_optax.flax_dimension_numbers(params) makes them for Flax modules.',
      stacklevel=_level_of_the_caller(),
    )


def _level_of_the_caller() -> int:
  """Returns the stacklevel, for its caller, of the code that uses optax."""
  frame, level = inspect.currentframe(), 0
  while frame is not None and frame.f_back is not None:
    if frame.f_globals.get('__name__', '').split('.')[0] not in _LIBRARIES:
      break
    frame, level = frame.f_back, level + 1
  return level


class _SpecError(Exception):
  """What is wrong with a spec, to follow its name in a sentence."""


def _spec_finder(
  dimension_numbers: Any, params: Any
) -> Callable[[tuple[Any, ...]], Any]:
  """Returns a function from the path of a parameter to its spec."""
  if _is_function(dimension_numbers):
    dimension_numbers = dimension_numbers(params)
  if dimension_numbers is None:
    return lambda path: _NOT_GIVEN
  nearest = find_nearest(dimension_numbers, is_leaf=_is_spec)

  def find(path: tuple[Any, ...]) -> Any:
    try:
      return nearest(path)
    except KeyError:
      message = (
        'are missing: the tree of specs has no entry for it that is an '
        'optax.contrib.MuonDimensionNumbers or None'
      )
      raise _SpecError(message) from None

  return find


def _is_function(dimension_numbers: Any) -> bool:
  # A tree of specs may be callable too, if it has the type of an Equinox model.
  leaves = jax.tree.leaves(dimension_numbers, is_leaf=_is_spec)
  return callable(dimension_numbers) and not any(map(_is_spec, leaves))


def _is_spec(x: Any) -> bool:
  return x is None or isinstance(x, DimensionNumbers)


def _axes(ndim: int, spec: Any) -> MatrixAxes:
  """Returns the axes that a spec means for a parameter of some rank."""
  if spec is _NOT_GIVEN and ndim > 1:
    return MatrixAxes(rows=(ndim - 2,), columns=(ndim - 1,))
  if spec is _NOT_GIVEN or spec is None:
    return MatrixAxes(rows=(), columns=tuple(range(ndim)))
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


def _as_tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
  return tuple(axes) if isinstance(axes, Sequence) else (axes,)


def _normalize(axes: tuple[int, ...], ndim: int) -> tuple[int, ...]:
  """Returns axes as numbers in [0, ndim)."""
  for axis in axes:
    if not is_integer(axis) or not -ndim <= axis < ndim:
      raise _SpecError(f'must name axes in [{-ndim}, {ndim}), got {axis!r}')
  return tuple(int(axis) % ndim for axis in axes)
