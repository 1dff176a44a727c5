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
from tests.merit_optax.arrays import normal, run

_Spec = optax.contrib.MuonDimensionNumbers
_NNX_IS_PURE = pytest.mark.skipif(
  not hasattr(nnx, 'as_pure'), reason='needs flax 0.12.7'
)
_STACKED = functools.partial(
  merit_optax.flax_dimension_numbers, stacked={'blocks/': 1}
)


def _model():
  """Returns parameters named as in Flax, with scanned layers."""
  return {
    'token_embedding': {'embedding': normal(0, (20, 8))},
    'blocks': {
      'qkv': {'kernel': normal(1, (2, 8, 24)), 'bias': jnp.ones((2, 24))},
      'mlp': {'kernel': normal(2, (2, 8, 16))},
      'norm': {'scale': jnp.ones((2, 8))},
    },
    'out': {'query': {'kernel': normal(3, (8, 2, 4))}},
    'lm_head': {'kernel': normal(4, (8, 20))},
  }


def _last(optimizer, params, gradients):
  """Returns the parameters after the last step."""
  *_, last = run(optimizer, params, gradients)
  return last.params


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
  'are_hidden, names',
  [
    (
      True,
      (
        *('heads/0/weight', 'attention/query/kernel', 'headline/kernel', 'w1'),
        *('MultiHeadAttention_0/kernel', 'AttentionHead_0/kernel'),
      ),
    ),
    (
      False,
      (
        *('wte', 'wpe', 'patchify/kernel', 'patch_embed/kernel', 'embedder/w'),
        *('head/weight', 'policy_head/kernel', 'logits_dense/kernel'),
        *('classifier/weight', 'PosEmbed_0/kernel', 'LMHead_0/kernel'),
        *('OutputHead/kernel', 'ClassificationHead_1/kernel'),
        *('Logits_0/kernel', 'Classifier/kernel'),
      ),
    ),
  ],
)
def test_names_of_inputs_and_outputs(are_hidden, names):
  for name in names:
    tree = jnp.ones((3, 4))
    for owner in reversed(name.split('/')):
      tree = {owner: tree}
    hidden = merit_optax.hidden_matrices({'other': jnp.ones((2, 2)), **tree})
    del hidden['other']
    assert jax.tree.leaves(hidden) == [are_hidden], name


_CHOSEN = {'token_embedding': False, 'out': False, 'lm_head': True}
_CHOSEN['blocks'] = {'qkv': False, 'mlp': True, 'norm': False}


@pytest.mark.parametrize(
  'hidden',
  ['mlp|lm_head', ['mlp', '^lm_head/'], _CHOSEN, lambda _: _CHOSEN],
  ids=['pattern', 'patterns', 'tree', 'function'],
)
def test_the_choice_can_be_another(hidden):
  found = merit_optax.hidden_matrices(_model(), hidden)
  assert found['lm_head']['kernel'] and found['blocks']['mlp']['kernel']
  assert sum(jax.tree.leaves(found)) == 2
  table = merit_optax.describe_hyperball(
    _model(), hidden=hidden, weight_dimension_numbers=_STACKED
  )
  assert table.count(' hidden ') == 2


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
  for function in (
    merit_optax.muon_hyperball(0.1).init,
    merit_optax.describe_hyperball,
  ):
    with pytest.raises(ValueError, match='not recognized.*stacked'):
      function(params)


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
  new_params = _last(optimizer, params, [gradients])
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


def _partition(hidden, *others):
  """Returns what the calls stand for."""
  return optax.partition(
    {True: hidden, False: optax.chain(*others)}, merit_optax.hidden_matrices
  )


_SCHEDULE = optax.linear_schedule(0.1, 0.0, 5)
_A_THIRD = optax.scale_by_learning_rate(optax.linear_schedule(0.1 / 3, 0.0, 5))


def test_muon_hyperball_is_a_partition_of_public_parts():
  muon = merit_optax.scale_by_muon(
    'polar_express', 4, 0.8, mu_dtype='float16', nesterov=False,
    ns_dtype='bfloat16', weight_dimension_numbers=_STACKED,
  )  # fmt: skip
  hidden = optax.chain(
    muon,
    merit_optax.scale_by_l2_norm_trust_ratio(weight_dimension_numbers=_STACKED),
    optax.scale_by_learning_rate(_SCHEDULE),
    merit_optax.keep_matrix_norms(
      radius='initial', weight_dimension_numbers=_STACKED
    ),
  )
  adam = merit_optax.scale_by_adam(0.7, 0.8, 0.1, mu_dtype='float16')
  expected = _partition(hidden, adam, optax.add_decayed_weights(0.2), _A_THIRD)
  actual = merit_optax.muon_hyperball(
    _SCHEDULE, 0.8, adam_b1=0.7, adam_b2=0.8, adam_eps=0.1,
    adam_weight_decay=0.2, weight_dimension_numbers=_STACKED,
    mu_dtype='float16', nesterov=False, ns_coeffs='polar_express', ns_steps=4,
    ns_dtype='bfloat16', radius='initial',
  )  # fmt: skip
  gradients = [jax.tree.map(f, _model()) for f in (jnp.sin, jnp.cos)]
  chex.assert_trees_all_close(
    *(_last(x, _model(), gradients) for x in (actual, expected)), rtol=1e-6
  )


def test_adam_hyperball_is_a_partition_of_public_parts():
  params = {'kernel': normal(0, (4, 6)), 'bias': jnp.ones(6)}
  adam = merit_optax.scale_by_adam(0.8, 0.9, 0.1, mu_dtype='float16')
  hyperball = merit_optax.hyperball(adam, _SCHEDULE)
  expected = _partition(
    hyperball,
    adam,
    optax.add_decayed_weights(0.1),
    optax.scale_by_learning_rate(0.02),
  )
  actual = merit_optax.adam_hyperball(
    _SCHEDULE,
    0.8,
    0.9,
    0.1,
    mu_dtype='float16',
    adam_weight_decay=0.1,
    adam_learning_rate=0.02,
  )
  gradients = [jax.tree.map(jnp.cos, params)] * 3
  chex.assert_trees_all_close(
    *(_last(x, params, gradients) for x in (actual, expected)), rtol=1e-6
  )


def test_defaults_are_those_of_the_parts():
  params = {'kernel': normal(0, (4, 6)), 'bias': jnp.ones(6)}
  gradients = [jax.tree.map(jnp.cos, params)] * 3
  for actual, direction in (
    (
      merit_optax.muon_hyperball(_SCHEDULE),
      merit_optax.scale_by_muon(beta=0.9),
    ),
    (merit_optax.adam_hyperball(_SCHEDULE), merit_optax.scale_by_adam()),
  ):
    hyperball = merit_optax.hyperball(direction, _SCHEDULE)
    expected = _partition(hyperball, merit_optax.scale_by_adam(), _A_THIRD)
    chex.assert_trees_all_close(
      *(_last(x, params, gradients) for x in (actual, expected)), rtol=1e-6
    )


def test_the_step_of_a_matrix_is_its_formula():
  w, g = normal(0, (6, 6)), normal(1, (6, 6))
  optimizer = merit_optax.muon_hyperball(
    0.25, ns_coeffs='polar_express', ns_steps=9
  )
  (found,) = _last(optimizer, [w], [[g]])
  u, _, v = np.linalg.svd(np.asarray(g, np.float64))
  radius = np.linalg.norm(np.asarray(w, np.float64))
  moved = np.asarray(w) - 0.25 * radius * u @ v / np.sqrt(6)
  expected = radius * moved / np.linalg.norm(moved)
  np.testing.assert_allclose(found, expected, atol=1e-3)


def test_what_decays_of_adam_can_be_chosen():
  params = {'w': jnp.eye(3), 'a': jnp.ones(3), 'b': jnp.ones(3)}
  zero = jax.tree.map(jnp.zeros_like, params)
  optimizer = merit_optax.muon_hyperball(
    0.3,
    adam_weight_decay=0.5,
    adam_weight_decay_mask={'w': True, 'a': True, 'b': False},
  )
  found = _last(optimizer, params, [zero])
  np.testing.assert_allclose(found['a'], 1 - 0.1 * 0.5, rtol=1e-6)
  np.testing.assert_array_equal(found['b'], params['b'])
  np.testing.assert_allclose(found['w'], params['w'], rtol=1e-6)


def test_a_moment_of_adam_that_never_decays_is_refused():
  with pytest.raises(ValueError, match='^adam_b1 must be at most 0.996'):
    merit_optax.muon_hyperball(0.1, adam_b1=0.999, mu_dtype='bfloat16')


def test_learning_rates_can_be_injected():
  params = {'kernel': normal(0, (4, 6)), 'bias': jnp.ones(6)}
  injected = optax.inject_hyperparams(merit_optax.muon_hyperball)(0.1)
  actual, expected = (
    _last(optimizer, params, [params] * 2)
    for optimizer in (injected, merit_optax.muon_hyperball(0.1))
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-5)


# The radius.


def test_a_stored_radius_keeps_the_norm_of_bfloat16_weights():
  params = {'w': normal(0, (2, 32, 32), jnp.bfloat16)}
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
  # A matrix that was zero at first keeps the norm that it has got since.
  zero = state._replace(radius=0 * state.radius)
  kept, _ = optimizer.update(updates, zero, params)
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


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_a_stored_radius_on_a_mesh(axis_type):
  mesh = jax.make_mesh((8,), ('fsdp',), axis_types=(axis_type,))
  params = {'w': normal(0, (2, 8, 16))}
  optimizer = merit_optax.hyperball(
    merit_optax.scale_by_muon(weight_dimension_numbers=_Spec(1, 2)),
    0.1,
    radius='initial',
    weight_dimension_numbers=_Spec(1, 2),
  )
  expected = _last(optimizer, params, [params])
  sharding = NamedSharding(mesh, P(None, 'fsdp'))
  found = _last(optimizer, jax.device_put(params, sharding), [params])
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


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
