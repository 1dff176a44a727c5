"""MERIT under the transformations of JAX: vmap, jit with donation."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run, step_function

_RATES = (0.01, 0.03, 0.1)


def _tree(seed):
  return {'w': normal([seed, 0], (4, 6)), 'b': normal([seed, 1], (6,))}


_GRADIENTS = [_tree(seed) for seed in range(10, 15)]


def _stack(trees):
  return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def test_a_batch_of_models_with_a_learning_rate_each():
  models = [_tree(seed) for seed in range(len(_RATES))]
  optimizer = optax.inject_hyperparams(merit_optax.merit)(0.0, weight_decay=0.1)
  params = _stack(models)
  state = jax.vmap(optimizer.init)(params)
  state.hyperparams['learning_rate'] = jnp.array(_RATES)
  step = jax.jit(jax.vmap(step_function(optimizer), in_axes=(0, 0, None)))
  for gradient in _GRADIENTS:
    params, state = step(params, state, gradient)
  # A matrix of a model has norms of its own, though vmap stacks them.
  expected = []
  for rate, model in zip(_RATES, models, strict=True):
    *_, last = run(merit_optax.merit(rate, weight_decay=0.1), model, _GRADIENTS)
    expected.append(last.params)
  chex.assert_trees_all_close(params, _stack(expected), rtol=1e-4, atol=1e-6)


def test_parameters_and_state_are_donated():
  optimizer, params = merit_optax.merit(0.1, weight_decay=0.1), _tree(0)
  *_, last = run(optimizer, params, _GRADIENTS)
  # Copies, since donation deletes what it is given.
  carry = jax.tree.map(jnp.copy, (params, optimizer.init(params)))
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
  params, *gradients = optax.tree.cast([_tree(0), *_GRADIENTS], jnp.bfloat16)
  step, state = jax.jit(step_function(optimizer)), optimizer.init(params)
  for gradient in gradients:
    params, state = step(params, state, gradient)
    assert step._cache_size() == 1
