"""Hyperball in one call: which parameters, which step, which norm."""

import functools

import chex
import equinox as eqx
from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax

_Spec = optax.contrib.MuonDimensionNumbers
_NNX_IS_PURE = pytest.mark.skipif(
  not hasattr(nnx, 'as_pure'), reason='needs flax 0.12.7'
)
_STACKED = functools.partial(
  merit_optax.flax_dimension_numbers, stacked={'blocks/': 1}
)


def _normal(seed, shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _model():
  """Returns parameters named as in Flax, with scanned layers."""
  return {
    'token_embedding': {'embedding': _normal(0, (20, 8))},
    'blocks': {
      'qkv': {'kernel': _normal(1, (2, 8, 24)), 'bias': jnp.ones((2, 24))},
      'mlp': {'kernel': _normal(2, (2, 8, 16))},
      'norm': {'scale': jnp.ones((2, 8))},
    },
    'out': {'query': {'kernel': _normal(3, (8, 2, 4))}},
    'lm_head': {'kernel': _normal(4, (8, 20))},
  }


def _run(optimizer, params, gradients):
  """Returns the parameters after some steps, and the state."""

  @jax.jit
  def step(params, state, gradient):
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for gradient in gradients:
    params, state = step(params, state, gradient)
  return params, state


# Which parameters are hidden.


def test_embeddings_heads_biases_and_scales_are_not_hidden():
  hidden = merit_optax.hidden_matrices(_model())
  found = [
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, is_hidden in jax.tree.leaves_with_path(hidden)
    if is_hidden
  ]
  assert found == [
    'blocks/mlp/kernel',
    'blocks/qkv/kernel',
    'out/query/kernel',
  ]


@pytest.mark.parametrize(
  'name, is_hidden',
  [
    ('wte', False),
    ('wpe', False),
    ('patch_embed/kernel', False),
    ('embedder/w', False),
    ('head/weight', False),
    ('policy_head/kernel', False),
    ('logits_dense/kernel', False),
    ('classifier/weight', False),
    ('heads/0/weight', True),
    ('attention/query/kernel', True),
    ('headline/kernel', True),
    ('w1', True),
    ('PosEmbed_0/kernel', False),
    ('LMHead_0/kernel', False),
    ('Logits_0/kernel', False),
    ('MultiHeadAttention_0/kernel', True),
    ('AttentionHead_0/kernel', True),
  ],
)
def test_names_of_inputs_and_outputs(name, is_hidden):
  *owners, leaf = name.split('/')
  params = {leaf: jnp.ones((3, 4)), 'other': jnp.ones((2, 2))}
  for owner in reversed(owners):
    params = {owner: params}
  hidden = merit_optax.hidden_matrices({'other': jnp.ones((2, 2)), **params})
  for owner in owners:
    hidden = hidden[owner]
  assert hidden[leaf] is is_hidden


def test_a_moment_of_adam_that_never_decays_is_refused():
  with pytest.raises(ValueError, match='^adam_b1 must be at most 0.996'):
    merit_optax.muon_hyperball(0.1, adam_b1=0.999, mu_dtype='bfloat16')


def test_paths_that_are_written_the_same_are_refused():
  params = {'a/kernel': jnp.ones((4, 4)), 'a': {'kernel': jnp.ones((2, 4, 4))}}
  for function in (
    merit_optax.muon_hyperball(0.1).init,
    merit_optax.describe_hyperball,
  ):
    with pytest.raises(ValueError, match='differ in their paths.*a/kernel'):
      function(params)


@pytest.mark.parametrize(
  'hidden',
  [
    'mlp|lm_head',
    ['mlp', '^lm_head/'],
    lambda p: jax.tree.map_with_path(
      lambda path, _: path[-2].key in ('mlp', 'lm_head'), p
    ),
    {'token_embedding': False, 'out': False, 'lm_head': True,
     'blocks': {'qkv': False, 'mlp': True, 'norm': False}},
  ],
  ids=['pattern', 'patterns', 'function', 'tree'],
)  # fmt: skip
def test_the_choice_can_be_another(hidden):
  found = merit_optax.hidden_matrices(_model(), hidden)
  assert found['lm_head']['kernel'] and found['blocks']['mlp']['kernel']
  assert sum(jax.tree.leaves(found)) == 2
  table = merit_optax.describe_hyperball(
    _model(), hidden=hidden, weight_dimension_numbers=_STACKED
  )
  assert sum(' hidden ' in line for line in table.splitlines()) == 2


@pytest.mark.parametrize(
  'hidden, message',
  [
    ('bias', r'two or more axes, got bias \(3,\)'),
    ('nothing', 'at least one parameter, got none of bias, kernel'),
    (3, 'must be a tree of booleans'),
    ({'kernel': True}, 'must be a tree like params'),
  ],
)
def test_a_choice_that_does_not_fit_is_refused(hidden, message):
  params = {'kernel': jnp.ones((3, 3)), 'bias': jnp.ones(3)}
  for function in (
    merit_optax.muon_hyperball(0.1, hidden=hidden).init,
    functools.partial(merit_optax.describe_hyperball, hidden=hidden),
  ):
    with pytest.raises(ValueError, match=f'^hidden .*{message}'):
      function(params)


def test_three_axes_that_are_not_recognized_are_refused():
  params = {'blocks': {'kernel': jnp.ones((2, 3, 4))}}
  with pytest.raises(ValueError, match='not recognized.*stacked'):
    merit_optax.muon_hyperball(0.1).init(params)
  merit_optax.muon_hyperball(0.1, weight_dimension_numbers=_STACKED).init(
    params
  )


def _linen_parameters():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
      x = nn.Embed(11, 8)(tokens)
      x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
      return nn.Dense(11, name='head')(nn.Dense(8)(x))

  return Model().init(jax.random.key(0), jnp.zeros((1, 3), int))['params']


def _nnx_parameters():
  class Model(nnx.Module):
    def __init__(self, rngs):
      self.embed = nnx.Embed(11, 8, rngs=rngs)
      self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
      self.head = nnx.Linear(8, 11, rngs=rngs)

  return nnx.as_pure(nnx.state(Model(nnx.Rngs(0)), nnx.Param))


def _equinox_parameters():
  keys = jax.random.split(jax.random.key(0), 3)
  model = {
    'embed': eqx.nn.Embedding(11, 8, key=keys[0]),
    'mlp': eqx.nn.MLP(8, 8, 16, 1, key=keys[1]),
    'head': eqx.nn.Linear(8, 11, key=keys[2]),
  }
  return eqx.filter(model, eqx.is_inexact_array)


@pytest.mark.parametrize(
  'make, num_hidden',
  [
    (_linen_parameters, 5),
    pytest.param(_nnx_parameters, 4, marks=_NNX_IS_PURE),
    (_equinox_parameters, 2),
  ],
)
def test_models_of_each_framework_need_one_line(make, num_hidden):
  params = make()
  optimizer = optax.chain(
    merit_optax.clip_by_global_norm(1.0), merit_optax.muon_hyperball(0.05)
  )
  gradients = jax.tree.map(jnp.cos, params)
  new_params, _ = _run(optimizer, params, [gradients])
  hidden = merit_optax.hidden_matrices(params)
  kept = [
    np.isclose(jnp.linalg.norm(x), jnp.linalg.norm(y), rtol=1e-5)
    for x, y, is_hidden in zip(
      *map(jax.tree.leaves, (params, new_params, hidden)), strict=True
    )
    if is_hidden
  ]
  assert kept == [True] * num_hidden


# What a step is.


def _as_parts(schedule):
  """Returns muon_hyperball as the chain that it stands for."""
  hidden = optax.chain(
    merit_optax.scale_by_muon(beta=0.9, weight_dimension_numbers=_STACKED),
    merit_optax.scale_by_l2_norm_trust_ratio(weight_dimension_numbers=_STACKED),
    optax.scale_by_learning_rate(schedule),
    merit_optax.keep_matrix_norms(weight_dimension_numbers=_STACKED),
  )
  others = optax.chain(
    merit_optax.scale_by_adam(),
    optax.add_decayed_weights(0.0),
    optax.scale_by_learning_rate(lambda step: schedule(step) / 3),
  )

  def labels(params):
    return jax.tree.map(
      lambda x: 'hidden' if x else 'others', merit_optax.hidden_matrices(params)
    )

  return optax.partition({'hidden': hidden, 'others': others}, labels)


def test_it_is_a_partition_of_public_parts():
  schedule = optax.linear_schedule(0.1, 0.0, 5)
  params = _model()
  gradients = [jax.tree.map(jnp.sin, params), jax.tree.map(jnp.cos, params)]
  one_call = merit_optax.muon_hyperball(
    schedule, weight_dimension_numbers=_STACKED
  )
  actual, expected = (
    _run(optimizer, params, gradients)
    for optimizer in (one_call, _as_parts(schedule))
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-6)


def test_the_step_of_a_matrix_is_its_formula():
  w, g = _normal(0, (6, 6)), _normal(1, (6, 6))
  optimizer = merit_optax.muon_hyperball(
    0.25, ns_coeffs='polar_express', ns_steps=9
  )
  (found,), _ = _run(optimizer, [w], [[g]])
  u, _, v = np.linalg.svd(np.asarray(g, np.float64))
  direction = u @ v / np.sqrt(6)
  radius = np.linalg.norm(np.asarray(w, np.float64))
  moved = np.asarray(w) - 0.25 * radius * direction
  expected = radius * moved / np.linalg.norm(moved)
  np.testing.assert_allclose(found, expected, atol=1e-3)


def test_the_direction_of_adam():
  params = {'kernel': _normal(0, (4, 6)), 'bias': jnp.ones(6)}
  gradients = [jax.tree.map(jnp.cos, params)] * 3
  settings = dict(adam_learning_rate=0.02, adam_weight_decay=0.1)
  (found, _), (expected, _) = (
    _run(optimizer, params, gradients)
    for optimizer in (
      merit_optax.adam_hyperball(0.1, 0.8, 0.9, **settings),
      optax.partition(
        {
          True: merit_optax.hyperball(merit_optax.scale_by_adam(0.8, 0.9), 0.1),
          False: optax.chain(
            merit_optax.scale_by_adam(0.8, 0.9),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(0.02),
          ),
        },
        merit_optax.hidden_matrices,
      ),
    )
  )
  chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_what_decays_of_adam_can_be_chosen():
  params = {'w': jnp.eye(3), 'a': jnp.ones(3), 'b': jnp.ones(3)}
  zero = jax.tree.map(jnp.zeros_like, params)
  optimizer = merit_optax.muon_hyperball(
    0.3,
    adam_weight_decay=0.5,
    adam_weight_decay_mask={'w': True, 'a': True, 'b': False},
  )
  found, _ = _run(optimizer, params, [zero])
  np.testing.assert_allclose(found['a'], 1 - 0.1 * 0.5, rtol=1e-6)
  np.testing.assert_array_equal(found['b'], params['b'])
  np.testing.assert_allclose(found['w'], params['w'], rtol=1e-6)


def test_learning_rates_can_be_injected():
  params = {'kernel': _normal(0, (4, 6)), 'bias': jnp.ones(6)}
  inject = optax.inject_hyperparams(merit_optax.muon_hyperball)
  (found, _), (expected, _) = (
    _run(optimizer, params, [params] * 2)
    for optimizer in (inject(0.1), merit_optax.muon_hyperball(0.1))
  )
  chex.assert_trees_all_close(found, expected, rtol=1e-5)


# The radius.


def test_a_stored_radius_keeps_the_norm_of_bfloat16_weights():
  params = {'w': _normal(0, (2, 32, 32), jnp.bfloat16)}
  norms = jnp.linalg.norm(params['w'].astype(jnp.float32), axis=(1, 2))
  drifts = {}
  for radius in ('current', 'initial'):
    optimizer = merit_optax.hyperball(
      optax.scale_by_lion(),
      0.01,
      radius=radius,
      weight_dimension_numbers=_Spec(1, 2),
    )

    @jax.jit
    def run(params, optimizer=optimizer):
      def step(carry, i):
        params, state = carry
        gradient = {'w': jnp.cos(params['w'] * i).astype(jnp.bfloat16)}
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

      carry = params, optimizer.init(params)
      return jax.lax.scan(step, carry, jnp.arange(2000.0))[0][0]

    last = jnp.linalg.norm(run(params)['w'].astype(jnp.float32), axis=(1, 2))
    drifts[radius] = float(jnp.abs(last / norms - 1).max())
  # What bfloat16 rounds in one step does not add up.
  assert drifts['initial'] < 0.003 < drifts['current']


def test_the_radius_is_one_array_of_the_state():
  params = {'a': 2 * jnp.ones((2, 3, 3)), 'b': jnp.eye(4), 'c': None}
  optimizer = merit_optax.keep_matrix_norms(
    radius='initial', weight_dimension_numbers=_Spec(-2, -1)
  )
  state = optimizer.init(params)
  np.testing.assert_allclose(state.radius, [6.0, 6.0, 2.0], rtol=1e-6)
  # Nothing of it looks like a parameter, and map_params passes it on.
  mapped = optax.tree.map_params(
    optimizer, lambda _: 'moment', state, transform_non_params=lambda _: 'other'
  )
  assert jax.tree.leaves(mapped) == ['other']
  updates = jax.tree.map(lambda x: -0.5 * x, params)
  kept, _ = optimizer.update(updates, state, params)
  chex.assert_trees_all_close(
    kept, jax.tree.map(jnp.zeros_like, params), atol=1e-6
  )
  # It is that of the first parameters, whatever became of them.
  shrunk = jax.tree.map(lambda x: x / 2, params)
  grown, _ = optimizer.update(
    jax.tree.map(jnp.zeros_like, params), state, shrunk
  )
  chex.assert_trees_all_close(
    optax.apply_updates(shrunk, grown), params, rtol=1e-6
  )
  with pytest.raises(ValueError, match='passing `params`'):
    optimizer.update(updates, state)


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_a_stored_radius_on_a_mesh(axis_type):
  mesh = jax.make_mesh((8,), ('fsdp',), axis_types=(axis_type,))
  params = {'w': _normal(0, (2, 8, 16))}
  optimizer = merit_optax.hyperball(
    merit_optax.scale_by_muon(weight_dimension_numbers=_Spec(1, 2)),
    0.1,
    radius='initial',
    weight_dimension_numbers=_Spec(1, 2),
  )
  expected, _ = _run(optimizer, params, [params])
  sharding = NamedSharding(mesh, P(None, 'fsdp'))
  found, _ = _run(optimizer, jax.device_put(params, sharding), [params])
  chex.assert_trees_all_close(found, expected, rtol=1e-5)


# What describes it.


def test_the_table_says_where_products_are():
  large = jax.ShapeDtypeStruct((2**15, 2**14), jnp.float32)
  small = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
  params = {'blocks': {'kernel': small}, 'large': large, 'embedding': small}
  describe = functools.partial(
    merit_optax.describe_hyperball,
    params,
    weight_dimension_numbers=_STACKED,
    hidden='kernel|large',
  )
  specs = lambda p: {  # noqa: E731
    'blocks': {'kernel': _Spec(1, 2)},
    'large': _Spec(),
    'embedding': None,
  }
  alone = describe(weight_dimension_numbers=specs).splitlines()
  assert [line.split('  ')[-1].strip() for line in alone[1:]] == [
    'on one device',
    '-',
    'on one device',
  ]
  mesh = jax.make_mesh(
    (2, 4), ('data', 'fsdp'), axis_types=(AxisType.Auto,) * 2
  )
  with jax.set_mesh(mesh):
    lines = describe(weight_dimension_numbers=specs).splitlines()
    assert lines[1].endswith('  whole, over fsdp')
    assert lines[3].endswith('split by the compiler')
    named = describe(weight_dimension_numbers=specs, mesh_axes=('data', 'fsdp'))
    assert 'whole, over data, fsdp' in named
    left = describe(weight_dimension_numbers=specs, mesh_axes=None)
    assert 'whole' not in left
    with pytest.raises(ValueError, match=r"^mesh_axes must .* got \['tp'\]"):
      describe(weight_dimension_numbers=specs, mesh_axes='tp')
