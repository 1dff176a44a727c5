"""Muon and Hyperball in one call: which parameters, and which steps."""

import ast
import functools
import re
import warnings

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run

_SCHEDULE = optax.linear_schedule(0.1, 0.0, 5)
_STACKED = functools.partial(
  merit_optax.flax_dimension_numbers, stacked={'blocks/': 1}
)
# Named as in Flax, with scanned layers. Hidden matrices have one size.
_MODEL = {
  'token_embedding': {'embedding': normal(0, (20, 8))},
  'blocks': {
    'qkv': {'kernel': normal(1, (2, 8, 16)), 'bias': jnp.ones((2, 16))},
    'mlp': {'kernel': normal(2, (2, 16, 8))},
  },
  'attention': {'query': {'kernel': normal(3, (8, 2, 8))}},
  'gain': jnp.ones(8),
  'lm_head': {'kernel': normal(4, (8, 20))},
}
_PARTS = {
  'token_embedding': {'embedding': 'others'},
  'blocks': {
    'qkv': {'kernel': 'hidden', 'bias': 'others'},
    'mlp': {'kernel': 'hidden'},
  },
  'attention': {'query': {'kernel': 'hidden'}},
  'gain': 'others',
  'lm_head': {'kernel': 'others'},
}


def _last(optimizer, params):
  """Returns the parameters after three steps."""
  gradients = [jax.tree.map(f, params) for f in (np.sin, np.cos, np.cos)]
  *_, last = run(optimizer, params, gradients)
  return last.params


# Which parameters are hidden.


_CHOSEN = {
  'token_embedding': False,
  'blocks': {'qkv': False, 'mlp': True},
  'attention': False,
  'gain': False,
  'lm_head': True,
}


@pytest.mark.parametrize(
  'hidden',
  [
    'mlp|lm_head',
    re.compile('MLP|lm_head', re.IGNORECASE),
    ['mlp', re.compile('^lm_head/')],
    _CHOSEN,
    lambda _: _CHOSEN,
  ],
  ids=['pattern', 'compiled', 'patterns', 'tree', 'function'],
)
def test_hidden_matrices_can_be_chosen(hidden):
  found = merit_optax.hidden_matrices(_MODEL, hidden)
  assert found['lm_head']['kernel'] and found['blocks']['mlp']['kernel']
  assert sum(jax.tree.leaves(found)) == 2


@pytest.mark.parametrize(
  'hidden, shape, message',
  [
    ('bias', (3, 3), r'^hidden .*two or more axes.*, got mlp/bias \(3,\)'),
    (['mlp', 'no'], (3, 3), "^hidden must match .*got 'no', found"),
    (lambda _: {'mlp': False}, (3, 3), '^hidden must choose at least one'),
    (3, (3, 3), '^hidden must be a tree of booleans.* regular expression'),
    (re.compile(b'mlp'), (3, 3), '^hidden must hold regular expressions'),
    ({'mlp': {'kernel': True}}, (3, 3), '^hidden must be a tree like params'),
    (None, (2, 3, 3), 'not recognized.*stacked'),
  ],
)
def test_choices_that_do_not_fit_are_refused(hidden, shape, message):
  params = {'mlp': {'kernel': jnp.ones(shape), 'bias': jnp.ones(3)}}
  with pytest.raises(ValueError, match=message):
    merit_optax.muon_hyperball(0.1, hidden=hidden).init(params)


def test_names_that_say_nothing_are_warned_of_and_left_to_the_others():
  params = {'mlp': {'kernel': jnp.eye(3)}, 'adapter': jnp.eye(3)}
  optimizer = merit_optax.muon(0.1)
  with pytest.warns(UserWarning, match=r'other optimizer: adapter \(3, 3\)'):
    state = optimizer.init(params)
  with warnings.catch_warnings(action='error'):  # Once.
    updates, _ = optimizer.update(params, state, params)
    merit_optax.muon(0.1, hidden='mlp').init(params)
  np.testing.assert_allclose(updates['adapter'], -0.1 * np.eye(3), rtol=1e-4)


_NOTHING = r'^No .* Pass hidden=\[.*\], without'
_NAMES = ['layers/0/w', 'layers/1/w', 'x.2.k', 'attn/q/w', 'attn/k/w', '(odd)']


@hypothesis.given(
  st.dictionaries(
    st.sampled_from([*_NAMES, 'wte', 'layers/2/w', 'norm/scale', 'a/b/kernel']),
    st.sampled_from([(3, 3), (3, 4), (2, 3, 4), (5,)]),
    min_size=1,
  ).filter(lambda x: any(len(x[y]) > 1 for y in {*x} - {'norm/scale'})),
  st.sampled_from([merit_optax.muon, merit_optax.adam_hyperball]),
)
def test_what_messages_suggest_can_be_copied(shapes, build):
  params = {x: jax.ShapeDtypeStruct(s, jnp.float32) for x, s in shapes.items()}
  with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter('always')
    default = merit_optax.hidden_matrices(params)
    messages = [str(x.message) for x in record]
    if not any(default.values()):
      with pytest.raises(ValueError, match=_NOTHING) as error:
        build(0.1).init(params)
      messages.append(str(error.value))
  for text in messages:
    (hidden,) = re.findall(r'pass hidden=(\[.*?\])[;,]', text, re.IGNORECASE)
    with warnings.catch_warnings(action='error'):
      found = merit_optax.hidden_matrices(params, ast.literal_eval(hidden))
    # What a warning lists is chosen beside what names tell.
    expected = {
      x: default[x] or f'{x} {shapes[x]}' in messages[0] for x in params
    }
    if not any(expected.values()):
      expected['wte'] = True
    assert found == expected


@pytest.mark.parametrize('count, listed', [(8, 8), (9, 1)])
def test_first_and_last_layers_can_be_left_out_as_a_message_says(count, listed):
  params = {f'layers/{i}/kernel': jnp.eye(3) for i in range(count)}
  with (
    pytest.warns(UserWarning, match='do not tell'),
    pytest.raises(ValueError, match=_NOTHING) as error,
  ):
    merit_optax.muon(0.1).init(params)
  (hidden,) = re.findall(r'Pass hidden=(\[.*?\]),', str(error.value))
  hidden = ast.literal_eval(hidden)
  assert len(hidden) == listed
  if listed > 1:
    chosen = merit_optax.hidden_matrices(params, hidden[1:-1])
    assert [*chosen.values()] == [False, *[True] * (count - 2), False]


@hypothesis.given(
  st.sampled_from(['norm', 'ln_1', 'layer_norm', 'q_norm']),
  st.sampled_from(['weight', 'scale', 'w']),
  st.lists(st.integers(2, 4), min_size=2, max_size=3),
)
def test_expressions_do_not_choose_stacked_scales(norm, name, shape):
  params = {'blocks': {norm: {name: jnp.ones(shape)}, 'up': {name: jnp.eye(3)}}}
  with pytest.raises(ValueError, match=f'^hidden.*got blocks/{norm}/{name} '):
    merit_optax.hidden_matrices(params, f'blocks/.*{name}')
  chosen = jax.tree.map(lambda _: True, params)  # As it is meant.
  assert merit_optax.hidden_matrices(params, lambda _: chosen) == chosen


# Of RWKV-7, among others: parameters with one axis, which is no matrix's.
_VECTORS = ['w0', 'a0', 'x_k', 'k_k', 'out_gate', 'q', 'dt_proj', 'mlp']


@hypothesis.given(
  st.sampled_from(_VECTORS),
  st.lists(st.integers(2, 5), min_size=1, max_size=2),
  st.sampled_from(['layers', 'layers/attn', 'layers/mlp']),
  st.booleans(),
)
def test_what_a_spec_calls_a_vector_is_not_hidden(name, layers, where, scalar):
  axes = len(layers)
  specs = functools.partial(
    merit_optax.flax_dimension_numbers, stacked={'layers/': axes}
  )
  path, shape = f'{where}/{name}', (*layers, 4)[: axes + (not scalar)]
  kernels = {
    f'layers/attn/{x}_proj/kernel': jnp.ones((*layers, 4, 4)) for x in 'qkvo'
  }
  params = kernels | {path: jnp.ones(shape)}
  for build in (merit_optax.muon, merit_optax.adam_hyperball):
    with warnings.catch_warnings(action='error'):
      state = build(0.1, weight_dimension_numbers=specs).init(params)
    hidden = state.inner_states['hidden'].inner_state[0].mu
    assert {k for k, v in hidden.items() if isinstance(v, jax.Array)} == {
      *kernels
    }
    # A tree or a function of booleans is meant as it is; expressions are not.
    named = build(0.1, hidden='layers', weight_dimension_numbers=specs)
    with pytest.raises(ValueError, match=f'^hidden.*got {path} '):
      named.init(params)


@hypothesis.given(
  st.sampled_from(['dt', 'q', 'relative_position', 'e_score_correction', 'x']),
  st.lists(st.integers(1, 4), min_size=1, max_size=3),
  st.sampled_from(['layers', 'mixer', 'mlp/up', 'mlp/up/kernel']),
)
def test_a_bias_of_any_name_leaves_a_model_its_optimizer(stem, shape, where):
  params = {f'{where}_{stem}_bias': jnp.ones(shape), 'mlp/up': jnp.eye(3)}
  params |= {f'{where}/{stem}_bias': jnp.ones(shape)}
  for build in (merit_optax.muon, merit_optax.adam_hyperball):
    build(0.1).init(params)
  assert sum(merit_optax.hidden_matrices(params).values()) == 1


def test_a_choice_is_made_once_in_init_and_in_update():
  calls = []

  def hidden(params):
    calls.append(params)
    return jax.tree.map(lambda x: x.ndim > 1, params)

  optimizer, params = merit_optax.muon(0.1, hidden=hidden), {'w': jnp.eye(3)}
  state = optimizer.init(params)
  assert len(calls) == 1
  jax.eval_shape(optimizer.update, params, state, params)
  assert len(calls) == 2


@pytest.mark.parametrize(
  'build', [merit_optax.muon, merit_optax.muon_hyperball]
)
def test_an_empty_tree_of_specs_is_one(build):
  optimizer = build(0.1, weight_dimension_numbers={})
  with pytest.raises(ValueError, match='are missing'):
    optimizer.init({'mlp': {'up': jnp.eye(3)}})


# Which steps they take.


def _muon(direction):
  """Returns what a call of `muon` stands for, of hidden matrices."""
  return optax.chain(
    direction,
    merit_optax.scale_by_shape(
      lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
      weight_dimension_numbers=_STACKED,
    ),
    optax.add_decayed_weights(0.3),
    optax.scale_by_learning_rate(_SCHEDULE),
  )


def _hyperball(direction):
  """Returns what a call of `muon_hyperball` stands for."""
  return optax.chain(
    direction,
    merit_optax.scale_by_l2_norm_trust_ratio(weight_dimension_numbers=_STACKED),
    optax.scale_by_learning_rate(_SCHEDULE),
    merit_optax.keep_matrix_norms(weight_dimension_numbers=_STACKED),
  )


def _adam(factor=1.0, **settings):
  rate = optax.linear_schedule(0.1 * factor, 0.0, 5)
  return optax.chain(
    merit_optax.scale_by_adam(**settings), optax.scale_by_learning_rate(rate)
  )


_MUON_SETTINGS = dict(
  mu_dtype='float16', nesterov=False, ns_coeffs='polar_express', ns_steps=4,
  ns_dtype='bfloat16', weight_dimension_numbers=_STACKED,
)  # fmt: skip
_DIRECTION = merit_optax.scale_by_muon(beta=0.8, **_MUON_SETTINGS)
_ADAM_SETTINGS = dict(
  b1=0.8, b2=0.9, eps=0.1, mu_dtype='float16', bias_correction=True
)
_MERIT = merit_optax.merit(0.1, weight_dimension_numbers=_STACKED)
# Fewer parameters are compiled sooner.
_TRAINED = ('token_embedding', 'blocks')


@pytest.mark.parametrize(
  'actual, hidden, others',
  [
    (
      merit_optax.muon(_SCHEDULE, 0.8, weight_decay=0.3, **_MUON_SETTINGS),
      _muon(_DIRECTION),
      _adam(mu_dtype='float16', bias_correction=True),
    ),
    (
      merit_optax.muon_hyperball(_SCHEDULE, 0.8, **_MUON_SETTINGS),
      _hyperball(_DIRECTION),
      _adam(1 / 3, mu_dtype='float16'),
    ),
    (
      merit_optax.adam_hyperball(
        _SCHEDULE, weight_dimension_numbers=_STACKED, **_ADAM_SETTINGS
      ),
      _hyperball(merit_optax.scale_by_adam(**_ADAM_SETTINGS)),
      _adam(1 / 3, **_ADAM_SETTINGS),
    ),
    (
      merit_optax.adam_hyperball(
        _SCHEDULE,
        weight_dimension_numbers=_STACKED,
        others=optax.adamw(0.05),
        **_ADAM_SETTINGS,
      ),
      _hyperball(merit_optax.scale_by_adam(**_ADAM_SETTINGS)),
      optax.adamw(0.05),
    ),
    (
      merit_optax.partition_hidden(_MERIT, optax.adam(0.01)),
      _MERIT,
      optax.adam(0.01),
    ),
  ],
  ids=['muon', 'muon_hyperball', 'adam_hyperball', 'others', 'merit'],
)
def test_calls_are_partitions_of_public_parts(actual, hidden, others):
  labels = {name: _PARTS[name] for name in _TRAINED}
  expected = optax.partition({'hidden': hidden, 'others': others}, labels)
  params = {name: _MODEL[name] for name in _TRAINED}
  chex.assert_trees_all_close(
    *(_last(x, params) for x in (actual, expected)), rtol=1e-6, atol=1e-6
  )


@pytest.mark.parametrize(
  'optimizer, expected',
  [
    ('merit', 0.02),
    ('lamb', 0.0225),
    ('muon', 0.0125),
    ('muon_hyperball', 0.0625),
  ],
)
def test_starting_rates_are_the_documented_ones(optimizer, expected):
  rate = functools.partial(merit_optax.starting_learning_rate, optimizer)
  # With two digits. Four times the steps halve it, sixteen times the width
  # halves that of Muon alone.
  for steps, factor in ((400, 1), (1600, 0.5)):
    found = rate(steps, width=1024)
    np.testing.assert_allclose(found, factor * expected, rtol=0.05)
  assert rate(400, width=64) == pytest.approx(
    expected * (2 if optimizer == 'muon' else 1), rel=0.05
  )
  assert rate(1, width=64) == rate(150, width=64) > rate(180, width=64)


def test_rates_of_muon_in_optax_are_converted_as_documented():
  params = {'mlp_down': {'kernel': normal(1, (8, 16))}}
  factor = 2**0.5 / (0.2 * 16**0.5)
  ours = merit_optax.muon(0.1 * factor)
  theirs = optax.contrib.muon(0.1, beta=0.9)
  actual, expected = (_last(x, params) for x in (ours, theirs))
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'build', [merit_optax.muon_hyperball, merit_optax.adam_hyperball]
)
def test_learning_rates_can_be_injected(build):
  params = {'mlp_up': {'kernel': normal(0, (8, 16)), 'bias': jnp.ones(16)}}
  injected = optax.inject_hyperparams(build)(0.1)
  actual, expected = (
    _last(optimizer, params) for optimizer in (injected, build(0.1))
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
