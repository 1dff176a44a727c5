"""Adam's direction: optax's with the correction, Algorithm 1's without."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run


def _tree(seed, dtype=jnp.float32):
  shapes = {'w': (4, 3), 'b': (5,), 'scalar': ()}
  return {k: normal(seed, s, dtype) for k, s in shapes.items()}


def _oracle(gradients, b1, b2, eps, eps_root, nesterov=False):
  """Yields update and moments in float64, without correction."""
  m = v = 0.0
  for gradient in gradients:
    g = np.asarray(gradient, np.float64)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    ahead = b1 * m + (1 - b1) * g if nesterov else m
    yield ahead / (np.sqrt(v + eps_root) + eps), m, v


@pytest.mark.parametrize(
  'rates, dtype, nesterov',
  [
    ((0.9, 0.999, 1e-8, 0.0), jnp.float32, False),
    ((0.0, 0.5, 0.1, 0.2), jnp.complex64, False),
    ((0.8, 0.9, 1e-6, 0.0), jnp.float32, True),
  ],
)
def test_with_correction_equals_optax_bit_by_bit(rates, dtype, nesterov):
  params = _tree(0, dtype)
  gradients = [_tree(seed, dtype) for seed in range(1, 6)]
  options = {'nesterov': nesterov}
  ours = merit_optax.scale_by_adam(*rates, bias_correction=True, **options)
  theirs = optax.scale_by_adam(*rates, **options)
  # Compiled, a product may be rounded before it is added in one program alone.
  with jax.disable_jit():
    actual = list(run(ours, params, gradients))
    expected = list(run(theirs, params, gradients))
  chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize(
  'rates, nesterov',
  [((), False), ((0.0, 0.5, 0.1, 0.2), False), ((0.8, 0.9, 1e-3, 0.0), True)],
)
def test_without_correction_equals_the_formula(rates, nesterov):
  gradients = [normal(seed, (4, 3)) for seed in range(5)]
  transform = merit_optax.scale_by_adam(*rates, nesterov=nesterov)
  actual = run(transform, jnp.zeros((4, 3)), gradients)
  # By default with the numbers of the authors.
  expected = _oracle(gradients, *(rates or (0.9, 0.95, 1e-6, 0.0)), nesterov)
  for count, ((u, state, _), (want_u, m, v)) in enumerate(
    zip(actual, expected, strict=True), 1
  ):
    assert (state.count, state.count.dtype) == (count, jnp.int32)
    # Absolute beside it: the first moment may cancel.
    np.testing.assert_allclose(u, want_u, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.mu, m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.nu, v, rtol=1e-5)


def _dtypes(tree):
  return {x.dtype for x in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
  'params, gradient, given, mu, nu, update',
  [
    ('bfloat16', 'float32', {}, 'bfloat16', 'bfloat16', 'float32'),
    ('float32', 'float16', {}, 'float32', 'float32', 'float32'),
    ('bfloat16', 'float16', {}, 'bfloat16', 'bfloat16', 'float32'),
    ('float16', 'float16', {}, 'float16', 'float16', 'float16'),
    (
      *('float32', 'float32', {'mu_dtype': 'bfloat16'}),
      *('bfloat16', 'float32', 'float32'),
    ),
    (
      *('complex64', 'complex64', {'nu_dtype': 'float32'}),
      *('complex64', 'float32', 'complex64'),
    ),
  ],
)
@pytest.mark.parametrize('correction', [True, False])
def test_moments_keep_their_dtypes(
  params, gradient, given, mu, nu, update, correction
):
  transform = merit_optax.scale_by_adam(bias_correction=correction, **given)
  state = transform.init(_tree(0, params))
  updates, new = jax.eval_shape(transform.update, _tree(1, gradient), state)
  chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
  for tree, dtype in ((state.mu, mu), (state.nu, nu), (updates, update)):
    assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype(dtype)}


def test_complex_parameters_have_complex_first_moments():
  transform = merit_optax.scale_by_adam(mu_dtype='float32')
  with pytest.raises(ValueError, match='mu_dtype must be None for complex'):
    transform.init(_tree(0, jnp.complex64))


def test_rounding_of_a_moment_reaches_only_later_steps():
  gradients = [_tree(1), _tree(2)]
  wide, narrow = (
    [step.updates for step in run(transform, _tree(0), gradients)]
    for transform in (
      merit_optax.scale_by_adam(),
      merit_optax.scale_by_adam(mu_dtype='bfloat16', nu_dtype='bfloat16'),
    )
  )
  chex.assert_trees_all_equal(narrow[0], wide[0])
  chex.assert_trees_all_close(narrow[1], wide[1], rtol=2e-2, atol=2e-2)
  assert jnp.any(narrow[1]['w'] != wide[1]['w'])


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('correction', [True, False])
def test_zero_gradients_give_zero_updates(dtype, correction):
  # float16 rounds eps = 1e-8 to zero, which made this 0 / 0 in half precision.
  transform = merit_optax.scale_by_adam(eps=1e-8, bias_correction=correction)
  params = jnp.ones(4, dtype)
  for step in run(transform, params, [jnp.zeros(4, dtype)] * 3):
    np.testing.assert_array_equal(step.updates, jnp.zeros(4, dtype))


@pytest.mark.parametrize(
  'options, dtype, is_refused',
  [
    ({'b2': 0.999}, 'bfloat16', True),
    ({'b1': 0.999}, 'bfloat16', True),
    ({'b1': 0.999, 'mu_dtype': 'bfloat16'}, 'float32', True),
    ({'b2': jnp.float32(0.999), 'nu_dtype': 'bfloat16'}, 'float32', True),
    ({'b2': 0.9999}, 'float16', True),
    ({'b2': 0.9999, 'nu_dtype': 'float16'}, 'float32', True),
    ({'b2': 0.999, 'nu_dtype': 'float32'}, 'bfloat16', False),
    ({'b1': 0.995, 'b2': 0.995}, 'bfloat16', False),
    ({'b2': 0.9995}, 'float16', False),
    ({'b2': 0.9999}, 'float32', False),
    ({'b2': 0.9999}, 'int32', False),
  ],
)
@pytest.mark.parametrize('inject', [False, True])
def test_a_moment_that_would_never_decay_is_refused(
  options, dtype, is_refused, inject
):
  build, params = merit_optax.scale_by_adam, {'w': jnp.ones(3, dtype)}
  if inject:
    # Or it rounds numbers to the dtype of the parameters, and 0.999 to 1.
    build = optax.inject_hyperparams(build, hyperparam_dtype=jnp.float32)
  refused = pytest.raises(ValueError, match='^b[12] must be at most')
  with refused if is_refused else contextlib.nullcontext():
    build(**options).init(params)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_the_limit_of_a_rate_is_that_of_rounding(dtype):
  eps = float(jnp.finfo(dtype).eps)
  moments = jnp.arange(1, 2, eps, jnp.float32).astype(dtype)
  for loss, is_stuck in ((0.5, False), (0.45, True)):
    rate = 1 - loss * eps
    decayed = (rate * moments.astype(jnp.float32)).astype(dtype)
    assert bool(jnp.any(decayed == moments)) == is_stuck
  with pytest.raises(ValueError, match='never decay') as refused:
    merit_optax.scale_by_adam(b2=rate, nu_dtype=dtype)
  largest = float(str(refused.value).split('at most ')[1].split()[0])
  assert largest == pytest.approx(1 - 0.5 * eps, rel=1e-7)
  merit_optax.scale_by_adam(b2=largest, nu_dtype=dtype)
