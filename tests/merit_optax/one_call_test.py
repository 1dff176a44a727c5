"""Muon and Hyperball in one call: which parameters, which step, which norm."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run

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
  'attention': {'query': {'kernel': normal(3, (8, 2, 4))}},
  'gain': jnp.ones(8),
  'lm_head': {'kernel': normal(4, (8, 20))},
}
_SMALL = {'mlp_up': {'kernel': normal(0, (4, 6)), 'bias': jnp.ones(6)}}


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

_PARTS = {
  'token_embedding': {'embedding': 'others'},
  'blocks': {
    'qkv': {'kernel': 'hidden', 'bias': 'others'},
    'mlp': {'kernel': 'hidden'},
    'norm': {'scale': 'others'},
  },
  'attention': {'query': {'kernel': 'hidden'}},
  'gain': 'others',
  'lm_head': {'kernel': 'others'},
}


_CHOSEN = {
  'token_embedding': False,
  'blocks': {'qkv': False, 'mlp': True, 'norm': False},
  'attention': False,
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


@pytest.mark.parametrize(
  'hidden, shape, message',
  [
    ('bias', (3, 3), r'^hidden .*two or more axes, got mlp/bias \(3,\)'),
    (
      ['mlp', 'no'],
      (3, 3),
      "^hidden must match .*got 'no', found",
    ),
    (lambda _: {'mlp': False}, (3, 3), '^hidden must choose at least one'),
    (3, (3, 3), '^hidden must be a tree of booleans.* regular expression'),
    ({'mlp': {'kernel': True}}, (3, 3), '^hidden must be a tree like params'),
    (None, (2, 3, 3), 'not recognized.*stacked'),
  ],
)
def test_what_does_not_fit_is_refused(hidden, shape, message):
  params = {'mlp': {'kernel': jnp.ones(shape), 'bias': jnp.ones(3)}}
  for function in (
    merit_optax.muon(0.1, hidden=hidden).init,
    merit_optax.muon_hyperball(0.1, hidden=hidden).init,
  ):
    with pytest.raises(ValueError, match=message):
      function(params)


def test_a_choice_that_is_no_expression_is_refused():
  params = {'kernel': jnp.ones((3, 3))}
  with pytest.raises(ValueError, match=r'^hidden must hold regular.*\('):
    merit_optax.hidden_matrices(params, '(')


def test_names_that_say_nothing_are_named_once_and_left_to_the_others():
  params = {'mlp': {'kernel': jnp.eye(3)}, 'adapter': jnp.eye(3)}
  optimizer = merit_optax.muon(0.1)
  with pytest.warns(UserWarning, match=r'other optimizer: adapter \(3, 3\)'):
    state = optimizer.init(params)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    updates, _ = optimizer.update(params, state, params)
    merit_optax.muon(0.1, hidden='mlp').init(params)
  np.testing.assert_allclose(updates['adapter'], -0.1 * np.eye(3), rtol=1e-4)


def test_a_model_without_hidden_matrices_is_refused():
  with (
    pytest.warns(UserWarning, match='adapter'),
    pytest.raises(ValueError, match='^hidden must choose at least one'),
  ):
    merit_optax.muon(0.1).init({'adapter': jnp.eye(3)})


# Muon.


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


def _hyperball(direction, radius='current'):
  """Returns what a call of `muon_hyperball` stands for."""
  return optax.chain(
    direction,
    merit_optax.scale_by_l2_norm_trust_ratio(weight_dimension_numbers=_STACKED),
    optax.scale_by_learning_rate(_SCHEDULE),
    merit_optax.keep_matrix_norms(
      radius=radius, weight_dimension_numbers=_STACKED
    ),
  )


def _adam(factor=1.0, **settings):
  rate = optax.linear_schedule(0.1 * factor, 0.0, 5)
  return optax.chain(
    merit_optax.scale_by_adam(**settings), optax.scale_by_learning_rate(rate)
  )


@pytest.mark.parametrize('others', [None, optax.adamw(0.05)])
def test_muon_is_a_partition_of_public_parts(others):
  direction = merit_optax.scale_by_muon(
    'polar_express', 4, 0.8, mu_dtype='float16', nesterov=False,
    ns_dtype='bfloat16', weight_dimension_numbers=_STACKED,
  )  # fmt: skip
  actual = merit_optax.muon(
    _SCHEDULE, 0.8, weight_decay=0.3, others=others,
    weight_dimension_numbers=_STACKED, mu_dtype='float16', nesterov=False,
    ns_coeffs='polar_express', ns_steps=4, ns_dtype='bfloat16',
  )  # fmt: skip
  adam = _adam(mu_dtype='float16', bias_correction=True)
  expected = optax.partition(
    {'hidden': _muon(direction), 'others': others or adam}, _PARTS
  )
  _assert_same_steps(actual, expected, _MODEL)


@pytest.mark.parametrize('others', [None, optax.adamw(0.05)])
def test_muon_hyperball_is_a_partition_of_public_parts(others):
  direction = merit_optax.scale_by_muon(
    'polar_express', 4, 0.8, mu_dtype='float16', nesterov=False,
    ns_dtype='bfloat16', weight_dimension_numbers=_STACKED,
  )  # fmt: skip
  actual = merit_optax.muon_hyperball(
    _SCHEDULE, 0.8, others=others, weight_dimension_numbers=_STACKED,
    mu_dtype='float16', nesterov=False, ns_coeffs='polar_express', ns_steps=4,
    ns_dtype='bfloat16', radius='initial',
  )  # fmt: skip
  expected = optax.partition(
    {
      'hidden': _hyperball(direction, 'initial'),
      'others': others or _adam(1 / 3, mu_dtype='float16'),
    },
    _PARTS,
  )
  _assert_same_steps(actual, expected, _MODEL)


@pytest.mark.parametrize('others', [None, optax.adamw(0.05)])
def test_adam_hyperball_is_a_partition_of_public_parts(others):
  settings = dict(
    b1=0.8, b2=0.9, eps=0.1, mu_dtype='float16', bias_correction=True
  )
  actual = merit_optax.adam_hyperball(
    _SCHEDULE, others=others, weight_dimension_numbers=_STACKED, **settings
  )
  direction = merit_optax.scale_by_adam(**settings)
  expected = optax.partition(
    {
      'hidden': _hyperball(direction),
      'others': others or _adam(1 / 3, **settings),
    },
    _PARTS,
  )
  _assert_same_steps(actual, expected, _MODEL)


def test_merit_on_hidden_matrices_beside_another_optimizer():
  merit = merit_optax.merit(0.1, weight_dimension_numbers=_STACKED)
  others = optax.adam(0.01)
  expected = optax.partition({'hidden': merit, 'others': others}, _PARTS)
  actual = merit_optax.partition_hidden(merit, others)
  _assert_same_steps(actual, expected, _MODEL)


@pytest.mark.parametrize('name', ['optimizer', 'others'])
def test_a_partition_is_of_optimizers(name):
  given = {'optimizer': optax.sgd(0.1), 'others': optax.sgd(0.1)} | {name: 0.1}
  with pytest.raises(ValueError, match=f'^{name} must be an optax.Grad.*0.1'):
    merit_optax.partition_hidden(**given)


_MATRICES = {'mlp_up': normal(0, (4, 6)), 'mlp_down': normal(1, (9, 4))}


@pytest.mark.parametrize('name', _MATRICES)
def test_a_rate_for_the_default_of_optax_is_converted_as_documented(name):
  params = {name: {'kernel': _MATRICES[name]}}
  rows, columns = _MATRICES[name].shape
  factor = max(1, columns / rows) ** 0.5 / (0.2 * max(rows, columns) ** 0.5)
  ours = merit_optax.muon(0.1 * factor)
  theirs = optax.contrib.muon(0.1, beta=0.9)
  actual, expected = (_last(x, params) for x in (ours, theirs))
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'build',
  [merit_optax.muon, merit_optax.muon_hyperball, merit_optax.adam_hyperball],
)
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
