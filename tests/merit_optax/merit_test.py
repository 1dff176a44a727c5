"""The optimizer as a whole: its chain, combinators of Optax, jit and vmap."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run, step_function

_RATE = 0.1


def _tree(seed):
  """Returns a matrix below the clip, so that the ratio shows, and a bias."""
  return {
    'w': normal([seed, 0], (5, 3)) / 4,
    'b': 40 * normal([seed, 1], (4,)),
  }


_PARAMS, *_GRADIENTS = (_tree(seed) for seed in range(5))


def _updates(optimizer, params=_PARAMS, gradients=_GRADIENTS):
  return [step.updates for step in run(optimizer, params, gradients)]


def test_every_argument_reaches_its_transform():
  adam = {
    **{'b1': 0.8, 'b2': 0.7, 'eps': 0.1, 'eps_root': 0.2},
    **{'mu_dtype': 'bfloat16', 'nu_dtype': 'float16', 'bias_correction': True},
  }
  ratio = {
    'ratios': ('row', 'column'),
    'min_norm': 0.4,
    'weight_dimension_numbers': {
      'w': optax.contrib.MuonDimensionNumbers(1, 0),
      'b': None,
    },
  }
  others = {
    'weight_decay': 0.3,
    'mask': lambda params: {'w': True, 'b': False},
    'clip_threshold': 0.5,
    'trust_ratio_mask': {'w': True, 'b': False},
  }
  everything = adam | ratio | others
  assert everything.keys() == (
    inspect.signature(merit_optax.merit).parameters.keys() - {'learning_rate'}
  )
  chain = optax.chain(
    merit_optax.scale_by_adam(**adam),
    optax.add_decayed_weights(0.3, {'w': True, 'b': False}),
    optax.masked(
      merit_optax.scale_by_max_norm_trust_ratio(**ratio),
      {'w': True, 'b': False},
    ),
    merit_optax.elementwise_clip(0.5),
    optax.scale_by_learning_rate(_RATE),
  )
  merit = merit_optax.merit(_RATE, **everything)
  actual, expected = (
    list(run(optimizer, _PARAMS, _GRADIENTS)) for optimizer in (merit, chain)
  )
  chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize('empty', [{}, (), {'a': {}, 'b': None}], ids=str)
def test_empty_trees_pass_through(empty):
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  updates, _ = optimizer.update(empty, optimizer.init(empty), empty)
  assert updates == empty


# Combinators of Optax.


@pytest.mark.parametrize(
  'settings, numbers',
  [
    ({}, {'learning_rate': 0.5, 'clip_threshold': 0.01, 'eps': 1.0}),
    (
      {'clip_threshold': None, 'ratios': ('row',), 'nu_dtype': 'bfloat16'},
      {'min_norm': 1.0},
    ),
  ],
)
def test_injected_numbers_can_be_changed_in_the_state(settings, numbers):
  settings = {'learning_rate': _RATE, 'weight_decay': 0.1} | settings
  optimizer = optax.inject_hyperparams(merit_optax.merit)(**settings)
  state = jax.jit(optimizer.init)(_PARAMS)
  state.hyperparams.update(jax.tree.map(jnp.array, numbers))
  actual, _ = jax.jit(optimizer.update)(_GRADIENTS[0], state, _PARAMS)
  (expected,) = _updates(
    merit_optax.merit(**settings | numbers), gradients=_GRADIENTS[:1]
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_micro_steps_equal_one_step_on_the_mean_gradient():
  optimizer = merit_optax.merit(lambda count: _RATE / (count + 1))
  accumulated = optax.MultiSteps(optimizer, 2).gradient_transformation()
  means = [
    jax.tree.map(lambda x, y: (x + y) / 2, *_GRADIENTS[i : i + 2])
    for i in (0, 2)
  ]
  chex.assert_trees_all_close(
    _updates(accumulated)[1::2],
    _updates(optimizer, gradients=means),
    rtol=1e-4,
    atol=1e-6,
  )


@pytest.mark.parametrize('shape, bad', [((5, 3), jnp.nan), ((64, 80), jnp.inf)])
def test_a_step_with_a_bad_gradient_can_be_left_out(shape, bad):
  # XLA on CPU drops NaN from maxima of many numbers, so that the other elements
  # may be finite.
  params, *good = (
    _tree(seed) | {'w': normal(seed, shape)} for seed in range(3)
  )
  spoilt = {'w': good[0]['w'].at[1, 2].set(bad), 'b': good[0]['b']}
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  updates, *_ = _updates(optimizer, params, [spoilt])
  assert not jnp.isfinite(updates['w'][1, 2])
  assert jnp.all(jnp.isfinite(updates['b']))
  guarded = optax.apply_if_finite(optimizer, max_consecutive_errors=3)
  steps = list(run(guarded, params, [good[0], spoilt, good[1]]))
  _, expected = _updates(optimizer, params, good)
  chex.assert_trees_all_equal(steps[1].params, steps[0].params)
  chex.assert_trees_all_close(steps[2].updates, expected, rtol=1e-4, atol=1e-6)


# Transformations of JAX.


def test_vmap_over_models_with_a_learning_rate_each():
  rates, models = (0.01, 0.1), [_tree(seed) for seed in (10, 20)]
  optimizer = optax.inject_hyperparams(merit_optax.merit)(0.0, weight_decay=0.1)
  params = jax.tree.map(lambda *x: np.stack(x), *models)
  state = jax.jit(jax.vmap(optimizer.init))(params)
  state.hyperparams['learning_rate'] = jnp.array(rates)
  step = jax.jit(jax.vmap(step_function(optimizer), in_axes=(0, 0, None)))
  for gradient in _GRADIENTS:
    params, state = step(params, state, gradient)
  # A matrix of a model has norms of its own, though vmap stacks them.
  for i, (rate, model) in enumerate(zip(rates, models, strict=True)):
    *_, last = run(merit_optax.merit(rate, weight_decay=0.1), model, _GRADIENTS)
    actual = jax.tree.map(lambda x, i=i: x[i], params)
    chex.assert_trees_all_close(actual, last.params, rtol=1e-4, atol=1e-6)


def test_parameters_and_state_are_donated():
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  *_, last = run(optimizer, _PARAMS, _GRADIENTS)
  # Copies, since donation deletes what it is given.
  carry = jax.tree.map(jnp.copy, (_PARAMS, optimizer.init(_PARAMS)))
  step = jax.jit(step_function(optimizer), donate_argnums=(0, 1))
  for gradient in _GRADIENTS:
    old = jax.tree.leaves(carry)
    addresses = {x.unsafe_buffer_pointer() for x in old}
    carry = step(*carry, gradient)
    assert all(x.is_deleted() for x in old)
    new = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(carry)}
    # The new arrays lie where the old ones were, every one of them.
    assert new == addresses
  chex.assert_trees_all_close(
    carry, (last.params, last.state), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize(
  'optimizer',
  [
    merit_optax.merit(
      optax.linear_schedule(0.1, 0.0, 9),
      weight_decay=0.1,
      mu_dtype=jnp.bfloat16,
    ),
    optax.inject_hyperparams(merit_optax.merit)(0.1, weight_decay=0.1),
  ],
  ids=['schedule', 'injected'],
)
def test_one_compilation_serves_every_step(optimizer):
  # In bfloat16, since a moment that turned into float32 would be a second one,
  # as would a weak type that turned strong.
  params, *gradients = optax.tree.cast([_PARAMS, *_GRADIENTS], jnp.bfloat16)
  step, state = jax.jit(step_function(optimizer)), optimizer.init(params)
  for gradient in gradients:
    params, state = step(params, state, gradient)
    assert step._cache_size() == 1


def test_eager_steps_compile_nothing_anew(caplog):
  optimizer = optax.inject_hyperparams(merit_optax.merit)(_RATE)
  state = optimizer.init(_PARAMS)
  for _ in range(2):
    _, state = optimizer.update(_PARAMS, state, _PARAMS)
  with jax.log_compiles(), caplog.at_level('WARNING'):
    optimizer.update(_PARAMS, state, _PARAMS)
  assert not [x for x in caplog.messages if x.startswith('Compiling')]
