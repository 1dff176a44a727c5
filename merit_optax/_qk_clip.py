"""QK-clip: a bound on attention logits, set on the weights."""

from collections.abc import Mapping
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from merit_optax import _arguments
from merit_optax._dimension_numbers import find_nearest, path_name
from merit_optax._norms import widen
from merit_optax._trust_ratio import NO_PARAMS_MESSAGE

_QK_NORM = re.compile(r'(^|[/_])(q|k|qk|query|key)_?(layer_?)?(norm|ln)(/|_|$)')


class AttentionHeads(NamedTuple):
  """Where the heads of queries or of keys lie in a parameter.

  Attributes:
    axis: Axis that counts heads, or features of all heads, those of a head
      beside each other. Negative ones suit a kernel and its bias alike.
    layers: Axis that counts scanned layers, if there is one.
    part: Axis of a fused projection along which queries and keys lie apart, and
      which indices or slice of it are meant, such as ``(-2, 0)``, or
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

  The last transform of a chain. With :math:`S_h` the largest logit of head
  :math:`h` and the threshold :math:`\tau`,

  .. math::

    \gamma_h = \min(1, \tau / S_h) \qquad
    W_{q,h} \leftarrow \sqrt{\gamma_h} \, W_{q,h} \qquad
    W_{k,h} \leftarrow \sqrt{\gamma_h} \, W_{k,h}

  after the step that the chain before it takes, and for biases likewise. So the
  logits of the batch that was measured become :math:`\tau` at most, but for
  what the step itself and changes in layers below do to them. Heads that share
  a key are scaled together, by the largest of their logits. Heads below the
  threshold, and those whose largest logit is NaN or infinite, get the updates
  that they came with, bit for bit.

  Rotary embeddings are fine, since they turn queries and keys and keep their
  length. Not so a norm of queries and keys (QK-norm), behind which the scale of
  a projection changes nothing: ``init`` refuses parameters that are named like
  one. Nor does it suit keys of which a part is shared by all heads (multi-head
  latent attention).

  Args:
    threshold: Largest logit allowed, > 0; 100 in Kimi K2.
    query: Where heads of queries lie, by a regular expression to search for in
      the path of a parameter, such as ``{'query/': AttentionHeads(-2)}`` for
      kernels of shape (model, heads, head_dim) and their biases.
    key: Where heads of keys lie. In a fused projection the same paths as in
      ``query``, with another ``part``.
    num_key_heads: How many heads the keys have, where queries share them in
      groups of neighbours; ``None`` for as many as the queries.

  Returns:
    A stateless :class:`optax.GradientTransformationExtraArgs`. Its ``update``
    needs ``params``, and takes ``max_logits``: an array of shape (heads,), or
    (layers, heads) if ``layers`` is given, as ``max_logit`` of
    :func:`merit_optax.attention_statistics` for each layer, the maximum over
    micro-batches and devices; or a tree of them whose entries cover the
    parameters below. Without it, updates pass through.

  Raises:
    ValueError: If an argument is wrong; by ``init`` if a pattern matches no
      parameter, or parameters are named like QK-norm; by ``update`` if axes or
      ``max_logits`` do not fit, or it is called without ``params``.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> import optax
    >>> optimizer = optax.chain(
    ...     optax.sgd(0.0),
    ...     merit_optax.qk_clip(
    ...         100.0,
    ...         query={'query/': merit_optax.AttentionHeads(-2)},
    ...         key={'key/': merit_optax.AttentionHeads(-2)},
    ...     ),
    ... )
    >>> params = {name: {'kernel': jnp.ones((1, 2, 1))}
    ...           for name in ('query', 'key')}
    >>> updates, _ = optimizer.update(
    ...     params, optimizer.init(params), params,
    ...     max_logits=jnp.array([50.0, 400.0]))
    >>> params = optax.apply_updates(params, updates)
    >>> print(params['query']['kernel'].ravel())
    [1.  0.5]

  References:
    Kimi Team, `Kimi K2: Open Agentic Intelligence
    <https://arxiv.org/abs/2507.20534>`_, 2025, section on QK-Clip.
  """
  _arguments.check_above_zero('threshold', threshold)

  def init_fn(params: optax.Params) -> optax.EmptyState:
    _check_names(params, {*query, *key})
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
    find = find_nearest(max_logits)

    def clip(path: Any, param: jax.Array, update: jax.Array) -> jax.Array:
      name, factor = path_name(path), jnp.ones((), jnp.float32)
      for patterns, is_query in ((query, True), (key, False)):
        for heads in _matching(patterns, name):
          try:
            scales = _scales(find(path), threshold, num_key_heads, is_query)
            factor = factor * _spread(scales, heads, param.shape)
          except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
              f'max_logits must fit the parameter {name!r} of shape '
              f'{param.shape} with {heads}: {error}.'
            ) from None
      return _scaled_update(param, update, factor)

    return jax.tree_util.tree_map_with_path(clip, params, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _matching(
  patterns: Mapping[str, AttentionHeads], name: str
) -> list[AttentionHeads]:
  """Returns what is said of a parameter: one entry, or none."""
  return [x for pattern, x in patterns.items() if re.search(pattern, name)][:1]


def _check_names(params: Any, patterns: set[str]) -> None:
  """Raises ``ValueError`` for patterns without a match, and for QK-norm."""
  paths = jax.tree_util.tree_leaves_with_path(params)
  names = [path_name(path) for path, _ in paths]
  if names in ([], ['']):  # A placeholder of optax.tree.map_params.
    return
  unused = [p for p in patterns if not any(re.search(p, n) for n in names)]
  if unused:
    raise ValueError(
      'query and key must match a path each, got patterns that match none: '
      f'{sorted(unused)}.'
    )
  norms = [name for name in names if _QK_NORM.search(name)]
  if norms:
    raise ValueError(
      'qk_clip cannot bound logits behind QK-norm, where the scale of a '
      f'projection changes nothing. These parameters look like one: {norms}. '
      'Lower their scales instead, or do without one of the two.'
    )


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
    raise ValueError(f'{groups} key heads do not divide {num_heads} heads')
  largest = widen(max_logits).reshape(*layers, groups, -1).max(-1)
  is_too_large = (largest > threshold) & jnp.isfinite(largest)
  scales = jnp.sqrt(threshold / jnp.where(is_too_large, largest, threshold))
  return jnp.repeat(scales, num_heads // groups if is_query else 1, axis=-1)


def _spread(
  scales: jax.Array, heads: AttentionHeads, shape: tuple[int, ...]
) -> jax.Array:
  """Returns the factors of a parameter, of size 1 along all other axes."""
  every_axis = range(len(shape))
  # Negative numbers count from the end, and others raise IndexError.
  named = [every_axis[heads.axis]]
  if heads.layers is not None:
    named.insert(0, every_axis[heads.layers])
  index = [slice(None)] * len(shape)
  part_axis = None
  if heads.part is not None:
    part_axis, where = every_axis[heads.part[0]], heads.part[1]
    if not isinstance(where, slice):
      where = slice(where, where + 1 or None)
    index[part_axis] = where
  factor = jnp.ones(
    [n if i in (*named, part_axis) else 1 for i, n in enumerate(shape)]
  )
  sizes = [factor[tuple(index)].shape[axis] for axis in named]
  *layers, num_heads = scales.shape
  if layers != sizes[:-1] or sizes[-1] % num_heads:
    raise ValueError(f'their shape {scales.shape} is not that of its heads')
  scales = jnp.repeat(scales, sizes[-1] // num_heads, axis=-1)
  if named != sorted(named):
    scales = scales.T
  others = [axis for axis in every_axis if axis not in named]
  return factor.at[tuple(index)].set(jnp.expand_dims(scales, others))


def _scaled_update(
  param: jax.Array, update: jax.Array, factor: jax.Array
) -> jax.Array:
  """Returns the update after which the parameter is scaled."""
  w = widen(param)
  scaled = factor * (w + widen(update)) - w
  dtype = jnp.promote_types(param.dtype, update.dtype)
  return jnp.where(factor == 1, update, scaled).astype(dtype)
