"""Attention statistics: the largest logits and the entropy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax._internal.sharding import unsplit

_QUERIES_AT_ONCE = 128


class AttentionStatistics(NamedTuple):
  """Statistics of the softmax inputs of an attention layer, in float32.

  Attributes:
    max_logit: Largest logit of each head, shape (heads,).
    max_centred_logit: Largest logit of each head after subtracting the mean
      over the keys of its query, shape (heads,). The softmax ignores such a
      shift, which a key bias can add freely.
    entropy: Mean entropy of a query's attention in nats, shape (heads,).
  """

  max_logit: jax.Array
  max_centred_logit: jax.Array
  entropy: jax.Array


def attention_statistics(
  query: jax.Array,
  key: jax.Array,
  *,
  layout: str = 'BTNH',
  is_causal: bool = True,
  scale: Number | None = None,
) -> AttentionStatistics:
  """Measures the logits and the entropy of dot-product attention.

  Computes the logits of plain causal or full attention: padding masks, sliding
  windows, soft-caps and biases added to the logits are not taken into account.
  Logits are computed for a block of queries at a time, never for all pairs of
  positions at once. Where Explicit axes of a mesh split positions or features,
  these are gathered.

  Args:
    query: Queries, after any rotary embedding or norm, with one axis for each
      letter of ``layout``.
    key: Keys, likewise. They may have fewer heads than the queries; groups of
      adjacent query heads then share a key head, as in
      :func:`jax.nn.dot_product_attention`.
    layout: Order of the axes: T for positions, N for heads and H for features
      of a head, each once, and B (batch) at most once, such as ``'BTNH'``,
      ``'BNTH'`` or ``'TNH'``.
    is_causal: Whether a query attends only to keys up to its own position.
    scale: Multiplier of the logits; ``None`` for 1 / sqrt(head features).

  Returns:
    The :class:`AttentionStatistics` of each head of the queries.

  Raises:
    ValueError: If ``layout``, ``scale`` or the shapes are wrong, or queries or
      keys are complex.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> query = key = jnp.ones((1, 4, 2, 16))  # batch, time, heads, features
    >>> print(merit_optax.attention_statistics(query, key).max_logit)
    [4. 4.]
  """
  if scale is not None:
    scale = arguments.number('scale', scale, 'None or a finite number')
  query = _to_btnh('query', query, layout)
  key = _to_btnh('key', key, layout)
  _check_shapes(query, key)
  batch, num_queries, num_heads, features = query.shape
  scale = features**-0.5 if scale is None else scale
  # Heads that share a key stand side by side: (T, B, key heads, group, H).
  grouped = query.astype(jnp.float32).reshape(
    batch, num_queries, key.shape[2], -1, features
  )
  by_time = jnp.moveaxis(grouped * scale, 1, 0)

  def measure(
    position_and_query: tuple[jax.Array, jax.Array],
  ) -> AttentionStatistics:
    position, one_query = position_and_query
    logits = jnp.einsum(
      'bkgh,bskh->bkgs',
      one_query,
      key,
      # Accelerators would round float32 before they multiply.
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )
    visible = jnp.arange(key.shape[1]) <= position
    return _measure(
      logits,
      visible
      if arguments.boolean('is_causal', is_causal)
      else jnp.ones_like(visible),
    )

  measured = jax.lax.map(
    measure,
    (jnp.arange(num_queries), by_time),
    batch_size=min(_QUERIES_AT_ONCE, num_queries),
  )
  per_query = jax.tree.map(
    lambda x: x.reshape(num_queries, batch, num_heads), measured
  )
  return AttentionStatistics(
    max_logit=per_query.max_logit.max((0, 1)),
    max_centred_logit=per_query.max_centred_logit.max((0, 1)),
    entropy=per_query.entropy.mean((0, 1)),
  )


def _measure(logits: jax.Array, visible: jax.Array) -> AttentionStatistics:
  """Returns the statistics of each query's logits, over their last axis."""
  seen = jnp.where(visible, logits, -jnp.inf)
  largest = seen.max(-1)
  # The mean of differences, since a mean of huge logits would be rounded.
  centred = jnp.mean(largest[..., None] - logits, -1, where=visible)
  log_p = jax.nn.log_softmax(seen)
  # A key out of sight has p = 0 and log p = -inf: no surprise. Before the
  # product, or its gradient would be NaN.
  log_p = jnp.where(log_p == -jnp.inf, 0, log_p)
  surprise = jnp.where(visible, -jnp.exp(log_p) * log_p, 0)
  return AttentionStatistics(largest, centred, surprise.sum(-1))


def _to_btnh(name: str, x: jax.Array, layout: str) -> jax.Array:
  """Returns an array with its axes in the order B, T, N, H."""
  is_text = isinstance(layout, str)
  if not is_text or sorted(layout.replace('B', '', 1)) != sorted('TNH'):
    raise ValueError(
      'layout must hold T, N and H once each and B at most once, such as '
      f"'BTNH', got {layout!r}."
    )
  if jnp.iscomplexobj(x):
    raise ValueError(f'{name} must be real, got dtype {x.dtype}.')
  if x.ndim != len(layout):
    raise ValueError(
      f'{name} must have an axis for each letter of {layout!r}, got shape '
      f'{x.shape}.'
    )
  if 'B' not in layout:
    x, layout = x[None], 'B' + layout
  in_order = jnp.transpose(x, [layout.index(axis) for axis in 'BTNH'])
  # Each query needs all keys, and all their features.
  return unsplit(in_order, (1, 3))


def _check_shapes(query: jax.Array, key: jax.Array) -> None:
  """Raises ``ValueError`` unless queries and keys fit each other."""
  fits = query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
  if not fits or query.size == 0 or key.size == 0:
    raise ValueError(
      'query and key must have the same batch and head features and not be '
      f'empty, got (in the order BTNH) {query.shape} and {key.shape}.'
    )
  if query.shape[2] % key.shape[2]:
    raise ValueError(
      f'The number of key heads, {key.shape[2]}, must divide the number of '
      f'query heads, {query.shape[2]}.'
    )
