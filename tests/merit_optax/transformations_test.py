"""MERIT under the transformations of JAX: vmap, jit with donation."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, step_function

_RATES = (0.01, 0.03, 0.1)


def _params(seed=0):
  return {
    'hidden': normal([seed, 1], (4, 6)) / 2,
    'bias': normal([seed, 2], (6,)) / 9,
    'output': normal([seed, 3], (6, 2)) / 2,
  }


def _loss(params, inputs):
  targets = jnp.tanh(inputs[:, :2] - inputs[:, 2:])
  hidden = jnp.tanh(inputs @ params['hidden'] + params['bias'])
  return jnp.mean((hidden @ params['output'] - targets) ** 2)


def _batches():
  return normal(7, (5, 16, 4))


def _make_step(optimizer):
  def step(params, state, inputs):
    return step_function(optimizer)(
      params, state, jax.grad(_loss)(params, inputs)
    )

  return step


def _train(optimizer, params):
  """Returns parameters and state after a loop in Python."""
  step, state = jax.jit(_make_step(optimizer)), optimizer.init(params)
  for inputs in _batches():
    params, state = step(params, state, inputs)
  return params, state


def _stack(trees):
  return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def test_a_batch_of_models_with_a_learning_rate_each():
  models = [_params(seed) for seed in range(len(_RATES))]
  optimizer = optax.inject_hyperparams(merit_optax.merit)(0.0, weight_decay=0.1)
  params = _stack(models)
  state = jax.vmap(optimizer.init)(params)
  state.hyperparams['learning_rate'] = jnp.array(_RATES)
  step = jax.jit(jax.vmap(_make_step(optimizer), in_axes=(0, 0, None)))
  for inputs in _batches():
    params, state = step(params, state, inputs)
  # A matrix of a model has norms of its own, though vmap stacks them.
  expected = [
    _train(merit_optax.merit(rate, weight_decay=0.1), model)[0]
    for rate, model in zip(_RATES, models, strict=True)
  ]
  chex.assert_trees_all_close(params, _stack(expected), rtol=1e-4, atol=1e-6)


def test_parameters_and_state_are_donated():
  optimizer, params = merit_optax.merit(0.1, weight_decay=0.1), _params()
  expected = _train(optimizer, params)
  # Copies, since donation deletes what it is given.
  carry = jax.tree.map(jnp.copy, (params, optimizer.init(params)))
  step = jax.jit(_make_step(optimizer), donate_argnums=(0, 1))
  for inputs in _batches():
    old = jax.tree.leaves(carry)
    addresses = {x.unsafe_buffer_pointer() for x in old}
    carry = step(*carry, inputs)
    assert all(x.is_deleted() for x in old)
    new = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(carry)}
    # The new arrays lie where the old ones were, every one of them.
    assert new == addresses
  chex.assert_trees_all_equal(carry, expected)


@pytest.mark.parametrize(
  'optimizer',
  [
    merit_optax.merit(0.1),
    merit_optax.merit(optax.linear_schedule(0.1, 0.0, 9), weight_decay=0.1),
    merit_optax.merit(0.1, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16),
    optax.inject_hyperparams(merit_optax.merit)(0.1, weight_decay=0.1),
  ],
  ids=['plain', 'schedule', 'bfloat16', 'injected'],
)
def test_one_compilation_serves_every_step(optimizer):
  # In bfloat16, since a moment that turned into float32 would be a second one,
  # as would a weak type that turned strong.
  params = optax.tree.cast(_params(), jnp.bfloat16)
  step, state = jax.jit(_make_step(optimizer)), optimizer.init(params)
  for inputs in _batches():
    params, state = step(params, state, inputs)
    assert step._cache_size() == 1
