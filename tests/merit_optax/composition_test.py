"""MERIT beside and inside the combinators of optax."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run

_RATE = 0.1


def _tree(seed):
  return {'w': normal(seed, (5, 3)), 'b': normal(seed + 100, (4,))}


def _updates(optimizer, params, gradients):
  return [step.updates for step in run(optimizer, params, gradients)]


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
  params, gradient = _tree(0), _tree(1)
  settings = {'learning_rate': _RATE, 'weight_decay': 0.1} | settings
  optimizer = optax.inject_hyperparams(merit_optax.merit)(**settings)
  state = optimizer.init(params)
  state.hyperparams.update(jax.tree.map(jnp.array, numbers))
  actual, _ = optimizer.update(gradient, state, params)
  (expected,) = _updates(
    merit_optax.merit(**settings | numbers), params, [gradient]
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_micro_steps_equal_one_step_on_the_mean_gradient():
  k, params = 3, _tree(0)
  micro = [_tree(seed) for seed in range(1, 2 * k + 1)]
  mean = [
    jax.tree.map(lambda *g: sum(g) / k, *micro[i : i + k]) for i in (0, k)
  ]
  optimizer = merit_optax.merit(lambda count: _RATE / (count + 1))
  accumulated = optax.MultiSteps(optimizer, k).gradient_transformation()
  chex.assert_trees_all_close(
    _updates(accumulated, params, micro)[k - 1 :: k],
    _updates(optimizer, params, mean),
    rtol=1e-4,
    atol=1e-6,
  )


def test_parts_have_their_own_optimizers():
  params = _tree(0)
  gradients = [_tree(seed) for seed in range(1, 4)]
  labels = {'w': 'matrix', 'b': 'rest'}
  parts = {
    'matrix': merit_optax.merit(_RATE, weight_decay=0.1),
    'rest': optax.adamw(0.01, weight_decay=0.1),
  }
  both = _updates(optax.partition(parts, labels), params, gradients)
  for name, label in labels.items():
    alone = _updates(parts[label], params[name], [g[name] for g in gradients])
    actual = [updates[name] for updates in both]
    chex.assert_trees_all_close(actual, alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('shape', [(5, 3), (64, 80)])
@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_a_bad_gradient_shows_in_its_own_element_and_its_step_can_be_left_out(
  bad, shape
):
  # XLA on CPU drops NaN from maxima of many numbers, so the others may do well.
  params, *good = (
    _tree(seed) | {'w': normal(seed, shape)} for seed in range(3)
  )
  spoilt = {'w': good[0]['w'].at[1, 2].set(bad), 'b': good[0]['b']}
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  (step,) = run(optimizer, params, [spoilt])
  assert not jnp.isfinite(step.updates['w'][1, 2])
  assert jnp.all(jnp.isfinite(step.updates['b']))
  guarded = optax.apply_if_finite(optimizer, max_consecutive_errors=3)
  steps = list(run(guarded, params, [good[0], spoilt, good[1]]))
  _, expected = _updates(optimizer, params, good)
  chex.assert_trees_all_equal(steps[1].params, steps[0].params)
  chex.assert_trees_all_close(steps[2].updates, expected, rtol=1e-4, atol=1e-6)
