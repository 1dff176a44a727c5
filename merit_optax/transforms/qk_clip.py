"""QK-clip: bounds attention logits by scaling the weights."""

from collections.abc import Mapping
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal import arguments
from merit_optax._internal.dtypes import common_dtype, widen
from merit_optax._internal.sharding import sharded_as, whole
from merit_optax._internal.trees import (
  as_arrays,
  check_shape,
  is_absent,
  nearest_entries,
  path_namer,
)
from merit_optax.matrices.per_parameter import NO_PARAMS_MESSAGE

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


def qk_clip(
  threshold: jax.typing.ArrayLike,
  *,
  query: Mapping[str, AttentionHeads],
  key: Mapping[str, AttentionHeads],
  num_key_heads: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Scales the projections of heads whose attention logits are too large.

  This must be the last transform of a chain. With :math:`S_h` the largest logit
  of head :math:`h` and the threshold :math:`\tau`,

  .. math::

    \gamma_h = \min(1, \tau / S_h) \qquad
    W_{q,h} \leftarrow \sqrt{\gamma_h} \, W_{q,h} \qquad
    W_{k,h} \leftarrow \sqrt{\gamma_h} \, W_{k,h}

  after the step that the preceding chain takes, and likewise for biases. The
  logits of the measured batch thus become at most :math:`\tau`, except for the
  effect of the step itself and of changes in the layers below. Heads that share
  a key are scaled together, by the largest of their logits. Heads below the
  threshold, and those whose largest logit is NaN or infinite, get the incoming
  updates, bit for bit.

  Rotary embeddings are supported, because they rotate queries and keys without
  changing their length. A norm of queries and keys (QK-norm) is not, because
  after it the scale of a projection has no effect: ``init`` refuses parameters
  that are named like one. Two other cases are not supported: keys that are
  partly shared by all heads (multi-head latent attention), and logits with an
  added bias (ALiBi, T5), which is not scaled. For parameters in bfloat16 the
  bound holds only up to their rounding: keep float32 master weights.

  Args:
    threshold: Largest logit allowed, > 0; 100 in Kimi K2.
    query: Where the heads of queries are stored, by regular expressions that
      are searched for in the path of a parameter, such as
      ``{'query/': AttentionHeads(-2)}`` for kernels of shape (model, heads,
      head_dim) and their biases. The first match is used.
    key: Where the heads of keys are stored. For a fused projection, use the
      same paths as in ``query`` with another ``part``.
    num_key_heads: Number of key heads, if groups of adjacent query heads share
      them; ``None`` for as many as query heads.

  Returns:
    A stateless :class:`optax.GradientTransformationExtraArgs`. Its ``update``
    takes ``max_logits`` and then needs ``params``: a real array of shape
    (heads,), or (layers, heads) if ``layers`` is given, such as ``max_logit``
    of :func:`merit_optax.attention_statistics` for each layer, with the maximum
    taken over micro-batches and devices; or a tree of such arrays, whose
    entries apply to all parameters below them. Without it, updates pass
    through. Updates of queries and keys have the dtype to which update and
    parameter promote.

  Raises:
    ValueError: If an argument is invalid; by ``init`` if a pattern matches no
      parameter, axes do not fit the parameters that it matches, queries and
      keys are the same elements, or parameters are named like QK-norm; by
      ``update`` if ``max_logits`` do not fit, or are given without ``params``,
      or with an update of another shape than its parameter.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> import optax
    >>> optimizer = optax.chain(
    ...     merit_optax.merit(
    ...         1e-3,
    ...         weight_dimension_numbers=merit_optax.flax_dimension_numbers),
    ...     merit_optax.qk_clip(
    ...         100.0,
    ...         query={'query/': merit_optax.AttentionHeads(-2)},
    ...         key={'key/': merit_optax.AttentionHeads(-2)},
    ...     ),
    ... )
    >>> params = {name: {'kernel': jnp.full((16, 2, 4), 2.0)}
    ...           for name in ('query', 'key')}
    >>> def attend(params, x):  # The statistics of a layer with two heads.
    ...   query, key = (
    ...       jnp.einsum('btm,mnh->btnh', x, params[name]['kernel'])
    ...       for name in ('query', 'key'))
    ...   return merit_optax.attention_statistics(query, key)
    >>> x = jnp.ones((1, 3, 16))
    >>> print(attend(params, x).max_logit)
    [2048. 2048.]
    >>> gradients = jax.tree.map(jnp.zeros_like, params)  # Yours, of the loss.
    >>> updates, _ = optimizer.update(
    ...     gradients, optimizer.init(params), params,
    ...     max_logits=attend(params, x).max_logit)
    >>> params = optax.apply_updates(params, updates)
    >>> print(attend(params, x).max_logit)
    [100. 100.]

  References:
    Kimi Team, `Kimi K2: Open Agentic Intelligence
    <https://arxiv.org/abs/2507.20534>`_, 2025, section on QK-Clip.
  """
  threshold = arguments.above_zero('threshold', threshold)
  _check_heads('query', query)
  _check_heads('key', key)
  if num_key_heads is not None and not _is_count(num_key_heads):
    raise ValueError(
      'num_key_heads must be an integer >= 1 (named in static_args of '
      f'optax.inject_hyperparams), got {num_key_heads!r}.'
    )

  def init_fn(params: optax.Params) -> optax.EmptyState:
    _check_params(as_arrays(params), query, key)
    return optax.EmptyState()

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
    *,
    max_logits: Any = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del extra_args
    if max_logits is None:
      return updates, state
    if params is None:
      raise ValueError(NO_PARAMS_MESSAGE)
    name_of = path_namer(params)
    found, _ = nearest_entries(max_logits, params)
    logits_of_each = jax.tree.unflatten(jax.tree.structure(params), found)

    def clip(
      path: Any, param: jax.Array, update: jax.Array, found: Any
    ) -> jax.Array:
      name = name_of(path)
      sides = (_matching(query, name), True), (_matching(key, name), False)
      if is_absent(update) or all(heads is None for heads, _ in sides):
        return update
      check_shape(name, param, update)
      factor = jnp.ones((), jnp.float32)
      try:
        logits = _logits(found)
        for heads, is_query in sides:
          if heads is not None:
            scales = _scales(logits, threshold, num_key_heads, is_query)
            factor = factor * _spread(scales, heads, param.shape)
      except _MisfitError as error:
        raise ValueError(
          f'max_logits must fit the parameter {name!r} of '
          f'shape {param.shape}: {error}.'
        ) from None
      return _scaled_update(param, update, factor)

    clipped = jax.tree_util.tree_map_with_path(
      clip, params, updates, logits_of_each
    )
    return clipped, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_count(x: Any) -> bool:
  return arguments.is_integer(x) and x >= 1


def _logits(found: Any) -> jax.Array:
  """Returns the logits of a parameter's heads, on all devices."""
  try:
    logits = jnp.asarray(found)
  except TypeError:  # Nothing is given for it, or no array.
    raise _MisfitError(
      'expected an array of shape (heads,) or (layers, heads), such as '
      '.max_logit of attention_statistics, or a tree of them with one for it'
    ) from None
  if jnp.iscomplexobj(logits):
    raise _MisfitError(f'expected real numbers, got {logits.dtype}')
  if logits.ndim < 1 or not logits.size:
    raise _MisfitError(f'their shape {logits.shape} has no heads')
  return whole(logits)


def _scales(
  max_logits: jax.Array,
  threshold: jax.typing.ArrayLike,
  num_key_heads: int | None,
  is_query: bool,
) -> jax.Array:
  """Returns the square roots of gamma, of each head of queries or of keys."""
  *layers, num_heads = max_logits.shape
  groups = num_key_heads or num_heads
  if num_heads % groups:
    raise _MisfitError(f'{groups} key heads do not divide {num_heads} heads')
  largest = widen(max_logits).reshape(*layers, groups, -1).max(-1)
  is_too_large = (largest > threshold) & jnp.isfinite(largest)
  scales = jnp.sqrt(threshold / jnp.where(is_too_large, largest, threshold))
  return jnp.repeat(scales, num_heads // groups if is_query else 1, axis=-1)


def _scaled_update(
  param: jax.Array, update: jax.Array, factor: jax.Array
) -> jax.Array:
  """Returns the update after which the parameter is scaled."""
  w = widen(param)
  scaled = factor * (w + widen(update)) - w
  # jnp.where takes what is split as the parameter is.
  factor = sharded_as(w, jnp.broadcast_to(factor, w.shape))
  return jnp.where(factor == 1, widen(update), scaled).astype(
    common_dtype(param, update)
  )


class _MisfitError(Exception):
  """What does not fit a parameter, to follow a colon."""


def _check_heads(name: str, patterns: Any) -> None:
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


def _matching(
  patterns: Mapping[str, AttentionHeads], name: str
) -> AttentionHeads | None:
  """Returns what is said of a parameter first, if anything is."""
  return next((x for p, x in patterns.items() if re.search(p, name)), None)


def _check_params(
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
    _check_fit(name, leaf.shape, _matching(query, name), _matching(key, name))


def _check_fit(
  name: str, shape: tuple[int, ...], *sides: AttentionHeads | None
) -> None:
  """Raises ``ValueError`` unless axes fit a shape, and parts lie apart."""
  given = [heads for heads in sides if heads is not None]
  try:
    picked = [_Places.of(heads, shape) for heads in given]
  except _MisfitError as error:
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
    """Returns the places of heads in a shape; raises ``_MisfitError``."""
    named = (
      (heads.axis,) if heads.layers is None else (heads.layers, heads.axis)
    )
    part_axis, where = heads.part or (0, slice(None))
    for axis in (*named, part_axis):
      if not -len(shape) <= axis < len(shape):
        raise _MisfitError(f'{heads} names an axis that is not there')
    axes = tuple(axis % len(shape) for axis in named)
    if len(set(axes)) < len(axes):
      raise _MisfitError(f'{heads} names an axis twice')
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
      raise _MisfitError(
        f'{heads} has a part outside of an axis of size {size}'
      )
    return _Places(axes, part_axis % len(shape), indices)

  def is_apart_from(self, other: '_Places') -> bool:
    """Returns whether two parts share no element."""
    has_axis = self.part_axis is not None and self.part_axis == other.part_axis
    return has_axis and not set(self.indices) & set(other.indices)


def _spread(
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
    raise _MisfitError(
      f'their shape {scales.shape} is not that of the heads of {heads}'
    )
  scales = jnp.repeat(scales, sizes[-1] // num_heads, axis=-1)
  if list(named) != sorted(named):
    scales = scales.T
  others = [axis for axis in range(len(shape)) if axis not in named]
  return factor.at[tuple(index)].set(jnp.expand_dims(scales, others))
