"""QK-clip on a small attention layer, in all layouts of its projections."""

import functools
import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import make_mesh, normal

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
def test_logits_of_the_batch_that_was_measured(key_heads):
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


def test_heads_below_the_threshold_move_as_told_bit_for_bit():
  params = _params()
  updates = jax.tree.map(lambda x: 1e-3 * jnp.sin(x), params)
  transform = _qk_clip()
  max_logits = jnp.array([5.0, 20.0, jnp.nan, jnp.inf])
  same, _ = transform.update(
    updates, transform.init(params), params, max_logits=max_logits
  )
  chex.assert_trees_all_equal(same, updates)
  clipped = _clip(params, jnp.array([5.0, 80.0, 20.0, -99.0]), updates=updates)
  expected = optax.apply_updates(params, updates)
  # sqrt(20 / 80) for one head, of the weights after the step.
  factors = jnp.array([1, 0.5, 1, 1])[:, None]
  for name in ('query', 'key'):
    for part, w in expected[name].items():
      new = clipped[name][part]
      np.testing.assert_allclose(new, factors * w, rtol=1e-5)
      np.testing.assert_array_equal(
        jnp.delete(new, 1, axis=-2), jnp.delete(w, 1, axis=-2)
      )


def test_without_logits_it_does_nothing():
  params, updates = _params(), jax.tree.map(jnp.sin, _params())
  transform = _qk_clip(1.0)
  state = transform.init(params)
  assert transform.update(updates, state, params, value=3.0)[0] is updates
  assert transform.update(updates, state)[0] is updates
  with pytest.raises(ValueError, match='not passing `params`'):
    transform.update(updates, state, max_logits=jnp.ones(_HEADS))


# Layouts.


def _scanned(layers):
  return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def test_scanned_layers_equal_separate_ones_bit_for_bit():
  layers = [_params(seed=seed) for seed in (0, 100, 200)]
  logits = jnp.stack([_max_logits(x) for x in layers])
  options = {
    'query': {'query/': _Heads(-2, layers=0)},
    'key': {'key/': _Heads(-2, layers=0)},
  }
  together = _clip({'blocks': _scanned(layers)}, logits, **options)
  alone = _scanned([_clip(x, s) for x, s in zip(layers, logits, strict=True)])
  chex.assert_trees_all_equal(together, {'blocks': alone})
  # Separate layers in one tree, with a tree of logits.
  listed = _clip(
    {'blocks': layers, 'norm': jnp.ones(3)}, {'blocks': list(logits)}
  )
  chex.assert_trees_all_equal(_scanned(listed['blocks']), alone)
  # Layers that do not lead, before or behind the heads.
  for axis, head_axis in ((1, 2), (3, 1)):
    kernels = {
      name: jnp.moveaxis(_scanned(layers)[name]['kernel'], 0, axis)
      for name in ('query', 'key')
    }
    heads = _Heads(head_axis, layers=axis)
    clipped = _clip(kernels, logits, query={'query': heads}, key={'key': heads})
    for name, kernel in clipped.items():
      np.testing.assert_array_equal(
        jnp.moveaxis(kernel, axis, 0), alone[name]['kernel']
      )


def _fused(params, axis):
  """Returns queries, other values and keys in one array, along a new axis."""
  parts = (params['query'], jax.tree.map(jnp.ones_like, params['query']))
  return jax.tree.map(lambda *x: jnp.stack(x, axis), *parts, params['key'])


@pytest.mark.parametrize('axis, head_axis', [(-2, -3), (-3, -2)])
def test_fused_projections(axis, head_axis):
  params = _params()
  logits = _max_logits(params)
  clipped = _clip(
    _fused(params, axis),
    logits,
    query={'': _Heads(head_axis, part=(axis, 0))},
    key={'': _Heads(head_axis, part=(axis, -1))},
  )
  expected = _fused(_clip(params, logits), axis)
  chex.assert_trees_all_equal(clipped, expected)


def test_heads_and_features_in_one_axis():
  params = _params(key_heads=2)
  logits, width = _max_logits(params), _HEADS * _HEAD_FEATURES
  expected = _clip(params, logits, num_key_heads=2)

  def flat(params):
    names = ('query', 'key', 'value')
    kernels = [params[name]['kernel'].reshape(_FEATURES, -1) for name in names]
    return {'qkv': {'kernel': jnp.concatenate(kernels, -1)}}

  clipped = _clip(
    flat(params),
    logits,
    query={'qkv': _Heads(-1, part=(-1, slice(0, width)))},
    key={'qkv': _Heads(-1, part=(-1, slice(width, width + width // 2)))},
    num_key_heads=2,
  )
  chex.assert_trees_all_equal(clipped, flat(expected))


@pytest.mark.parametrize(
  'axis_type, spec, heads',
  [
    (AxisType.Auto, P('y'), -2),
    (AxisType.Explicit, P(), -2),
    (AxisType.Explicit, P('y'), -2),
    (AxisType.Explicit, P(), -1),
  ],
)
def test_on_a_mesh_bit_for_bit(axis_type, spec, heads):
  params = _params()
  logits = _max_logits(params)
  if heads == -1:  # Heads and their features in one axis, of biases the only.
    params = jax.tree.map(lambda x: x.reshape(*x.shape[:-2], -1), params)
  updates = jax.tree.map(jnp.sin, params)
  transform = _qk_clip(
    query={'query/': _Heads(heads)}, key={'key/': _Heads(heads)}
  )

  @jax.jit
  def clip(updates, params, logits):
    return transform.update(
      updates, transform.init(params), params, max_logits=logits
    )[0]

  expected = clip(updates, params, logits)
  mesh = make_mesh(axis_type, x=4, y=2)
  specs = {
    name: {'kernel': P('y', 'x'), 'bias': P('x')} for name in ('query', 'key')
  } | {'value': {'kernel': P('y', 'x')}}
  places = jax.tree.map(
    functools.partial(NamedSharding, mesh), (specs, specs, spec)
  )
  actual = clip(*jax.device_put((updates, params, logits), places))
  chex.assert_trees_all_equal(*jax.device_get((actual, expected)))


def test_dtypes_stay():
  params = optax.tree.cast(_params(), jnp.bfloat16)
  clipped = _clip(params, jnp.full(_HEADS, 80.0))
  chex.assert_trees_all_equal_shapes_and_dtypes(clipped, params)
  halved = clipped['query']['kernel'].astype(jnp.float32) * 2
  np.testing.assert_allclose(
    halved, params['query']['kernel'].astype(jnp.float32), rtol=1e-2
  )


# What cannot work.

_QK_NORMS = {
  *('query_norm', 'key_norm', 'q_norm', 'k_norm', 'query_ln', 'qk_norm'),
  *('q_rms_norm', 'query_rmsnorm', 'norm_k', 'RMSNorm_query', 'QKNorm_0'),
  'QueryNorm',
}
_OTHER_NORMS = {'norm', 'layer_norm', 'monkey_norm', 'attention_ln'}


def test_qk_norm_is_refused_and_no_other():
  norms = dict.fromkeys(_QK_NORMS | _OTHER_NORMS, {'scale': jnp.ones(6)})
  with pytest.raises(ValueError, match='QK-norm') as error:
    _qk_clip().init({'attention': _params() | norms})
  named = re.findall(r"'attention/(\w+)/scale'", str(error.value))
  assert {*named} == _QK_NORMS


def test_patterns_match_paths():
  params = nnx.state(
    nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0)), nnx.Param
  )
  # Without the value of nnx's variables.
  _qk_clip(query={'query/kernel$': _Heads(-2)}).init(params)
  with pytest.raises(ValueError, match=r"match none: \['keys/'\]"):
    _qk_clip(key={'keys/': _Heads(1)}).init(_params())


def test_other_leaves_may_be_numbers_but_no_functions():
  _qk_clip().init(_params() | {'temperature': 1.0})
  with pytest.raises(ValueError, match="params must hold arrays.*'activation'"):
    _qk_clip().init(_params() | {'activation': jnp.tanh})


@pytest.mark.parametrize('absent', [None, optax.MaskedNode()])
def test_what_has_no_update_is_passed_over(absent):
  updates = _params()
  updates['query']['kernel'] = absent
  transform = _qk_clip()
  found, expected = (
    transform.update(
      x, optax.EmptyState(), _params(), max_logits=1e3 * jnp.ones(_HEADS)
    )[0]
    for x in (updates, _params())
  )
  assert found['query']['kernel'] is absent
  chex.assert_trees_all_equal(found['key'], expected['key'])


@pytest.mark.parametrize('update', [0.0, jnp.ones((1, _HEADS, 6))])
def test_updates_of_other_shapes_are_refused(update):
  updates = _params()
  updates['query']['kernel'] = update
  with pytest.raises(ValueError, match="shapes of params.*'query/kernel'"):
    _qk_clip().update(
      updates, optax.EmptyState(), _params(), max_logits=jnp.ones(_HEADS)
    )


def test_map_params_finds_the_moments_of_the_chain():
  optimizer, params = optax.chain(optax.trace(0.9), _qk_clip()), _params()
  # A placeholder stands for the parameters in the init that this calls.
  moments = optax.tree.map_params(
    optimizer, lambda x: x + 1, optimizer.init(params)
  )
  assert jnp.all(moments[0].trace['query']['kernel'] == 1)


@pytest.mark.parametrize(
  'max_logits, options',
  [
    (jnp.ones((2, _HEADS)), {}),
    (jnp.ones(5), {}),
    (jnp.ones(_HEADS), {'num_key_heads': 3}),
    (jnp.ones(2 * _HEADS), {'num_key_heads': _HEADS}),
    ({'query': jnp.ones(_HEADS)}, {}),
    (400.0, {}),
    (1j * jnp.ones(_HEADS), {}),
    (jnp.ones(0), {}),
    ([1.0, 2.0, 3.0, 4.0], {}),
    (merit_optax.AttentionStatistics(*[jnp.ones(_HEADS)] * 3), {}),
  ],
)
def test_logits_and_axes_that_do_not_fit(max_logits, options):
  with pytest.raises(ValueError, match=r"^max_logits must fit .*'(key|query)/"):
    _clip(_params(), max_logits, **options)


_PARTS_OUTSIDE = (
  *((7, 0), (0, _FEATURES), (0, -_FEATURES - 1)),
  *((0, slice(4, 99)), (0, slice(-99, 4)), (0, slice(2, 0))),
)


@pytest.mark.parametrize(
  'heads',
  [
    *(_Heads(3), _Heads(-4), _Heads(-2, layers=-2)),
    *(_Heads(-2, part=part) for part in _PARTS_OUTSIDE),
  ],
)
def test_axes_and_parts_that_are_not_there(heads):
  with pytest.raises(
    ValueError, match=r"^query and key must fit .* 'query/kernel' .*Attention"
  ):
    _qk_clip(query={'query/kernel': heads}).init(_params())


@pytest.mark.parametrize(
  'parts',
  [
    (None, None),
    ((-3, 0), None),
    ((-3, 0), (-3, 0)),
    ((-3, 0), (-3, -3)),
    ((-3, slice(0, 2)), (-3, 1)),
    ((-3, 0), (-1, 0)),
  ],
)
def test_queries_and_keys_must_lie_apart(parts):
  query, key = ({'qkv': _Heads(-2, part=part)} for part in parts)
  with pytest.raises(ValueError, match="different parts of .* 'qkv'"):
    _qk_clip(query=query, key=key).init({'qkv': jnp.ones((8, 3, 4, 6))})


_NO_PARTS = (
  *(-3, (-3,), (-3, True), (-3, [0])),
  *((-3, slice(None, None, -1)), (-3, slice(None, None, 0))),
  *((-3, slice(0, 2.5)), (-3, slice('a'))),
)


@pytest.mark.parametrize(
  'heads',
  [
    *(-2, (-2,), _Heads(-2.0), _Heads(None), _Heads(True)),
    _Heads(-2, layers='0'),
    *(_Heads(-2, part=part) for part in _NO_PARTS),
  ],
)
def test_what_are_no_heads_is_refused(heads):
  with pytest.raises(ValueError, match='^query must map .*AttentionHeads'):
    _qk_clip(query={'query/': heads})


def test_other_parameters_are_left_as_they_are():
  # Integers that float32 does not hold.
  params = _params() | {'step': jnp.array([2**24 + 1])}
  updates = optax.tree.zeros_like(params) | {'step': params['step']}
  transform = _qk_clip()
  clipped, _ = transform.update(
    updates, transform.init(params), params, max_logits=jnp.full(_HEADS, 80.0)
  )
  assert clipped['step'] is updates['step']
  assert clipped['value']['kernel'] is updates['value']['kernel']
