"""QK-clip on a small attention layer, in all layouts of its projections."""

import functools

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal

_Heads = merit_optax.AttentionHeads
_FEATURES, _HEADS, _HEAD_FEATURES = 8, 4, 6
_QUERY, _KEY = {'query/': _Heads(-2)}, {'key/': _Heads(-2)}


def _projection(seed, heads, scale):
  """Returns kernel and bias, each head larger than the one before."""
  sizes = scale * 2.0 ** np.arange(heads, dtype=np.float32)[:, None]
  return {
    'kernel': sizes * normal(seed, (_FEATURES, heads, _HEAD_FEATURES)),
    'bias': sizes * normal(seed + 1, (heads, _HEAD_FEATURES)),
  }


def _params(key_heads=_HEADS, seed=0):
  return {
    'query': _projection(seed, _HEADS, 1.0),
    'key': _projection(seed + 10, key_heads, 1.0),
    'value': {'kernel': normal(seed + 20, (_FEATURES, key_heads, 6))},
  }


def _rotate(x):
  """Applies rotary positions to (T, N, H)."""
  half = x.shape[-1] // 2
  angles = jnp.arange(x.shape[0])[:, None] / 10 ** jnp.arange(half)
  sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


@functools.partial(jax.jit, static_argnames='is_rotary')
def _max_logits(params, is_rotary=False):
  """Returns the largest logit of each head on a batch."""
  x = normal(99, (10, _FEATURES))
  q, k = (
    jnp.einsum('td,dnh->tnh', x, params[name]['kernel']) + params[name]['bias']
    for name in ('query', 'key')
  )
  if is_rotary:
    q, k = _rotate(q), _rotate(k)
  return merit_optax.attention_statistics(q, k, layout='TNH').max_logit


def _clip(params, max_logits, threshold=20.0, updates=None, **options):
  """Returns the parameters after a step and the clip."""
  options = {'query': _QUERY, 'key': _KEY} | options
  transform = merit_optax.qk_clip(threshold, **options)
  if updates is None:
    updates = optax.tree.zeros_like(params)
  state = transform.init(params)

  @jax.jit
  def clip(updates, params, max_logits):
    clipped, _ = transform.update(updates, state, params, max_logits=max_logits)
    return optax.apply_updates(params, clipped)

  return clip(updates, params, max_logits)


# What it bounds.


@pytest.mark.parametrize(
  'key_heads, is_rotary', [(_HEADS, True), (_HEADS, False), (2, False)]
)
def test_logits_of_the_batch_that_was_measured(key_heads, is_rotary):
  params = _params(key_heads)
  before = _max_logits(params, is_rotary)
  threshold = float(jnp.sort(before)[1]) + 1e-3
  clipped = _clip(params, before, threshold, num_key_heads=key_heads)
  after = _max_logits(clipped, is_rotary)
  assert jnp.all(after <= threshold * (1 + 1e-5))
  # The largest of each group that was too large is at the threshold.
  groups = (before.reshape(key_heads, -1), after.reshape(key_heads, -1))
  was, now = (x.max(1) for x in groups)
  np.testing.assert_allclose(
    now, np.where(was > threshold, threshold, was), rtol=1e-5
  )
  chex.assert_trees_all_equal(clipped['value'], params['value'])


def test_heads_below_the_threshold_move_as_told_bit_for_bit():
  params = _params()
  updates = jax.tree.map(lambda x: 1e-3 * jnp.sin(x), params)
  transform = merit_optax.qk_clip(20.0, query=_QUERY, key=_KEY)
  max_logits = jnp.array([5.0, 20.0, jnp.nan, jnp.inf])
  same, _ = transform.update(
    updates, transform.init(params), params, max_logits=max_logits
  )
  chex.assert_trees_all_equal(same, updates)
  clipped = _clip(params, jnp.array([5.0, 80.0, 20.0, -99.0]), updates=updates)
  expected = optax.apply_updates(params, updates)
  for name in ('query', 'key'):
    for part, w in expected[name].items():
      new = clipped[name][part]
      for head in (0, 2, 3):
        np.testing.assert_array_equal(new[..., head, :], w[..., head, :])
      # sqrt(20 / 80), of the weights after the step.
      np.testing.assert_allclose(new[..., 1, :], w[..., 1, :] / 2, rtol=1e-5)


def test_without_logits_it_does_nothing():
  params, updates = _params(), jax.tree.map(jnp.sin, _params())
  transform = merit_optax.qk_clip(1.0, query=_QUERY, key=_KEY)
  state = transform.init(params)
  actual, _ = transform.update(updates, state, params, value=3.0)
  assert actual is updates
  chex.assert_trees_all_equal(transform.update(updates, state)[0], updates)
  with pytest.raises(ValueError, match='not passing `params`'):
    transform.update(updates, state, max_logits=jnp.ones(_HEADS))


def test_at_the_end_of_an_injected_chain():
  merit = functools.partial(
    merit_optax.merit,
    weight_dimension_numbers=merit_optax.flax_dimension_numbers,
  )

  @optax.inject_hyperparams
  def build(learning_rate):
    return optax.chain(
      merit(learning_rate),
      merit_optax.qk_clip(20.0, query=_QUERY, key=_KEY),
    )

  optimizer, params = build(0.1), _params()
  logits = _max_logits(params)
  updates, _ = jax.jit(optimizer.update)(
    params, optimizer.init(params), params, max_logits=logits
  )
  step, _ = merit(0.1).update(params, merit(0.1).init(params), params)
  expected = _clip(params, logits, updates=step)
  chex.assert_trees_all_close(
    optax.apply_updates(params, updates), expected, rtol=1e-4, atol=1e-5
  )


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
  for axis in (1, 3):
    kernels = {
      name: jnp.moveaxis(_scanned(layers)[name]['kernel'], 0, axis)
      for name in ('query', 'key')
    }
    head_axis = 2 if axis == 1 else 1
    clipped = _clip(
      kernels,
      logits,
      query={'query': _Heads(head_axis, layers=axis)},
      key={'key': _Heads(head_axis, layers=axis)},
    )
    for name, kernel in clipped.items():
      np.testing.assert_array_equal(
        jnp.moveaxis(kernel, axis, 0), alone[name]['kernel']
      )


def _fused(params, axis):
  """Returns queries, keys and values beside each other, along a new axis."""
  value = {'kernel': params['query']['kernel'], 'bias': params['key']['bias']}
  parts = (params['query'], value, params['key'])
  return {'qkv': jax.tree.map(lambda *x: jnp.stack(x, axis), *parts)}


@pytest.mark.parametrize('axis', [-2, -3])
def test_fused_projections(axis):
  params = _params()
  logits, head_axis = _max_logits(params), -3 if axis == -2 else -2
  clipped = _clip(
    _fused(params, axis),
    logits,
    query={'qkv/': _Heads(head_axis, part=(axis, 0))},
    key={'qkv/': _Heads(head_axis, part=(axis, -1))},
  )
  expected = _clip(params, logits)
  values = {'kernel': params['query']['kernel'], 'bias': params['key']['bias']}
  for name in ('kernel', 'bias'):
    parts = jnp.moveaxis(clipped['qkv'][name], axis, 0)
    for part, x in zip(
      parts, (expected['query'], values, expected['key']), strict=True
    ):
      np.testing.assert_array_equal(part, x[name])


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
  'axis_type, spec',
  [
    (AxisType.Auto, P('y')),
    (AxisType.Explicit, P()),
    (AxisType.Explicit, P('y')),
  ],
)
def test_on_a_mesh_bit_for_bit(axis_type, spec):
  params, updates = _params(), jax.tree.map(jnp.sin, _params())
  logits = _max_logits(params)
  transform = merit_optax.qk_clip(20.0, query=_QUERY, key=_KEY)

  @jax.jit
  def clip(updates, params, logits):
    return transform.update(
      updates, transform.init(params), params, max_logits=logits
    )[0]

  expected = clip(updates, params, logits)
  mesh = jax.make_mesh((4, 2), ('x', 'y'), axis_types=(axis_type,) * 2)
  place = functools.partial(NamedSharding, mesh)
  with jax.set_mesh(mesh):
    placed = jax.tree.map(
      lambda x: jax.device_put(
        x, place(P('y', 'x') if x.ndim == 3 else P('x'))
      ),
      (updates, params),
    )
    actual = clip(*placed, jax.device_put(logits, place(spec)))
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


@pytest.mark.parametrize(
  'name',
  [
    *('query_norm', 'key_norm', 'q_norm', 'k_norm', 'query_ln', 'qk_norm'),
    *('q_rms_norm', 'query_rmsnorm', 'norm_k', 'RMSNorm_query', 'QKNorm_0'),
    'QueryNorm',
  ],
)
def test_qk_norm_is_refused(name):
  params = {'attention': _params() | {name: {'scale': jnp.ones(6)}}}
  transform = merit_optax.qk_clip(20.0, query=_QUERY, key=_KEY)
  with pytest.raises(ValueError, match=f'QK-norm.*{name}/scale'):
    transform.init(params)


def test_other_norms_are_not():
  names = ('norm', 'query', 'key', 'layer_norm', 'monkey_norm', 'attention_ln')
  params = {name: {'scale': jnp.ones((2, 6))} for name in names}
  merit_optax.qk_clip(20.0, query=_QUERY, key=_KEY).init(params)


def test_patterns_match_paths():
  params = nnx.state(
    nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0)), nnx.Param
  )
  # Without the value of nnx's variables.
  patterns = {'query': {'query/kernel$': _Heads(-2)}, 'key': _KEY}
  merit_optax.qk_clip(1.0, **patterns).init(params)
  transform = merit_optax.qk_clip(20.0, query=_QUERY, key={'keys/': _Heads(1)})
  with pytest.raises(ValueError, match=r"match none: \['keys/'\]"):
    transform.init(_params())
  # A placeholder stands for the parameters in the init that this calls.
  optimizer = optax.chain(
    optax.trace(0.9), merit_optax.qk_clip(20.0, query=_QUERY, key=_KEY)
  )
  params = _params()
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
    (jnp.ones(0), {}),
    ([1.0, 2.0, 3.0, 4.0], {}),
    (merit_optax.AttentionStatistics(*[jnp.ones(_HEADS)] * 3), {}),
  ],
)
def test_logits_and_axes_that_do_not_fit(max_logits, options):
  with pytest.raises(ValueError, match=r"^max_logits must fit .*'(key|query)/"):
    _clip(_params(), max_logits, **options)


@pytest.mark.parametrize(
  'heads',
  [
    _Heads(3),
    _Heads(-4),
    _Heads(-2, layers=-2),
    *(
      _Heads(-2, part=part)
      for part in (
        *((7, 0), (0, _FEATURES), (0, -_FEATURES - 1)),
        *((0, slice(4, 99)), (0, slice(-99, 4)), (0, slice(2, 0))),
      )
    ),
  ],
)
def test_axes_and_parts_that_are_not_there(heads):
  transform = merit_optax.qk_clip(1.0, query={'query/kernel': heads}, key=_KEY)
  with pytest.raises(
    ValueError, match=r"^query and key must fit .* 'query/kernel' .*Attention"
  ):
    transform.init(_params())


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
  transform = merit_optax.qk_clip(1.0, query=query, key=key)
  with pytest.raises(
    ValueError, match="different parts of the parameter 'qkv'"
  ):
    transform.init({'qkv': jnp.ones((8, 3, 4, 6))})


@pytest.mark.parametrize(
  'heads',
  [
    *(-2, (-2,), _Heads(-2.0), _Heads(None), _Heads(True)),
    _Heads(-2, layers='0'),
    *(
      _Heads(-2, part=part)
      for part in (
        *(-3, (-3,), (-3, True), (-3, [0])),
        *((-3, slice(None, None, -1)), (-3, slice(None, None, 0))),
        *((-3, slice(0, 2.5)), (-3, slice('a'))),
      )
    ),
  ],
)
def test_what_are_no_heads_is_refused(heads):
  with pytest.raises(ValueError, match='^query must map .*AttentionHeads'):
    merit_optax.qk_clip(1.0, query={'query/': heads}, key=_KEY)


def test_other_parameters_are_left_as_they_are():
  # Integers that float32 does not hold.
  params = _params() | {'step': jnp.array([2**24 + 1])}
  updates = optax.tree.zeros_like(params) | {'step': params['step']}
  transform = merit_optax.qk_clip(20.0, query=_QUERY, key=_KEY)
  clipped, _ = transform.update(
    updates, transform.init(params), params, max_logits=jnp.full(_HEADS, 80.0)
  )
  assert clipped['step'] is updates['step']
  assert clipped['value']['kernel'] is updates['value']['kernel']
