"""QK-clip on a small attention layer, in all layouts of its projections."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal

_Heads = merit_optax.AttentionHeads
_FEATURES, _HEADS, _HEAD_FEATURES = 8, 4, 6
_QUERY, _KEY = {'query/': _Heads(-2)}, {'key/': _Heads(-2)}


def _projection(seed, heads):
  """Returns kernel and bias, each head larger than the one before."""
  sizes = 2.0 ** np.arange(heads, dtype=np.float32)[:, None]
  return {
    'kernel': sizes * normal(seed, (_FEATURES, heads, _HEAD_FEATURES)),
    'bias': sizes * normal(seed + 1, (heads, _HEAD_FEATURES)),
  }


def _params(key_heads=_HEADS, seed=0):
  return {
    'query': _projection(seed, _HEADS),
    'key': _projection(seed + 10, key_heads),
    'value': {'kernel': normal(seed + 20, (_FEATURES, key_heads, 6))},
  }


@jax.jit
def _max_logits(params):
  """Returns the largest logit of each head on a batch."""
  x = normal(99, (10, _FEATURES))
  q, k = (
    jnp.einsum('td,dnh->tnh', x, params[name]['kernel']) + params[name]['bias']
    for name in ('query', 'key')
  )
  return merit_optax.attention_statistics(q, k, layout='TNH').max_logit


def _qk_clip(threshold=20.0, **options):
  return merit_optax.qk_clip(
    threshold, **{'query': _QUERY, 'key': _KEY} | options
  )


def _clip(params, max_logits, threshold=20.0, updates=None, **options):
  """Returns the parameters after a step and the clip."""
  transform = _qk_clip(threshold, **options)
  if updates is None:
    updates = optax.tree.zeros_like(params)
  state = transform.init(params)

  @jax.jit
  def clip(updates, params, max_logits):
    clipped, _ = transform.update(updates, state, params, max_logits=max_logits)
    return optax.apply_updates(params, clipped)

  return clip(updates, params, max_logits)


# What it bounds.


@pytest.mark.parametrize('key_heads', [_HEADS, 2])
def test_logits_of_the_batch_are_at_most_the_threshold(key_heads):
  params = _params(key_heads)
  before = _max_logits(params)
  threshold = float(jnp.sort(before)[1]) + 1e-3
  clipped = _clip(params, before, threshold, num_key_heads=key_heads)
  after = _max_logits(clipped)
  assert jnp.all(after <= threshold * (1 + 1e-5))
  # The largest of each group that was too large is at the threshold.
  was, now = (x.reshape(key_heads, -1).max(1) for x in (before, after))
  np.testing.assert_allclose(
    now, np.where(was > threshold, threshold, was), rtol=1e-5
  )
  chex.assert_trees_all_equal(clipped['value'], params['value'])


def test_heads_below_the_threshold_move_as_without_the_clip():
  params = _params()
  updates = jax.tree.map(lambda x: 1e-3 * np.sin(x), params)
  transform = _qk_clip()
  max_logits = jnp.array([5.0, 20.0, jnp.nan, jnp.inf])
  same, _ = transform.update(
    updates, transform.init(params), params, max_logits=max_logits
  )
  chex.assert_trees_all_equal(same, updates)
  clipped = _clip(params, jnp.array([5.0, 80.0, 20.0, -99.0]), updates=updates)
  expected = optax.apply_updates(params, updates)
  # sqrt(20 / 80) for one head, of the weights after the step.
  factors = np.array([1, 0.5, 1, 1])[:, None]
  for name in ('query', 'key'):
    for part, w in expected[name].items():
      new = clipped[name][part]
      np.testing.assert_allclose(new, factors * w, rtol=1e-5)
      np.testing.assert_array_equal(
        np.delete(new, 1, axis=-2), np.delete(w, 1, axis=-2)
      )


def test_without_logits_it_does_nothing():
  params, updates = _params(), _params()
  transform = _qk_clip(1.0)
  state = transform.init(params)
  assert transform.update(updates, state, params, value=3.0)[0] is updates
  assert transform.update(updates, state)[0] is updates
  with pytest.raises(ValueError, match='not passing `params`'):
    transform.update(updates, state, max_logits=jnp.ones(_HEADS))


def test_dtypes_stay():
  params = optax.tree.cast(_params(), jnp.bfloat16)
  clipped = _clip(params, jnp.full(_HEADS, 80.0))
  chex.assert_trees_all_equal_shapes_and_dtypes(clipped, params)
  halved = clipped['query']['kernel'].astype(jnp.float32) * 2
  np.testing.assert_allclose(
    halved, params['query']['kernel'].astype(jnp.float32), rtol=1e-2
  )


# Layouts.


def _scanned(layers):
  return jax.tree.map(lambda *x: np.stack(x), *layers)


def test_scanned_layers_equal_separate_ones():
  layers = [_params(seed=seed) for seed in (0, 100, 200)]
  logits = jnp.stack([_max_logits(x) for x in layers])
  together = _clip({'blocks': _scanned(layers)}, logits)
  alone = _scanned([_clip(x, s) for x, s in zip(layers, logits, strict=True)])
  chex.assert_trees_all_equal(together, {'blocks': alone})
  # Separate layers in one tree, with a tree of logits.
  listed = _clip(
    {'blocks': layers, 'norm': jnp.ones(3)}, {'blocks': list(logits)}
  )
  chex.assert_trees_all_equal(_scanned(listed['blocks']), alone)


def test_heads_and_features_in_one_axis():
  params = _params(key_heads=2)
  logits, width = _max_logits(params), _HEADS * _HEAD_FEATURES
  expected = _clip(params, logits, num_key_heads=2)

  def flat(params):
    names = ('query', 'key', 'value')
    kernels = [params[name]['kernel'].reshape(_FEATURES, -1) for name in names]
    return {'qkv': {'kernel': np.concatenate(kernels, -1)}}

  clipped = _clip(
    flat(params),
    logits,
    query={'qkv': _Heads(-1, slice(width))},
    key={'qkv': _Heads(1, slice(width, width + width // 2))},
    num_key_heads=2,
  )
  chex.assert_trees_all_equal(clipped, flat(expected))


# Trees.


def test_latent_attention():
  names = ('query_nope', 'query_rope', 'key_nope', 'key_rope')
  sizes = ((4, 4), (4, 2), (4, 4), (1, 2))  # The last one serves all heads.
  params = {
    name: 4 * normal(i, (_FEATURES, *size))
    for i, (name, size) in enumerate(zip(names, sizes, strict=True))
  }
  x = normal(99, (1, 10, _FEATURES))

  @jax.jit
  def max_logits(params):
    parts = {k: jnp.einsum('btd,dnh->btnh', x, w) for k, w in params.items()}
    key_rope = jnp.broadcast_to(parts['key_rope'], parts['query_rope'].shape)
    query = jnp.concatenate([parts['query_nope'], parts['query_rope']], -1)
    key = jnp.concatenate([parts['key_nope'], key_rope], -1)
    return merit_optax.attention_statistics(query, key).max_logit

  clip = merit_optax.qk_clip(
    5.0,
    query={'query_nope|query_rope': _Heads(-2)},
    key={'key_nope|query_rope': _Heads(-2)},
  )
  before = max_logits(params)
  assert (before > 5).all()
  updates, _ = clip.update(
    jax.tree.map(jnp.zeros_like, params),
    clip.init(params),
    params,
    max_logits=before,
  )
  after = max_logits(optax.apply_updates(params, updates))
  np.testing.assert_allclose(after, 5, rtol=1e-5)


def test_patterns_match_paths():
  params = nnx.state(
    nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0)), nnx.Param
  )
  # Without the value of nnx's variables.
  _qk_clip(query={'query/kernel$': _Heads(-2)}).init(params)
  with pytest.raises(ValueError, match="^key must match .*got 'keys/'"):
    _qk_clip(key={'keys/': _Heads(1)}).init(_params())


def test_other_leaves():
  params = _params() | {'temperature': 1.0}
  updates = optax.tree.zeros_like(params)
  absent = optax.MaskedNode()
  updates['query']['kernel'] = absent
  transform = _qk_clip()
  clipped, _ = transform.update(
    updates, transform.init(params), params, max_logits=jnp.full(_HEADS, 80.0)
  )
  assert clipped['value']['kernel'] is updates['value']['kernel']
  assert clipped['query']['kernel'] is absent
  np.testing.assert_allclose(
    clipped['key']['kernel'], -params['key']['kernel'] / 2, rtol=1e-6
  )
  with pytest.raises(ValueError, match="params must hold arrays.*'activation'"):
    transform.init(_params() | {'activation': jnp.tanh})


# Errors.


def test_updates_of_other_shapes_are_refused():
  updates = _params()
  updates['query']['kernel'] = jnp.ones((1, _HEADS, 6))
  with pytest.raises(ValueError, match="shapes of params.*'query/kernel'"):
    _qk_clip().update(
      updates, optax.EmptyState(), _params(), max_logits=jnp.ones(_HEADS)
    )


@pytest.mark.parametrize(
  'max_logits, options',
  [
    (jnp.ones((2, _HEADS)), {}),
    (jnp.ones(5), {}),
    (jnp.ones(_HEADS), {'num_key_heads': 3}),
    ({'query': jnp.ones(_HEADS)}, {}),
    (400.0, {}),
    (1j * jnp.ones(_HEADS), {}),
    (jnp.ones(0), {}),
    (merit_optax.AttentionStatistics(*[jnp.ones(_HEADS)] * 3), {}),
  ],
)
def test_logits_that_do_not_fit(max_logits, options):
  with pytest.raises(ValueError, match=r"^max_logits must fit .*'(key|query)/"):
    _clip(_params(), max_logits, **options)


@pytest.mark.parametrize(
  'heads',
  [
    *(_Heads(3), _Heads(-4)),
    *(
      _Heads(0, part)
      for part in (
        *(slice(_FEATURES, None), slice(4, 99), slice(2, 0)),
        slice(None, None, 2),
      )
    ),
  ],
  ids=str,
)
def test_axes_and_parts_that_are_not_there(heads):
  with pytest.raises(
    ValueError, match=r"^query must fit .* 'query/kernel' .*AttentionHeads"
  ):
    _qk_clip(query={'query/kernel': heads}).init(_params())


def test_values_that_are_no_heads_are_refused():
  with pytest.raises(ValueError, match='^query must map .*AttentionHeads'):
    _qk_clip(query={'query/': -2})
