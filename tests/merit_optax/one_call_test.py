"""Muon and Hyperball in one call: which parameters, which step, which norm."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import make_mesh, normal, run

_Spec = optax.contrib.MuonDimensionNumbers
_SCHEDULE = optax.linear_schedule(0.1, 0.0, 5)
_STACKED = functools.partial(
  merit_optax.flax_dimension_numbers, stacked={'blocks/': 1}
)
# Named as in Flax, with scanned layers.
_MODEL = {
  'token_embedding': {'embedding': normal(0, (20, 8))},
  'blocks': {
    'qkv': {'kernel': normal(1, (2, 8, 24)), 'bias': jnp.ones((2, 24))},
    'mlp': {'kernel': normal(2, (2, 8, 16))},
    'norm': {'scale': jnp.ones((2, 8))},
  },
  'out': {'query': {'kernel': normal(3, (8, 2, 4))}},
  'gain': jnp.ones(8),
  'lm_head': {'kernel': normal(4, (8, 20))},
}
_SMALL = {'kernel': normal(0, (4, 6)), 'bias': jnp.ones(6)}


def _last(optimizer, params, gradients=None):
  """Returns the parameters after some steps, three by default."""
  if gradients is None:
    gradients = [jax.tree.map(f, params) for f in (jnp.sin, jnp.cos, jnp.cos)]
  *_, last = run(optimizer, params, gradients)
  return last.params


def _assert_same_steps(actual, expected, params):
  chex.assert_trees_all_close(
    *(_last(x, params) for x in (actual, expected)), rtol=1e-6, atol=1e-6
  )


# Which parameters are hidden.

_HIDDEN_NAMES = (
  *('heads/0/weight', 'attention/query/kernel', 'headline/kernel', 'w1'),
  *('MultiHeadAttention_0/kernel', 'AttentionHead_0/kernel', 'layers/0/weight'),
  *('norm_blocks/up/weight', 'adaptive_norm/kernel', 'kiln/weight'),
  *('multi_head_attention/query/kernel', 'attention_head/w', 'attn_head_1/w'),
  *('ensemble/kernel', 'member/kernel'),
)
_OTHER_NAMES = (
  *('wte', 'wpe', 'patchify/kernel', 'patch_embed/kernel', 'embedder/w'),
  *('head/weight', 'policy_head/kernel', 'logits_dense/kernel', 'embed/weight'),
  *('classifier/weight', 'PosEmbed_0/kernel', 'LMHead_0/kernel'),
  *('OutputHead/kernel', 'ClassificationHead_1/kernel', 'Logits_0/kernel'),
  *('Classifier/kernel', 'token/embedding', 'blocks/qkv/bias', 'norm/scale'),
  *('logitdense/kernel', 'blocks/rms_norm/weight', 'layers/ln_1/weight'),
  *('tok_emb/weight', 'pos_emb', 'emb_patches/kernel', 'multi_task_head/w'),
  *('attention_classifier/kernel', 'multi_logits/kernel'),
)


def test_embeddings_heads_biases_scales_and_vectors_are_not_hidden():
  params = dict.fromkeys((*_HIDDEN_NAMES, *_OTHER_NAMES), jnp.ones((3, 4)))
  hidden = merit_optax.hidden_matrices(params | {'vector': jnp.ones(3)})
  found = [name for name, is_hidden in hidden.items() if is_hidden]
  assert {*found} == {*_HIDDEN_NAMES}


# Of `muon`; Hyperball has vectors among the others.
_PARTS = {
  'token_embedding': {'embedding': 'others'},
  'blocks': {
    'qkv': {'kernel': 'hidden', 'bias': 'vectors'},
    'mlp': {'kernel': 'hidden'},
    'norm': {'scale': 'vectors'},
  },
  'out': {'query': {'kernel': 'hidden'}},
  'gain': 'vectors',
  'lm_head': {'kernel': 'others'},
}


def test_a_table_says_which_part_a_parameter_is_in():
  table = merit_optax.describe_hyperball(
    _MODEL, weight_dimension_numbers=_STACKED
  )
  parts = dict(x.split()[:2] for x in table.splitlines()[1:])
  paths, _ = jax.tree.flatten_with_path(_PARTS)
  assert parts == {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in paths
  }


_CHOSEN = {
  'token_embedding': False,
  'blocks': {'qkv': False, 'mlp': True, 'norm': False},
  'out': False,
  'gain': False,
  'lm_head': True,
}


@pytest.mark.parametrize(
  'hidden',
  ['mlp|lm_head', ['mlp', '^lm_head/'], _CHOSEN, lambda _: _CHOSEN],
  ids=['pattern', 'patterns', 'tree', 'function'],
)
def test_the_choice_can_be_another(hidden):
  found = merit_optax.hidden_matrices(_MODEL, hidden)
  assert found['lm_head']['kernel'] and found['blocks']['mlp']['kernel']
  assert sum(jax.tree.leaves(found)) == 2
  table = merit_optax.describe_hyperball(
    _MODEL, hidden=hidden, weight_dimension_numbers=_STACKED
  )
  assert table.count(' hidden ') == 2


@pytest.mark.parametrize(
  'hidden, shape, message',
  [
    ('bias', (3, 3), r'^hidden .*two or more axes, got bias \(3,\)'),
    ('nothing', (3, 3), '^hidden .*at least one parameter, got none of bias'),
    (3, (3, 3), '^hidden must be a tree of booleans.* regular expression'),
    ({'kernel': True}, (3, 3), '^hidden must be a tree like params'),
    (None, (2, 3, 3), 'not recognized.*stacked'),
  ],
)
def test_what_does_not_fit_is_refused(hidden, shape, message):
  params = {'kernel': jnp.ones(shape), 'bias': jnp.ones(3)}
  for function in (
    merit_optax.muon(0.1, hidden=hidden).init,
    merit_optax.muon_hyperball(0.1, hidden=hidden).init,
    functools.partial(merit_optax.describe_hyperball, hidden=hidden),
  ):
    with pytest.raises(ValueError, match=message):
      function(params)


def test_a_choice_that_is_no_expression_is_refused():
  params = {'kernel': jnp.ones((3, 3))}
  with pytest.raises(ValueError, match=r'^hidden must hold regular.*\('):
    merit_optax.hidden_matrices(params, '(')


def test_hidden_matrices_without_rows_are_refused():
  specs = {'kernel': _Spec(0, 1), 'router': {'kernel': None}}
  params = {'kernel': jnp.eye(3), 'router': {'kernel': jnp.eye(3)}}
  for function in (
    merit_optax.muon(0.1, weight_dimension_numbers=specs).init,
    merit_optax.adam_hyperball(0.1, weight_dimension_numbers=specs).init,
    functools.partial(
      merit_optax.describe_hyperball, weight_dimension_numbers=specs
    ),
  ):
    with pytest.raises(ValueError, match='must give .* none for router/kernel'):
      function(params)


# Muon.


def _adam(rate, decay=0.0, bias_correction=True, **settings):
  return optax.chain(
    merit_optax.scale_by_adam(bias_correction=bias_correction, **settings),
    optax.add_decayed_weights(decay),
    optax.scale_by_learning_rate(rate),
  )


def _muon(direction, others, vectors):
  """Returns what a call of `muon` for the model stands for."""
  hidden = optax.chain(
    direction,
    merit_optax.scale_by_shape(
      lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
      weight_dimension_numbers=_STACKED,
    ),
    optax.add_decayed_weights(0.3),
    optax.scale_by_learning_rate(_SCHEDULE),
  )
  return optax.partition(
    {'hidden': hidden, 'others': others, 'vectors': vectors}, _PARTS
  )


def test_muon_is_a_partition_of_public_parts():
  direction = merit_optax.scale_by_muon(
    'polar_express', 4, 0.8, mu_dtype='float16', nesterov=False,
    ns_dtype='bfloat16', weight_dimension_numbers=_STACKED,
  )  # fmt: skip
  settings = dict(
    b1=0.7, b2=0.8, eps=0.1, mu_dtype='float16', nu_dtype='bfloat16',
    bias_correction=False,
  )  # fmt: skip
  expected = _muon(
    direction, _adam(0.05, 0.2, **settings), _adam(0.02, 0.2, **settings)
  )
  actual = merit_optax.muon(
    _SCHEDULE, 0.8, weight_decay=0.3, adam_learning_rate=0.05,
    vector_learning_rate=0.02, adam_b1=0.7, adam_b2=0.8, adam_eps=0.1,
    adam_bias_correction=False, adam_weight_decay=0.2,
    weight_dimension_numbers=_STACKED, mu_dtype='float16', nu_dtype='bfloat16',
    nesterov=False, ns_coeffs='polar_express', ns_steps=4,
    ns_dtype='bfloat16',
  )  # fmt: skip
  _assert_same_steps(actual, expected, _MODEL)


@pytest.mark.parametrize(
  'given, rates',
  [
    ({}, (_SCHEDULE, _SCHEDULE)),
    ({'adam_learning_rate': 0.05}, (0.05, 0.05)),
    ({'vector_learning_rate': 0.02}, (_SCHEDULE, 0.02)),
  ],
)
def test_a_rate_that_is_not_given_is_that_of_the_larger_group(given, rates):
  direction = merit_optax.scale_by_muon(
    beta=0.9, weight_dimension_numbers=_STACKED
  )
  # The others do not decay.
  actual = merit_optax.muon(
    _SCHEDULE, weight_decay=0.3, weight_dimension_numbers=_STACKED, **given
  )
  _assert_same_steps(actual, _muon(direction, *map(_adam, rates)), _MODEL)


_MATRICES = {'wide': normal(0, (4, 6)), 'tall': normal(1, (9, 4))}


@pytest.mark.parametrize('name', _MATRICES)
def test_a_rate_for_the_default_of_optax_is_converted_as_documented(name):
  params = {name: _MATRICES[name]}
  rows, columns = params[name].shape
  factor = max(1, columns / rows) ** 0.5 / (0.2 * max(rows, columns) ** 0.5)
  ours = merit_optax.muon(0.1 * factor)
  theirs = optax.contrib.muon(0.1, beta=0.9)
  actual, expected = (_last(x, params) for x in (ours, theirs))
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


# Hyperball.


def _partition(hidden, *others):
  """Returns what a call of a Hyperball stands for."""
  return optax.partition(
    {True: hidden, False: optax.chain(*others)}, merit_optax.hidden_matrices
  )


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
  adam = merit_optax.scale_by_adam(
    0.7, 0.8, 0.1, mu_dtype='float16', nu_dtype='bfloat16', bias_correction=True
  )
  others = [
    optax.chain(adam, optax.add_decayed_weights(0.2), rate)
    for rate in (_A_THIRD, optax.scale_by_learning_rate(0.02))
  ]
  expected = optax.partition(
    dict(zip(('hidden', 'others', 'vectors'), (hidden, *others), strict=True)),
    _PARTS,
  )
  actual = merit_optax.muon_hyperball(
    _SCHEDULE, 0.8, vector_learning_rate=0.02, adam_b1=0.7, adam_b2=0.8,
    adam_eps=0.1, adam_bias_correction=True, adam_weight_decay=0.2,
    weight_dimension_numbers=_STACKED, mu_dtype='float16', nu_dtype='bfloat16',
    nesterov=False, ns_coeffs='polar_express', ns_steps=4,
    ns_dtype='bfloat16', radius='initial',
  )  # fmt: skip
  _assert_same_steps(actual, expected, _MODEL)


def test_adam_hyperball_is_a_partition_of_public_parts():
  adam = merit_optax.scale_by_adam(
    0.8, 0.9, 0.1, mu_dtype='float16', nu_dtype='bfloat16', bias_correction=True
  )
  # All others of the small model are vectors.
  others = optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(0.02)
  expected = _partition(merit_optax.hyperball(adam, _SCHEDULE), adam, *others)
  actual = merit_optax.adam_hyperball(
    *(_SCHEDULE, 0.8, 0.9, 0.1),
    bias_correction=True,
    mu_dtype='float16',
    nu_dtype='bfloat16',
    adam_weight_decay=0.1,
    adam_learning_rate=0.5,
    vector_learning_rate=0.02,
  )
  _assert_same_steps(actual, expected, _SMALL)


_OF_FLAX = {'weight_dimension_numbers': merit_optax.flax_dimension_numbers}


@pytest.mark.parametrize(
  'build, direction',
  [
    (
      merit_optax.muon_hyperball,
      merit_optax.scale_by_muon(beta=0.9, **_OF_FLAX),
    ),
    (merit_optax.adam_hyperball, merit_optax.scale_by_adam()),
  ],
)
def test_defaults_are_those_of_the_parts(build, direction):
  query = {'kernel': normal(1, (8, 2, 4)), 'bias': jnp.ones((2, 4))}
  hyperball = merit_optax.hyperball(direction, _SCHEDULE, **_OF_FLAX)
  expected = _partition(hyperball, merit_optax.scale_by_adam(), _A_THIRD)
  _assert_same_steps(build(_SCHEDULE), expected, _SMALL | {'query': query})


# Both calls of Muon.

_IN_ONE_CALL = pytest.mark.parametrize(
  'build', [merit_optax.muon, merit_optax.muon_hyperball]
)


@_IN_ONE_CALL
def test_what_decays_of_adam_can_be_chosen(build):
  params = {'w': jnp.eye(3), 'a': jnp.ones(3), 'b': jnp.ones(3)}
  optimizer = build(
    0.3,
    adam_learning_rate=0.1,
    adam_weight_decay=0.5,
    adam_weight_decay_mask={'w': True, 'a': True, 'b': False},
  )
  found = _last(optimizer, params, [optax.tree.zeros_like(params)])
  expected = params | {'a': (1 - 0.1 * 0.5) * params['a']}
  chex.assert_trees_all_close(found, expected, rtol=1e-6)


@_IN_ONE_CALL
def test_a_moment_of_adam_that_never_decays_is_refused(build):
  with pytest.raises(ValueError, match='^adam_b1 must be at most 0.996'):
    build(0.1, adam_b1=0.999, mu_dtype='bfloat16')
  params = optax.tree.cast(_SMALL, jnp.bfloat16)
  with pytest.raises(ValueError, match='^adam_b2 must be at most 0.996'):
    build(0.1, adam_b2=0.999).init(params)
  build(0.1, adam_b2=0.999, nu_dtype='float32').init(params)


@_IN_ONE_CALL
def test_learning_rates_can_be_injected(build):
  injected = optax.inject_hyperparams(build)(0.1)
  actual, expected = (
    _last(optimizer, _SMALL, [_SMALL] * 2)
    for optimizer in (injected, build(0.1))
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-5)


# The radius.


@pytest.mark.parametrize('radius', ['current', 'initial'])
def test_a_stored_radius_keeps_the_norm_of_bfloat16_weights(radius):
  spec = _Spec(1, 2)
  optimizer = merit_optax.hyperball(
    optax.scale_by_lion(), 0.01, radius=radius, weight_dimension_numbers=spec
  )

  def step(carry, i):
    w, state = carry
    gradient = jnp.cos(w * i).astype(jnp.bfloat16)
    updates, state = optimizer.update(gradient, state, w)
    return (optax.apply_updates(w, updates), state), None

  start = normal(0, (2, 32, 32), jnp.bfloat16)
  carry = start, optimizer.init(start)
  (last, _), _ = jax.jit(jax.lax.scan, static_argnums=0)(
    step, carry, jnp.arange(2000.0)
  )
  norms, last_norms = (
    jnp.linalg.norm(w.astype(jnp.float32), axis=(1, 2)) for w in (start, last)
  )
  drift = jnp.max(jnp.abs(last_norms / norms - 1))
  # What bfloat16 rounds in one step does not add up, if the norm is stored.
  assert (drift < 0.003) == (radius == 'initial')


def test_the_radius_is_that_of_the_first_parameters():
  params = {'a': 2 * jnp.ones((2, 3, 3)), 'b': jnp.eye(4), 'c': None}
  optimizer = merit_optax.keep_matrix_norms(
    radius='initial', weight_dimension_numbers=_Spec(-2, -1)
  )
  state = optimizer.init(params)
  np.testing.assert_allclose(state.radius, [6.0, 6.0, 2.0], rtol=1e-6)
  # A matrix that was zero at first keeps the norm that it has got since.
  zero = state._replace(radius=0 * state.radius)
  halves = jax.tree.map(lambda x: x / 2, params)
  shrinking = jax.tree.map(jnp.negative, halves)
  for updates, old_state, old in (
    (shrinking, state, params),
    (shrinking, zero, params),
    (optax.tree.zeros_like(params), state, halves),
  ):
    kept, _ = optimizer.update(updates, old_state, old)
    chex.assert_trees_all_close(
      optax.apply_updates(old, kept), params, rtol=1e-6, atol=1e-6
    )


# What describes it.


def test_the_table_says_where_products_are():
  small = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
  params = {
    'blocks': small,
    'embedding': small,
    'large': jax.ShapeDtypeStruct((2**15, 2**14), jnp.float32),
  }
  describe = functools.partial(
    merit_optax.describe_hyperball,
    params,
    hidden='blocks|large',
    weight_dimension_numbers=lambda _: {
      'blocks': _Spec(1, 2),
      'embedding': None,
      'large': _Spec(),
    },
  )
  lines = describe().splitlines()
  assert lines[1].endswith('  on one device')
  assert lines[2].endswith('  -')
  assert lines[3].endswith('  on one device')
  mesh = make_mesh(data=2, fsdp=4)
  with jax.set_mesh(mesh):
    lines = describe().splitlines()
    assert lines[1].endswith('  whole, over fsdp')
    assert lines[3].endswith('left to the compiler')
    named = describe(mesh_axes=('data', 'fsdp'))
    assert 'whole, over data, fsdp' in named
    assert 'whole' not in describe(mesh_axes=None)
    with pytest.raises(ValueError, match=r"^mesh_axes must .* got \['tp'\]"):
      describe(mesh_axes='tp')
