"""Dimension numbers of Flax modules, from the paths of their parameters."""

from collections.abc import Collection, Mapping, Sequence
import operator
import re
from typing import Any, TypeAlias

import jax

from merit_optax._internal.arguments import check_mapping, is_integer
from merit_optax._internal.trees import as_arrays, is_absent, path_namer
from merit_optax.matrices.dimension_numbers import (
  DimensionNumbers,
  FusedDimensionNumbers,
  Spec,
)

# Their keys are regular expressions, as text or compiled.
Specs: TypeAlias = Mapping[Any, Spec | None]
Counts: TypeAlias = Mapping[Any, int | Sequence[int]]

_ATTENTION_INPUT = re.compile(r'(^|_)(query|key|value|q|k|v)(_proj)?$')
_ATTENTION_OUTPUT = re.compile(r'(^|_)(out|o)(_proj)?$')
_CONVOLUTION = re.compile(r'((^|_)c|C)onv(olution|transpose)?(?![a-z])')
_VECTOR = re.compile(r'(^|_)(bias|scale)$')


def flax_dimension_numbers(
  params: Any,
  *,
  stacked: Counts | None = None,
  overrides: Specs | None = None,
  fused: Counts | None = None,
) -> Any:
  """Creates the dimension numbers of Flax modules (NNX or Linen).

  A parameter is recognized by the last names of its path, and by its axes other
  than those that ``stacked`` names:

  - ``bias``, ``scale`` (also ``q_bias``, ...), and others with at most one axis
    but kernels and embeddings: the weight-wise ratio over all axes;
  - others with two axes, whatever the name: the first are rows, the second are
    columns;
  - ``kernel`` with three axes below ``query``, ``key`` or ``value`` (also
    ``q``, ``q_proj``, ...), of shape (model, heads, head_dim): one matrix of
    model rows and heads times head_dim columns; below ``out`` (also ``o``,
    ``out_proj``, ...), of shape (heads, head_dim, model), the reverse;
  - ``kernel`` with three or more axes below a name that contains the word
    ``conv`` (``Conv_0``, ``conv1``, ``patch_conv``): windows and inputs are
    rows, outputs are columns.

  A stack of layers or experts that ``stacked`` does not name can look like an
  attention or convolution kernel. The bias beside a kernel tells them apart:
  one whose shape contradicts the name is refused, as is one that fits a stack
  of layers too. Without a bias, kernels of queries, keys or values and of the
  output beside them must agree on the heads or their size; one alone whose
  heads are as wide as the model is refused, since its second axis may count
  layers. :func:`merit_optax.describe` shows how each parameter is treated.

  Args:
    params: Tree of arrays, or of their shapes: a Linen ``params`` collection or
      ``nnx.state(model, nnx.Param)``, optionally after ``nnx.to_pure_dict``.
    stacked: Batch axes (layers, experts and so on) by regular expressions that
      are searched for in the path. Values are the number of leading batch axes,
      such as ``{'blocks/': 1, 'blocks/.*experts/': 2}``, or the axes themselves
      if they are not leading, such as ``{'layers/': (1,)}`` for kernels of
      shape (model, layers, heads, head_dim). If several patterns match, the one
      with the most axes is used.
    fused: Matrices that lie side by side in one kernel, by regular expressions:
      their number, or their sizes along the last axis of the outputs, such as
      ``{'c_attn/': 3}`` for queries, keys and values. For weights of shape
      (outputs, inputs), give a :class:`merit_optax.FusedDimensionNumbers` by
      ``overrides``.
    overrides: Dimension numbers by regular expressions that are searched for in
      the path, for parameters that the rules above do not fit. Their axes refer
      to the whole array.

  Returns:
    Tree of :class:`optax.contrib.MuonDimensionNumbers` with the structure of
    ``params``, to be passed as ``weight_dimension_numbers``. Every parameter
    has an explicit spec. You may also pass the function itself, or a
    ``functools.partial`` of it. If parameters are masked out, as in
    :func:`optax.partition`, patterns may match nothing.

  Raises:
    ValueError: If a pattern, an axis or a spec is invalid; if parameters are
      not recognized or patterns match nothing (the message names all of them);
      or if a parameter lacks its stacked axes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {'attention': {'query': {'kernel': jnp.zeros((8, 2, 4))}}}
    >>> specs = merit_optax.flax_dimension_numbers(params)
    >>> print(specs['attention']['query']['kernel'])
    MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))
  """
  stacked, overrides, fused = stacked or {}, overrides or {}, fused or {}
  _check_rules(stacked, overrides)
  check_mapping('fused', fused)
  specs = specs_of_flax(
    params, stacked, overrides, are_matrices=False, other_patterns=(*fused,)
  )
  return _with_parts(specs, params, fused)


def specs_of_flax(
  params: Any,
  stacked: Counts,
  overrides: Specs,
  *,
  are_matrices: bool,
  other_patterns: Collection[Any] = (),
) -> Any:
  """Returns the dimension numbers of :func:`flax_dimension_numbers`.

  If ``are_matrices``, two axes are rows and columns, whatever the name. Each
  pattern of ``other_patterns`` has to match a path too.
  """
  params = as_arrays(params)
  name_of = path_namer(params)
  shapes = {
    name_of(path): tuple(param.shape)
    for path, param in jax.tree_util.tree_leaves_with_path(params)
  }
  unused = [
    pattern
    for pattern in (*stacked, *overrides, *other_patterns)
    if not any(re.search(pattern, name) for name in shapes)
  ]
  has_absent = any(map(is_absent, jax.tree.leaves(params, is_leaf=is_absent)))
  if unused and not has_absent:
    raise ValueError(
      'stacked, overrides and fused must match a path each, got patterns that '
      f'match none: {sorted(map(str, unused))}.'
    )
  unknown: dict[str, str] = {}

  def spec(path: tuple[Any, ...], param: Any) -> Spec | None:
    name, shape = name_of(path), tuple(param.shape)
    for pattern, override in overrides.items():
      if re.search(pattern, name):
        return override
    if are_matrices and len(shape) == 2:
      return DimensionNumbers((0,), (1,))
    axes = _stacked_axes(stacked, name, len(shape))
    found = _recognise(name.split('/'), len(shape), axes)
    doubt = '' if found is None else _contradiction(found, name, shapes)
    if found is None or doubt:
      unknown[name] = f'{name} {shape}{doubt}'
    return found

  specs = jax.tree_util.tree_map_with_path(spec, params)
  if unknown:
    hint = (
      'If axes count layers or experts, say so by stacked, such as '
      'functools.partial(merit_optax.flax_dimension_numbers, '
      "stacked={'blocks/': 1}) for weight_dimension_numbers, or {'blocks/': "
      '(1,)} if they are the second axis. '
    )
    if all(_stacked_axes(stacked, x, len(shapes[x])) for x in unknown):
      hint = ''  # The user has followed it.
    pattern = f'^{re.escape(next(iter(unknown)))}$'
    raise ValueError(
      'params holds parameters that are not recognized: '
      f'{", ".join(unknown.values())}. {hint}Their dimension numbers can be '
      f'given by overrides, such as overrides={{{pattern!r}: '
      'MuonDimensionNumbers(-2, -1)} for matrices over the last two axes.'
    )
  return specs


def _with_parts(specs: Any, params: Any, fused: Counts) -> Any:
  """Returns specs, those of fused kernels with their parts."""
  name_of = path_namer(params)

  def spec(path: tuple[Any, ...], _: Any, single: Any) -> Any:
    for pattern, parts in fused.items():
      if isinstance(single, DimensionNumbers) and re.search(
        pattern, name_of(path)
      ):
        rows, columns = single
        is_vector = isinstance(rows, Sequence) and not rows
        return (
          single if is_vector else FusedDimensionNumbers(rows, columns, parts)
        )
    return single

  return jax.tree_util.tree_map_with_path(spec, params, specs)


def _check_rules(stacked: Any, overrides: Any) -> None:
  """Raises ``ValueError`` for what cannot be patterns, axes or specs."""
  check_mapping('stacked', stacked)
  check_mapping('overrides', overrides)
  for pattern, axes in stacked.items():
    each = axes if isinstance(axes, Sequence) else (axes,)
    if isinstance(axes, str) or not all(map(is_integer, each)):
      raise ValueError(
        f'stacked[{pattern!r}] must be a number of leading axes, or a sequence '
        f'of axes, got {axes!r}.'
      )
  for pattern, spec in overrides.items():
    kinds = DimensionNumbers, FusedDimensionNumbers
    if spec is not None and not isinstance(spec, kinds):
      raise ValueError(
        f'overrides[{pattern!r}] must be an '
        'optax.contrib.MuonDimensionNumbers, a FusedDimensionNumbers or None, '
        f'got {spec!r}.'
      )


def _stacked_axes(stacked: Counts, name: str, ndim: int) -> tuple[int, ...]:
  """Returns the axes of a parameter that count layers and so on.

  Of several patterns that match, the one with the most axes counts.
  """
  found: tuple[int, ...] = ()
  for pattern, given in stacked.items():
    if not re.search(pattern, name):
      continue
    axes = given if isinstance(given, Sequence) else range(given)
    is_negative = not isinstance(given, Sequence) and given < 0
    if is_negative or not all(-ndim <= axis < ndim for axis in axes):
      raise ValueError(
        f'stacked[{pattern!r}] must name some of the {ndim} axes of {name!r}, '
        f'got {given!r}.'
      )
    found = max(found, tuple(axis % ndim for axis in axes), key=len)
  return found


def _recognise(
  names: list[str], ndim: int, stacked: tuple[int, ...]
) -> DimensionNumbers | None:
  """Returns the spec of a parameter, or None if no rule fits."""
  axes = tuple(axis for axis in range(ndim) if axis not in stacked)
  num_rows = _num_row_axes(names, len(axes))
  if num_rows is None:
    return None
  return DimensionNumbers(axes[:num_rows], axes[num_rows:])


def _contradiction(
  spec: DimensionNumbers, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> str:
  """Returns what beside a kernel contradicts its spec, or may do so."""
  *parents, leaf = name.split('/')
  rows, columns = spec
  if leaf != 'kernel' or len(rows + columns) == 2:
    return ''
  shape, bias = shapes[name], shapes.get('/'.join([*parents, 'bias']))
  if bias is not None:
    fits = _fits_bias(spec, shape, bias)
    return '' if fits else f' beside a bias {bias}'
  if len(rows + columns) < len(shape) or _CONVOLUTION.search(parents[-1]):
    return ''
  is_input = len(columns) == 2
  counterpart = _ATTENTION_OUTPUT if is_input else _ATTENTION_INPUT
  others = [
    (other, shapes[other])
    for other in shapes
    if re.fullmatch(
      '/'.join([*map(re.escape, parents[:-1]), '[^/]*/kernel']), other
    )
    and counterpart.search(other.split('/')[-2])
    and len(shapes[other]) == 3
  ]
  # Heads and head features, and their places in the other kernels.
  heads = shape[1:] if is_input else shape[:2]
  place = slice(2) if is_input else slice(1, 3)
  for other, other_shape in others:
    if not any(map(operator.eq, heads, other_shape[place])):
      return f' beside {other} {other_shape}'
  is_wide = not others and shape[0] == shape[2] and shape[1] > 1
  return ', of layers or of heads as wide as the model' if is_wide else ''


def _fits_bias(
  spec: DimensionNumbers, shape: tuple[int, ...], bias: tuple[int, ...]
) -> bool:
  """Returns whether this reading of a kernel, and no other, has such a bias."""

  # Axes that count layers may have another place in the bias.
  def without(axes: Collection[int]) -> list[int]:
    return sorted(n for axis, n in enumerate(shape) if axis not in axes)

  has_heads = len(shape) == 3 and len(spec.output_axis) == 2
  is_stack = has_heads and sorted(bias) == without((1,))
  return sorted(bias) == without(spec.reduction_axis) and not is_stack


def _num_row_axes(names: list[str], ndim: int) -> int | None:
  """Returns how many of the axes are rows, or None if no rule fits."""
  leaf, owner = names[-1], names[-2] if len(names) > 1 else ''
  rules = (
    (_VECTOR.search(leaf), 0),
    (ndim < 2 and leaf not in ('kernel', 'w', 'embedding'), 0),
    (ndim == 2, 1),
    (leaf == 'kernel' and ndim > 2 and _CONVOLUTION.search(owner), ndim - 1),
    (leaf == 'kernel' and ndim == 3 and _ATTENTION_INPUT.search(owner), 1),
    (leaf == 'kernel' and ndim == 3 and _ATTENTION_OUTPUT.search(owner), 2),
  )
  return next((rows for fits, rows in rules if fits), None)
