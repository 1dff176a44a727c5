"""Adam's direction: optax's with the correction, Algorithm 1's without."""

import contextlib
import functools

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


def _oracle(gradients, b1, b2, eps, eps_root):
  """Yields update and moments in float64, without correction."""
  m = v = 0.0
  for gradient in gradients:
    g = np.asarray(gradient, np.float64)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    yield m / (np.sqrt(v + eps_root) + eps), m, v


@pytest.mark.parametrize(
  'rates, dtype',
  [
    ((0.9, 0.999, 1e-8, 0.0), jnp.float32),
    ((0.0, 0.5, 0.1, 0.2), jnp.complex64),
  ],
)
def test_with_correction_equals_optax_bit_by_bit(rates, dtype):
  params, *gradients = (normal(seed, (4, 3), dtype) for seed in range(6))
  ours = merit_optax.scale_by_adam(*rates, bias_correction=True)
  theirs = optax.scale_by_adam(*rates)
  # Compiled, a product may be rounded before it is added in one program alone.
  with jax.disable_jit():
    actual = list(run(ours, params, gradients))
    expected = list(run(theirs, params, gradients))
  chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize('rates', [(), (0.0, 0.5, 0.1, 0.2)])
def test_without_correction_equals_the_formula(rates):
  gradients = [normal(seed, (4, 3)) for seed in range(5)]
  transform = merit_optax.scale_by_adam(*rates)
  actual = run(transform, jnp.zeros((4, 3)), gradients)
  # By default with the numbers of the authors.
  expected = _oracle(gradients, *(rates or (0.9, 0.95, 1e-6, 0.0)))
  for count, ((u, state, _), (want_u, m, v)) in enumerate(
    zip(actual, expected, strict=True), 1
  ):
    assert (state.count, state.count.dtype) == (count, jnp.int32)
    # Absolute beside it: the first moment may cancel.
    np.testing.assert_allclose(u, want_u, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.mu, m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.nu, v, rtol=1e-5)


@pytest.mark.parametrize('correction', [True, False])
@pytest.mark.parametrize('params', ['float16', 'bfloat16', 'float32'])
@pytest.mark.parametrize('moments', [None, 'float16', 'float32'])
@hypothesis.given(data=st.data())
def test_no_finite_gradient_makes_a_step_beyond_adams_bound(
  params, moments, correction, data
):
  # By Cauchy and Schwarz, |m| / sqrt(v) is below 1.17 with these rates, and
  # below 1.18 with the correction. Rounding in 16 bits adds some percent.
  dtypes = params, moments or params
  largest = min(float(jnp.finfo(dtype).max) for dtype in dtypes)
  exponents = st.floats(-3, 0.99 * np.log10(largest))
  spikes = data.draw(st.dictionaries(st.integers(0, 11), exponents))
  update, state = _spiked(params, moments, correction)
  for step in range(12):
    size = 10.0 ** spikes.get(step, -2)
    direction, state = update(jnp.full(2, size, params), state)
    assert jnp.all(jnp.abs(direction) < 1.25), (step, direction, state)


@functools.cache
def _spiked(params, moments, correction):
  transform = merit_optax.scale_by_adam(
    mu_dtype=moments, nu_dtype=moments, bias_correction=correction
  )
  return jax.jit(transform.update), transform.init(jnp.ones(2, params))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float16])
@pytest.mark.parametrize('correction', [True, False])
@pytest.mark.parametrize('size', [0.0, 6e-8])
def test_zero_gradients_alone_give_zero_updates(dtype, correction, size):
  # float16 rounds eps = 1e-8 to zero, and the square of 6e-8, which made this
  # 0 / 0 in half precision.
  transform = merit_optax.scale_by_adam(eps=1e-8, bias_correction=correction)
  gradient = jnp.full(4, size, dtype)
  for step in run(transform, jnp.ones(4, dtype), [gradient] * 3):
    chex.assert_tree_all_finite(step)
    assert jnp.all((step.updates != 0) == (size > 0))


@pytest.mark.parametrize(
  'options, dtype, is_refused',
  [
    ({'b1': 0.999}, 'bfloat16', True),
    ({'b1': 0.999, 'mu_dtype': 'bfloat16'}, 'float32', True),
    ({'b2': jnp.float32(0.999), 'nu_dtype': 'bfloat16'}, 'float32', True),
    ({'b2': 0.9999}, 'float16', True),
    ({'b2': 0.999, 'nu_dtype': 'float32'}, 'bfloat16', False),
    # At the limit, and beyond it.
    ({'b2': 0.99609375}, 'bfloat16', False),
    ({'b2': 0.9965}, 'bfloat16', True),
    ({'b2': 0.9999}, 'float32', False),
  ],
)
@pytest.mark.parametrize('inject', [False, True])
def test_decay_rates_that_a_dtype_rounds_to_one_are_refused(
  options, dtype, is_refused, inject
):
  build, params = merit_optax.scale_by_adam, {'w': jnp.ones(3, dtype)}
  if inject:
    # Or it rounds numbers to the dtype of the parameters, and 0.999 to 1.
    build = optax.inject_hyperparams(build, hyperparam_dtype=jnp.float32)
  refused = pytest.raises(ValueError, match='^b[12] must be at most')
  with refused if is_refused else contextlib.nullcontext():
    build(**options).init(params)
