"""QK-clip: bounds attention logits by scaling the weights."""

from collections.abc import Mapping
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax._internal.dtypes import common_dtype, widen
from merit_optax._internal.sharding import sharded_as, unsplit
from merit_optax._internal.trees import (
  as_arrays,
  check_shape,
  is_absent,
  named_leaves,
  nearest_entries,
  path_namer,
)
from merit_optax.matrices.per_parameter import NO_PARAMS_MESSAGE


class AttentionHeads(NamedTuple):
  """Where the heads of queries or of keys are stored in a parameter.

  Attributes:
    axis: Axis of the heads, or of the features of all heads if those of each
      head are adjacent (a wrong axis is not detected if the number of heads
      divides its size). Negative axes fit a kernel, its bias, and scanned
      layers of both.
    part: Part of the axis that holds them, for a projection that is fused along
      it, such as ``slice(0, 768)``; ``None`` for all of it.
  """

  axis: int
  part: slice | None = None


def qk_clip(
  threshold: Number,
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
  changing their length. Where keys are partly shared by all heads (multi-head
  latent attention), name the part of the queries that meets them in ``query``
  and in ``key``: it is scaled by both factors. Two cases are not supported: a
  norm of queries and keys (QK-norm), after which the scale of a projection has
  no effect; and logits with an added bias (ALiBi, T5), which is not scaled. For
  parameters in bfloat16 the bound holds only up to their rounding: keep float32
  master weights.

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
    (heads,), or (layers, heads) for parameters whose first axis is that of
    scanned layers, such as ``max_logit`` of
    :func:`merit_optax.attention_statistics` for each layer, with the maximum
    taken over micro-batches and devices; or a tree of such arrays, whose
    entries apply to all parameters below them. Without it, updates pass
    through. Updates of queries and keys have the dtype to which update and
    parameter promote.

  Raises:
    ValueError: If an argument is invalid; by ``init`` if a pattern matches no
      parameter, or axes and parts do not fit a parameter that it matches; by
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
  for name, patterns in (('query', query), ('key', key)):
    _check_patterns(name, patterns)
  if num_key_heads is not None:
    arguments.check_count('num_key_heads', num_key_heads)

  def init_fn(params: optax.Params) -> optax.EmptyState:
    leaves = named_leaves(as_arrays(params))
    # Placeholders of optax.tree.map_params have no leaves, or no names.
    if [name for name, _ in leaves] not in ([], ['']):
      _check_fit('query', query, leaves)
      _check_fit('key', key, leaves)
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

    def clip(path: Any, param: Any, update: Any, found: Any) -> Any:
      name = name_of(path)
      of_query, of_key = _matching(query, name), _matching(key, name)
      if is_absent(update) or (of_query is None and of_key is None):
        return update
      check_shape(name, param, update)
      factor = jnp.ones((), jnp.float32)
      try:
        scales = _scales(_logits(found), threshold, num_key_heads)
        for heads, of_side in zip((of_query, of_key), scales, strict=True):
          if heads is not None:
            factor = factor * _factor(of_side, heads, param.shape)
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


class _MisfitError(Exception):
  """What does not fit a parameter, to follow a colon."""


def _logits(found: Any) -> jax.Array:
  """Returns the logits of a parameter's heads, on all devices."""
  try:
    logits = jnp.asarray(found)
  except TypeError:  # Nothing is given for it, or no array.
    logits = jnp.zeros(())
  if logits.ndim not in (1, 2) or not logits.size or jnp.iscomplexobj(logits):
    raise _MisfitError(
      'expected a real array of shape (heads,) or (layers, heads), such as '
      '.max_logit of attention_statistics, or a tree of them with one for it'
    )
  return unsplit(logits)


def _scales(
  max_logits: jax.Array,
  threshold: Number,
  num_key_heads: int | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the square roots of gamma, of the heads of queries and of keys."""
  *layers, num_heads = max_logits.shape
  groups = num_key_heads or num_heads
  if num_heads % groups:
    raise _MisfitError(f'{groups} key heads do not divide {num_heads} heads')
  largest = widen(max_logits).reshape(*layers, groups, -1).max(-1)
  is_too_large = (largest > threshold) & jnp.isfinite(largest)
  scales = jnp.sqrt(threshold / jnp.where(is_too_large, largest, threshold))
  return jnp.repeat(scales, num_heads // groups, axis=-1), scales


def _factor(
  scales: jax.Array, heads: AttentionHeads, shape: tuple[int, ...]
) -> jax.Array:
  """Returns the factors of a parameter, of size 1 along all other axes."""
  axis, start, stop = _span(heads, shape)
  *layers, num_heads = scales.shape
  fits = not layers or (axis > 0 and layers == [shape[0]])
  if not fits or (stop - start) % num_heads:
    raise _MisfitError(
      f'their shape {scales.shape} is not that of the heads of {heads}'
    )
  along = jnp.repeat(scales, (stop - start) // num_heads, axis=-1)
  padding = [(0, 0)] * len(layers) + [(start, shape[axis] - stop)]
  kept = {0, axis} if layers else {axis}
  return jnp.expand_dims(
    jnp.pad(along, padding, constant_values=1),
    [i for i in range(len(shape)) if i not in kept],
  )


def _span(
  heads: AttentionHeads, shape: tuple[int, ...]
) -> tuple[int, int, int]:
  """Returns the axis of heads, and where they begin and end along it."""
  if not -len(shape) <= heads.axis < len(shape):
    raise _MisfitError(f'{heads} names an axis that is not there')
  axis = heads.axis % len(shape)
  part = heads.part or slice(None)
  start, stop, step = part.indices(shape[axis])
  if start >= stop or step != 1 or (part.stop or 0) > shape[axis]:
    raise _MisfitError(f'{heads} names no part of an axis of {shape[axis]}')
  return axis, start, stop


def _scaled_update(
  param: jax.Array, update: jax.Array, factor: jax.Array
) -> jax.Array:
  """Returns the update after which the parameter is scaled."""
  w = widen(param)
  scaled = factor * (w + widen(update)) - w
  # jnp.where takes arrays that are split as the parameter is.
  factor = sharded_as(w, jnp.broadcast_to(factor, w.shape))
  return jnp.where(factor == 1, widen(update), scaled).astype(
    common_dtype(param, update)
  )


def _check_patterns(name: str, patterns: Any) -> None:
  """Raises ``ValueError`` unless patterns say where heads lie."""
  arguments.check_mapping(name, patterns)
  heads = patterns.values()
  if not heads or not all(isinstance(x, AttentionHeads) for x in heads):
    raise ValueError(
      f'{name} must map at least one pattern to an AttentionHeads, got '
      f'{patterns!r}.'
    )


def _matching(
  patterns: Mapping[str, AttentionHeads], name: str
) -> AttentionHeads | None:
  """Returns the entry of the first pattern found in a path, or ``None``."""
  return next((x for p, x in patterns.items() if re.search(p, name)), None)


def _check_fit(
  argument: str,
  patterns: Mapping[str, AttentionHeads],
  leaves: list[tuple[str, Any]],
) -> None:
  """Raises ``ValueError`` for patterns and heads that fit no parameter."""
  for pattern in patterns:
    if not any(re.search(pattern, name) for name, _ in leaves):
      raise ValueError(f'{argument} must match a path, got {pattern!r}.')
  for name, leaf in leaves:
    heads = _matching(patterns, name)
    try:
      _ = heads and _span(heads, leaf.shape)
    except _MisfitError as error:
      raise ValueError(
        f'{argument} must fit the parameter {name!r} of shape {leaf.shape}: '
        f'{error}.'
      ) from None
