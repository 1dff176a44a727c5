"""MERIT beside and inside the combinators of optax."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax

_RATE = 0.1


def _normal(seed, shape):
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def _tree(seed):
  return {'w': _normal(seed, (5, 3)), 'b': _normal(seed + 100, (4,))}


def _run(optimizer, params, gradients):
  """Yields the updates and the state after each step, under jit."""
  update = jax.jit(optimizer.update)
  state = optimizer.init(params)
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    yield updates, state


def _scaled(update, weight):
  """Returns the update times the ratio of Algorithm 1, in float64."""
  z, w = np.asarray(update, np.float64), np.asarray(weight, np.float64)
  axes = [None] if z.ndim < 2 else [None, 0, 1]
  norms = [
    [np.max(np.abs(x), axis=axis, keepdims=True) for x in (w, z)]
    for axis in axes
  ]
  zero = np.any(
    np.broadcast_arrays(*((w == 0) | (z == 0) for w, z in norms)), axis=0
  )
  with np.errstate(all='ignore'):
    ratio = np.max(np.broadcast_arrays(*(w / z for w, z in norms)), axis=0)
  return np.where(zero, 1, ratio) * z


def _dead_row(gradient):
  """Returns a gradient whose first row is zero; Lion answers with zeros."""
  return gradient.at[0].set(0) if gradient.ndim == 2 else gradient


def _muon():
  # Muon's own default does not take a tree.
  spec = optax.contrib.MuonDimensionNumbers()
  return optax.contrib.scale_by_muon(
    weight_dimension_numbers={'tall': spec, 'wide': spec}
  )


@pytest.mark.parametrize(
  'inner, shapes',
  [
    (optax.scale_by_lion(), {'w': (5, 3), 'b': (4,), 'scalar': ()}),
    (_muon(), {'tall': (5, 3), 'wide': (3, 6)}),
  ],
  ids=['lion', 'muon'],
)
def test_the_ratio_scales_the_updates_of_others(inner, shapes):
  params = {k: _normal(1, shape) for k, shape in shapes.items()}
  gradients = [
    {k: _dead_row(_normal(seed, shape)) for k, shape in shapes.items()}
    for seed in range(2, 5)
  ]
  chain = optax.chain(inner, merit_optax.scale_by_max_norm_trust_ratio())
  state = chain.init(params)
  inner_state = inner.init(params)
  update, inner_update = jax.jit(chain.update), jax.jit(inner.update)
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    directions, inner_state = inner_update(gradient, inner_state, params)
    expected = jax.tree.map(_scaled, directions, params)
    # Another program, other fusions: Muon's products differ by some ulps.
    chex.assert_trees_all_close(updates, expected, rtol=1e-4, atol=1e-6)
    params = optax.apply_updates(params, optax.tree.scale(-_RATE, updates))


@pytest.mark.parametrize(
  'options',
  [
    {},
    {
      'weight_decay': 0.1,
      'min_norm': 0.01,
      'clip_threshold': 0.5,
      'eps_root': 1e-8,
      'bias_correction': True,
    },
    {'clip_threshold': None, 'ratios': ('row',), 'nu_dtype': 'bfloat16'},
  ],
  ids=['defaults', 'numbers', 'others'],
)
def test_injected_hyperparameters_change_nothing(options):
  params = _tree(0)
  gradients = [_tree(seed) for seed in range(1, 4)]
  injected = optax.inject_hyperparams(merit_optax.merit)(_RATE, **options)
  actual = [updates for updates, _ in _run(injected, params, gradients)]
  plain = merit_optax.merit(_RATE, **options)
  expected = [updates for updates, _ in _run(plain, params, gradients)]
  # 1 - b1 is taken in float32 there and in float64 here.
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_injected_learning_rate_can_be_changed_in_the_state():
  params, gradient = _tree(0), _tree(1)
  optimizer = optax.inject_hyperparams(merit_optax.merit)(learning_rate=0.125)
  update = jax.jit(optimizer.update)
  state = optimizer.init(params)
  before, _ = update(gradient, state, params)
  state.hyperparams['learning_rate'] = jnp.array(0.5)
  after, _ = update(gradient, state, params)
  chex.assert_trees_all_equal(after, optax.tree.scale(4.0, before))
  assert jnp.all(before['w'] != 0)


@pytest.mark.parametrize(
  'name, value', [('clip_threshold', 0.01), ('min_norm', 10.0), ('eps', 1.0)]
)
def test_injected_numbers_can_be_changed_in_the_state(name, value):
  params, gradient = _tree(0), _tree(1)
  optimizer = optax.inject_hyperparams(merit_optax.merit)(
    _RATE, weight_decay=0.1
  )
  state = optimizer.init(params)
  state.hyperparams[name] = jnp.array(value)
  actual, _ = optimizer.update(gradient, state, params)
  plain = merit_optax.merit(_RATE, weight_decay=0.1, **{name: value})
  expected, _ = plain.update(gradient, plain.init(params), params)
  chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_injected_schedule_drives_the_learning_rate():
  params = _tree(0)
  gradients = [_tree(seed) for seed in range(1, 4)]
  schedule = optax.linear_schedule(0.1, 0.0, 10)
  injected = optax.inject_hyperparams(merit_optax.merit)(schedule)
  actual = [updates for updates, _ in _run(injected, params, gradients)]
  plain = merit_optax.merit(schedule)
  expected = [updates for updates, _ in _run(plain, params, gradients)]
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_micro_steps_equal_one_step_on_the_mean_gradient():
  k, params = 3, _tree(0)
  micro = [_tree(seed) for seed in range(1, 2 * k + 1)]
  mean = [
    jax.tree.map(lambda *g: sum(g) / k, *micro[i : i + k]) for i in (0, k)
  ]
  optimizer = merit_optax.merit(lambda count: _RATE / (count + 1))
  accumulated = optax.MultiSteps(optimizer, k).gradient_transformation()
  actual = [updates for updates, _ in _run(accumulated, params, micro)]
  expected = [updates for updates, _ in _run(optimizer, params, mean)]
  chex.assert_trees_all_close(
    actual[k - 1 :: k], expected, rtol=1e-4, atol=1e-6
  )
  still = optax.tree.zeros_like(params)
  for i in (0, 1, 3, 4):
    chex.assert_trees_all_equal(actual[i], still)


def test_masked_parameters_pass_through():
  params = _tree(0)
  gradients = [_tree(seed) for seed in range(1, 4)]
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  masked = optax.masked(optimizer, {'w': True, 'b': False})
  actual = [updates for updates, _ in _run(masked, params, gradients)]
  alone = _run(optimizer, params['w'], [g['w'] for g in gradients])
  for updates, gradient, (expected, _) in zip(
    actual, gradients, alone, strict=True
  ):
    chex.assert_trees_all_close(updates['w'], expected, rtol=1e-6)
    chex.assert_trees_all_equal(updates['b'], gradient['b'])


def test_partition_gives_each_part_its_own_optimizer():
  params = _tree(0)
  gradients = [_tree(seed) for seed in range(1, 4)]
  parts = {
    'matrix': merit_optax.merit(_RATE, weight_decay=0.1),
    'rest': optax.adamw(0.01, weight_decay=0.1),
  }
  labels = {'w': 'matrix', 'b': 'rest'}
  both = [u for u, _ in _run(optax.partition(parts, labels), params, gradients)]
  for name, part in (('w', 'matrix'), ('b', 'rest')):
    alone = _run(parts[part], params[name], [g[name] for g in gradients])
    actual = [updates[name] for updates in both]
    expected = [updates for updates, _ in alone]
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_a_step_with_a_bad_gradient_is_left_out(bad):
  params = _tree(0)
  good = [_tree(seed) for seed in range(1, 3)]
  spoilt = {'w': good[0]['w'].at[1, 2].set(bad), 'b': good[0]['b']}
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  guarded = optax.apply_if_finite(optimizer, max_consecutive_errors=3)
  steps = list(_run(guarded, params, [good[0], spoilt, good[1]]))
  expected = list(_run(optimizer, params, good))
  chex.assert_trees_all_equal(steps[1][0], optax.tree.zeros_like(params))
  chex.assert_trees_all_equal(steps[1][1].inner_state, steps[0][1].inner_state)
  chex.assert_trees_all_close(steps[2][0], expected[1][0], rtol=1e-4, atol=1e-6)


def test_without_a_guard_one_bad_gradient_spoils_its_own_matrix_only():
  params, gradient = _tree(0), _tree(1)
  gradient['w'] = gradient['w'].at[1, 2].set(jnp.nan)
  ((updates, _),) = _run(merit_optax.merit(_RATE), params, [gradient])
  assert jnp.all(jnp.isnan(updates['w']))
  assert jnp.all(jnp.isfinite(updates['b']))


def test_a_clip_of_the_global_norm_goes_before():
  params, gradient = _tree(0), _tree(1)
  optimizer = merit_optax.merit(_RATE, eps=0.0)
  clipped = optax.chain(optax.clip_by_global_norm(0.01), optimizer)
  ((actual, _),) = _run(clipped, params, [gradient])
  ((expected, _),) = _run(optimizer, params, [gradient])
  # MERIT does not see the size of the gradient, but for eps.
  chex.assert_trees_all_close(actual, expected, rtol=1e-5)
