"""dtypes of updates, state and arithmetic, and moments of lower precision."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax

_RATE = 0.1
_REAL = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
_PAIRS = [
  *itertools.product(_REAL, repeat=2),
  *itertools.product([jnp.complex64], [*_REAL, jnp.complex64]),
]
_SOME_PAIRS = [
  (jnp.bfloat16, jnp.bfloat16),
  (jnp.float16, jnp.float16),
  (jnp.float32, jnp.bfloat16),
  (jnp.bfloat16, jnp.float32),
  (jnp.complex64, jnp.complex64),
  (jnp.complex64, jnp.float32),
]


def _for_pairs(pairs):
  return pytest.mark.parametrize(
    'params_dtype, gradient_dtype',
    pairs,
    ids=['-'.join(jnp.dtype(dtype).name for dtype in pair) for pair in pairs],
  )


def _normal(seed, shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _tree(seed, dtype):
  shapes = {'w': (4, 3), 'b': (3,), 'scalar': ()}
  return {k: _normal(seed, shape, dtype) for k, shape in shapes.items()}


def _dtypes(tree):
  return jax.tree.map(lambda x: jnp.dtype(x.dtype).name, tree)


def _adam(state):
  return optax.tree.get(state, 'ScaleByAdamState')


@_for_pairs(_PAIRS)
@pytest.mark.parametrize('options', [{}, {'weight_decay': 0.1}], ids=str)
def test_dtypes_are_those_of_lamb(params_dtype, gradient_dtype, options):
  with jax.enable_x64(True):
    params, gradient = _tree(0, params_dtype), _tree(1, gradient_dtype)
    ours, peer = (f(_RATE, **options) for f in (merit_optax.merit, optax.lamb))
    state, peer_state = ours.init(params), peer.init(params)
    first = _adam(state)
    assert _dtypes(first) == _dtypes(_adam(peer_state))
    for _ in range(2):
      updates, state = jax.eval_shape(ours.update, gradient, state, params)
      expected, peer_state = jax.eval_shape(
        peer.update, gradient, peer_state, params
      )
      assert _dtypes(updates) == _dtypes(expected)
      after, peer_after = _adam(state), _adam(peer_state)
      # optax 0.2.6 widens the second moment in the first step.
      peer_nu = first.nu if optax.__version__ == '0.2.6' else peer_after.nu
      assert _dtypes(after.nu) == _dtypes(peer_nu)
      # The first moment of optax takes the dtype to which it and the gradient
      # promote: twice the memory for bfloat16, and a second compilation. Ours
      # stays as it was made.
      assert _dtypes(after) == _dtypes(first)
      mu_dtype = jnp.promote_types(params_dtype, gradient_dtype).name
      assert set(_dtypes(peer_after.mu).values()) == {mu_dtype}


@_for_pairs(_SOME_PAIRS)
def test_updates_are_right_in_every_dtype(params_dtype, gradient_dtype):
  with jax.enable_x64(True):
    params, gradient = _tree(0, params_dtype), _tree(1, gradient_dtype)
    optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
    update = jax.jit(optimizer.update)
    updates, _ = update(gradient, optimizer.init(params), params)
    # The same numbers in double precision.
    params, gradient = (
      jax.tree.map(
        lambda x: x.astype(jnp.promote_types(x.dtype, 'float64')), tree
      )
      for tree in (params, gradient)
    )
    expected, _ = update(gradient, optimizer.init(params), params)
    coarsest = max(
      float(jnp.finfo(d).eps) for d in (params_dtype, gradient_dtype)
    )
    chex.assert_trees_all_close(
      jax.tree.map(lambda x, y: x.astype(y.dtype), updates, expected),
      expected,
      rtol=4 * coarsest,
    )


def test_float64_is_not_computed_in_float32():
  with jax.enable_x64(True):
    transform = merit_optax.scale_by_max_norm_trust_ratio()
    z, w = jnp.asarray([[3.0]], jnp.float64), jnp.asarray([[0.1]], jnp.float64)
    update, _ = transform.update(z, transform.init(w), w)
    assert abs(float(update[0, 0]) - 0.1) < 1e-15


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_ratios_are_not_rounded_to_the_dtype_of_the_parameters(dtype):
  # A ratio of one element times that element is the weight, whatever the two
  # are, as long as the ratio has some more bits.
  numbers = np.arange(64, 128) / 64
  z, w = (x.reshape(-1, 1, 1) for x in np.meshgrid(numbers, numbers))
  transform = merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
  )
  params = jnp.asarray(w, dtype)
  update = jax.jit(transform.update)(
    jnp.asarray(z, dtype), transform.init(params), params
  )[0]
  np.testing.assert_array_equal(np.asarray(update, np.float64), w)

  def round_to_dtype(x):
    return x.astype(jnp.dtype(dtype)).astype(np.float64)

  assert np.mean(round_to_dtype(round_to_dtype(w / z) * z) != w) > 0.05


@pytest.mark.parametrize('weight_decay', [0.0, 0.1])
@pytest.mark.parametrize('size', [0.0, 6e-8])
def test_small_float16_gradients_give_no_nan(size, weight_decay):
  # Squares of these underflow in float16, and so does the default epsilon
  # beside a large number.
  optimizer = merit_optax.merit(_RATE, weight_decay=weight_decay)
  params = _tree(0, jnp.float16)
  gradient = jax.tree.map(lambda x: jnp.full_like(x, size), params)
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for _ in range(3):
    updates, state = update(gradient, state, params)
    chex.assert_tree_all_finite((updates, state))
    params = optax.apply_updates(params, updates)
    moves = any(bool(jnp.any(u != 0)) for u in jax.tree.leaves(updates))
    assert moves == (size > 0 or weight_decay > 0)


def _nbytes(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
  'options', [{}, {'mu_dtype': jnp.bfloat16}], ids=['default', 'mu_dtype']
)
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('rate', [_RATE, optax.constant_schedule(_RATE)])
def test_state_has_as_many_bytes_as_adamw(rate, dtype, options):
  params = _tree(0, dtype)
  adamw = optax.adamw(rate, **options).init(params)
  optimizer = merit_optax.merit(rate, **options)
  state = optimizer.init(params)
  assert _nbytes(state) == _nbytes(adamw)
  _, state = jax.eval_shape(optimizer.update, params, state, params)
  assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) == (
    _nbytes(adamw)
  )


def _classifier(seed=0):
  return {
    'hidden': _normal(seed, (8, 32)) / 8**0.5,
    'bias': jnp.zeros(32),
    'output': _normal(seed + 1, (32, 4)) / 32**0.5,
  }


def _loss(params, inputs, labels):
  hidden = jnp.tanh(inputs @ params['hidden'] + params['bias'])
  return jnp.mean(
    optax.softmax_cross_entropy_with_integer_labels(
      hidden @ params['output'], labels
    )
  )


def _batches(steps, size=64):
  """Returns inputs and labels, of which one in four is random."""
  generator = np.random.default_rng(7)
  inputs = generator.normal(size=(steps, size, 8)).astype(np.float32)
  labels = np.argmax(inputs @ generator.normal(size=(8, 4)), axis=-1)
  noise = generator.integers(0, 4, labels.shape)
  return inputs, np.where(generator.random(labels.shape) < 0.25, noise, labels)


@functools.partial(jax.jit, static_argnums=0)
def _train(optimizer, params, state, batches):
  """Returns parameters, state and losses after a pass over the batches."""

  def step(carry, batch):
    params, state = carry
    loss, gradient = jax.value_and_grad(_loss)(params, *batch)
    updates, state = optimizer.update(gradient, state, params)
    return (optax.apply_updates(params, updates), state), loss

  (params, state), losses = jax.lax.scan(step, (params, state), batches)
  return params, state, losses


def test_training_with_bfloat16_moments_is_as_good():
  batches, losses, params = _batches(600), {}, _classifier()
  for dtype in (jnp.float32, jnp.bfloat16):
    optimizer = merit_optax.merit(
      optax.linear_schedule(0.03, 0.0, 600), mu_dtype=dtype, nu_dtype=dtype
    )
    trained, state, curve = _train(
      optimizer, params, optimizer.init(params), batches
    )
    assert {x.dtype for x in jax.tree.leaves(_adam(state).nu)} == {
      jnp.dtype(dtype)
    }
    inputs, labels = (x.reshape(-1, *x.shape[2:]) for x in batches)
    losses[dtype] = float(jax.jit(_loss)(trained, inputs, labels))
    assert losses[dtype] < 0.8 * curve[0]
  assert losses[jnp.bfloat16] != losses[jnp.float32]
  assert losses[jnp.bfloat16] == pytest.approx(losses[jnp.float32], rel=0.01)


def _take_over(state, old_state):
  """Returns a state of MERIT with the moments of another optimizer.

  Adam's moments are stored without their correction, so that they carry over as
  they are. This is the recipe in the documentation.
  """
  adam = optax.tree.get(old_state, 'ScaleByAdamState')
  return (adam, *state[1:])


@pytest.mark.parametrize(
  'before, bias_correction',
  [
    (optax.adamw(1e-3, b2=0.95), False),
    (optax.lamb(1e-2, b2=0.95), False),
    (
      optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.constant_schedule(1e-3), mu_dtype=jnp.bfloat16),
      ),
      True,
    ),
  ],
  ids=['adamw', 'lamb', 'chain'],
)
def test_moments_are_taken_over_in_the_middle_of_a_run(before, bias_correction):
  first, second = (
    [x[part] for x in _batches(400)]
    for part in (slice(0, 200), slice(200, None))
  )
  params = _classifier()
  params, old_state, losses = _train(before, params, before.init(params), first)
  optimizer = merit_optax.merit(
    optax.linear_schedule(0.02, 0.0, 200), bias_correction=bias_correction
  )
  state = _take_over(optimizer.init(params), old_state)
  chex.assert_trees_all_equal(_adam(state), _adam(old_state))
  assert _adam(state).count == 200
  _, after, more_losses = _train(optimizer, params, state, second)
  assert _adam(after).count == 400
  chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
  # The loss neither jumps at the change nor stops falling after it.
  at_change = np.mean(losses[-20:])
  assert np.mean(more_losses[:5]) < 1.05 * at_change
  assert np.mean(more_losses[-20:]) < 0.97 * at_change


def test_moments_that_were_taken_over_are_those_merit_would_have():
  # Both see the same gradients, and moments depend on nothing else.
  params, gradients = _classifier(), [_classifier(i) for i in (3, 5, 8, 9)]
  adamw, optimizer = optax.adamw(1e-3, b2=0.95), merit_optax.merit(_RATE)
  old_state, expected = adamw.init(params), optimizer.init(params)
  adamw_update, update = jax.jit(adamw.update), jax.jit(optimizer.update)
  for gradient in gradients[:3]:
    _, old_state = adamw_update(gradient, old_state, params)
    _, expected = update(gradient, expected, params)
  state = _take_over(optimizer.init(params), old_state)
  chex.assert_trees_all_close(state, expected, rtol=1e-6)
  chex.assert_trees_all_close(
    update(gradients[3], state, params),
    update(gradients[3], expected, params),
    rtol=1e-5,
  )


@pytest.mark.parametrize('dtype', [jnp.float16, jnp.bfloat16])
def test_the_largest_decay_that_a_message_names_is_accepted(dtype):
  params = jnp.ones((2, 2))
  with pytest.raises(ValueError, match='b2 must be at most') as raised:
    merit_optax.merit(0.1, b2=0.9999, nu_dtype=dtype).init(params)
  largest = float(str(raised.value).split('at most ')[1].split()[0])
  merit_optax.merit(0.1, b2=largest, nu_dtype=dtype).init(params)
