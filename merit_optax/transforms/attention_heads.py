"""Where the heads of queries and keys are stored in a parameter."""

from collections.abc import Mapping
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from merit_optax._internal import arguments
from merit_optax._internal.trees import path_namer

_QK = '(q|k|qk|query|key)'
_QK_NORM = re.compile(
  rf'(^|[/_]){_QK}_?((layer|rms|l2)_?)?(norm|ln)(/|_|$)|norm_{_QK}(/|_|$)',
  re.IGNORECASE,
)


class AttentionHeads(NamedTuple):
  """Where the heads of queries or of keys are stored in a parameter.

  Attributes:
    axis: Axis of the heads, or of the features of all heads if those of each
      head are adjacent (a wrong axis is not detected if the number of heads
      divides its size). Negative axes fit both a kernel and its bias.
    layers: Axis of scanned layers, if there is one.
    part: Axis of a fused projection that separates queries and keys, and the
      index or slice to use along it, such as ``(-2, 0)`` or
      ``(-1, slice(0, 768))``; ``None`` if the parameter holds nothing else.
  """

  axis: int
  layers: int | None = None
  part: tuple[int, int | slice] | None = None


class MisfitError(Exception):
  """What does not fit a parameter, to follow a colon."""


def check_heads(name: str, patterns: Any) -> None:
  """Raises ``ValueError`` unless patterns say where heads lie."""
  is_mapping = isinstance(patterns, Mapping) and len(patterns)
  if not (is_mapping and all(map(_is_heads, patterns.values()))):
    raise ValueError(
      f'{name} must map at least one pattern to an AttentionHeads(axis, '
      'layers, part) of integers, the last a pair of an axis and an index or '
      f'a slice with a positive step, got {patterns!r}.'
    )
  arguments.check_patterns(name, patterns)


def _is_heads(x: Any) -> bool:
  if not isinstance(x, AttentionHeads):
    return False
  axes = [x.axis] if x.layers is None else [x.axis, x.layers]
  if x.part is not None:
    if not isinstance(x.part, tuple) or len(x.part) != 2:
      return False
    axes.append(x.part[0])
  is_where = x.part is None or _is_index_or_slice(x.part[1])
  return is_where and all(map(arguments.is_integer, axes))


def _is_index_or_slice(x: Any) -> bool:
  if not isinstance(x, slice):
    return arguments.is_integer(x)
  given = [n for n in (x.start, x.stop) if n is not None]
  is_step = x.step is None or (arguments.is_integer(x.step) and x.step > 0)
  return is_step and all(map(arguments.is_integer, given))


def matching(
  patterns: Mapping[str, AttentionHeads], name: str
) -> AttentionHeads | None:
  """Returns what is said of a parameter first, if anything is."""
  return next((x for p, x in patterns.items() if re.search(p, name)), None)


def check_params(
  params: Any,
  query: Mapping[str, AttentionHeads],
  key: Mapping[str, AttentionHeads],
) -> None:
  """Raises ``ValueError`` for what does not fit, and for QK-norm."""
  name_of = path_namer(params)
  leaves = [
    (name_of(path), leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  ]
  names = [name for name, _ in leaves]
  if names in ([], ['']):  # A placeholder of optax.tree.map_params.
    return
  patterns = {*query, *key}
  unused = [p for p in patterns if not any(re.search(p, n) for n in names)]
  if unused:
    raise ValueError(
      'query and key must match a path each, got patterns that match none: '
      f'{sorted(map(str, unused))}.'
    )
  norms = [name for name in names if _QK_NORM.search(name)]
  if norms:
    raise ValueError(
      'qk_clip cannot bound logits behind QK-norm, where the scale of a '
      f'projection changes nothing. These parameters look like one: {norms}. '
      'Lower their scales instead, or do without one of the two; a norm in '
      'front of the projections needs another name.'
    )
  for name, leaf in leaves:
    _check_fit(name, leaf.shape, matching(query, name), matching(key, name))


def _check_fit(
  name: str, shape: tuple[int, ...], *sides: AttentionHeads | None
) -> None:
  """Raises ``ValueError`` unless axes fit a shape, and parts lie apart."""
  given = [heads for heads in sides if heads is not None]
  try:
    picked = [_Places.of(heads, shape) for heads in given]
  except MisfitError as error:
    raise ValueError(
      f'query and key must fit the parameter {name!r} of shape {shape}: '
      f'{error}.'
    ) from None
  if len(picked) == 2 and not picked[0].is_apart_from(picked[1]):
    raise ValueError(
      f'query and key must name different parts of the parameter {name!r} of '
      f'shape {shape}, got {given[0]} and {given[1]}.'
    )


class _Places(NamedTuple):
  """Axes of a parameter, and the indices of the part that is meant.

  Attributes:
    axes: Axes that count layers, if there are any, and heads.
    part_axis: Axis of the part, None for the whole parameter.
    indices: Indices of the part along it.
  """

  axes: tuple[int, ...]
  part_axis: int | None
  indices: range

  @staticmethod
  def of(heads: AttentionHeads, shape: tuple[int, ...]) -> '_Places':
    """Returns the places of heads in a shape; raises ``MisfitError``."""
    named = (
      (heads.axis,) if heads.layers is None else (heads.layers, heads.axis)
    )
    part_axis, where = heads.part or (0, slice(None))
    for axis in (*named, part_axis):
      if not -len(shape) <= axis < len(shape):
        raise MisfitError(f'{heads} names an axis that is not there')
    axes = tuple(axis % len(shape) for axis in named)
    if len(set(axes)) < len(axes):
      raise MisfitError(f'{heads} names an axis twice')
    if heads.part is None:
      return _Places(axes, None, range(0))
    size = shape[part_axis]
    if isinstance(where, slice):
      is_inside = all(
        -size <= x <= size for x in (where.start or 0, where.stop or 0)
      )
      indices = range(size)[where]
    else:
      is_inside = -size <= where < size
      indices = range(size)[where:][:1] if is_inside else range(0)
    if not is_inside or not indices:
      raise MisfitError(f'{heads} has a part outside of an axis of size {size}')
    return _Places(axes, part_axis % len(shape), indices)

  def is_apart_from(self, other: '_Places') -> bool:
    """Returns whether two parts share no element."""
    has_axis = self.part_axis is not None and self.part_axis == other.part_axis
    return has_axis and not set(self.indices) & set(other.indices)


def spread(
  scales: jax.Array, heads: AttentionHeads, shape: tuple[int, ...]
) -> jax.Array:
  """Returns the factors of a parameter, of size 1 along all other axes."""
  places = _Places.of(heads, shape)
  named, index = places.axes, [slice(None)] * len(shape)
  if places.part_axis is not None:
    part = places.indices
    index[places.part_axis] = slice(part.start, part.stop, part.step)
  kept = {*named, places.part_axis}
  factor = jnp.ones([n if i in kept else 1 for i, n in enumerate(shape)])
  sizes = [factor[tuple(index)].shape[axis] for axis in named]
  *layers, num_heads = scales.shape
  if layers != sizes[:-1] or sizes[-1] % num_heads:
    raise MisfitError(
      f'their shape {scales.shape} is not that of the heads of {heads}'
    )
  scales = jnp.repeat(scales, sizes[-1] // num_heads, axis=-1)
  if list(named) != sorted(named):
    scales = scales.T
  others = [axis for axis in range(len(shape)) if axis not in named]
  return factor.at[tuple(index)].set(jnp.expand_dims(scales, others))
