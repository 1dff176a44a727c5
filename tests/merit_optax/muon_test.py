"""Muon's direction: Optax's, for all shapes, by any form of the products."""

import functools

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from merit_optax.transforms import newton_schulz
from merit_optax.transforms.newton_schulz import (
  check_coefficients,
)
from tests.merit_optax.arrays import enable_x64, normal

_Spec = optax.contrib.MuonDimensionNumbers
# Tall, wide, square, stacked, with heads, one row, and zero. Some hold matrices
# of one shape, or its transpose, which are computed together.
_SHAPES = {
  'wide': ((12, 30), _Spec()),
  'tall': ((30, 12), _Spec()),
  'square': ((16, 16), _Spec()),
  'layers_between': ((12, 3, 30), _Spec(0, 2)),
  'heads': ((12, 5, 6), _Spec(0, (1, 2))),
  'one_row_kernel': ((1, 20), _Spec()),
  'zero': ((12, 30), _Spec()),
}
_STACK = _Spec(-2, -1)
_SPECS = {name: spec for name, (_, spec) in _SHAPES.items()}
_DION = (
  (4.0848, -6.8946, 2.9270),
  (3.9505, -6.3029, 2.6377),
  (3.7418, -5.5913, 2.3037),
  (2.8769, -3.1427, 1.2046),
  (2.8366, -3.0525, 1.2012),
)


def _gradients(seed, scale=1.0):
  return {
    name: scale * (name != 'zero') * normal([seed, i], shape)
    for i, (name, (shape, _)) in enumerate(_SHAPES.items())
  }


def _exactly(function):
  """Returns it compiled with float32 products, which Optax leaves to JAX."""
  return jax.default_matmul_precision('highest')(jax.jit(function))


@pytest.mark.parametrize(
  'ours, theirs',
  [
    ({}, {'beta': 0.9}),
    (
      {'nesterov': False, 'beta': 0.8, 'ns_coeffs': 'dion'},
      {'nesterov': False, 'beta': 0.8, 'ns_coeffs': _DION},
    ),
  ],
  ids=['default', 'others'],
)
def test_updates_and_state_are_those_of_optax(ours, theirs):
  transforms = [
    make(weight_dimension_numbers=_SPECS, **settings)
    for make, settings in (
      (merit_optax.scale_by_muon, ours),
      (optax.contrib.scale_by_muon, theirs),
    )
  ]
  params = _gradients(0)
  states = [transform.init(params) for transform in transforms]
  updates = [_exactly(transform.update) for transform in transforms]
  for step in range(3):
    gradients = _gradients(step, 10.0**-step)
    (actual, states[0]), (expected, states[1]) = (
      update(gradients, state)
      for update, state in zip(updates, states, strict=True)
    )
    chex.assert_trees_all_close(actual, expected, atol=2e-6, rtol=0)
  chex.assert_trees_all_equal_shapes_and_dtypes(*states)
  chex.assert_trees_all_close(*states, rtol=1e-6, atol=1e-8)


@functools.cache
def _update(**settings):
  transform = merit_optax.scale_by_muon(
    beta=0.0, nesterov=False, weight_dimension_numbers=_STACK, **settings
  )
  return jax.jit(lambda g: transform.update(g, transform.init(g))[0])


def _spectrum(seed, shape, exponent):
  """Returns a matrix whose singular values fall from 1 to 10**exponent."""
  u, _, v = np.linalg.svd(normal(seed, shape), full_matrices=False)
  values = np.logspace(0, exponent, min(shape))
  return jnp.asarray((u * values) @ v, jnp.float32)


@pytest.mark.parametrize('coefficients', ['jordan', 'polar_express'])
@pytest.mark.parametrize('exponent', [-1, -4, -9])
def test_the_gram_form_is_the_plain_one(coefficients, exponent):
  # With as many rows as these, a square matrix takes the plain form.
  matrix = _spectrum(0, (24, 96), exponent)
  square = jnp.pad(matrix, ((0, 72), (0, 0)))
  wide, padded = (_update(ns_coeffs=coefficients)(x) for x in (matrix, square))
  assert jnp.isfinite(wide).all()
  # Singular values below the rounding errors of the Gram matrix end elsewhere,
  # by less than the iterations themselves leave them from 1.
  atol = 2e-5 if exponent == -1 else 5e-3
  np.testing.assert_allclose(wide, padded[:24], atol=atol)


@pytest.mark.parametrize('precision', [None, 'highest'])
@pytest.mark.parametrize('shape', [(16, 16), (12, 30)])
def test_products_have_the_default_precision(shape, precision):
  with jax.default_matmul_precision(precision):
    found = {
      platform: jax.export.export(_update(), platforms=[platform])(
        jnp.ones(shape)
      ).mlir_module()
      for platform in ('cpu', 'cuda', 'tpu')
    }
  for text in found.values():
    products = [x for x in text.splitlines() if 'stablehlo.dot_general' in x]
    assert products
    highest = 'precision = [HIGHEST, HIGHEST]'
    assert all((highest in x) == bool(precision) for x in products)
  assert 'stablehlo.while' not in found['cuda']
  # Gram matrices need the full precision of float32.
  counts = {k: x.count('stablehlo.dot_general') for k, x in found.items()}
  plain = counts['tpu'] == 3
  assert plain == (shape == (16, 16) or not precision)


@pytest.fixture(params=['cpu', 'cuda', 'default'])
def branch(request, monkeypatch):
  """Takes the products of one platform, whatever the platform is."""

  def choose(*operands, **branches):
    return branches[request.param](*operands)

  monkeypatch.setattr(jax.lax, 'platform_dependent', choose)
  # The cache of `orthogonalize` is not the only one with its trace.
  jax.clear_caches()
  yield request.param
  jax.clear_caches()


# As GPUs and TPUs round operands by default; sums are in float32 there too.
@pytest.mark.parametrize(
  'branch, mantissa_bits, atol',
  [('cuda', 10, 0.01), ('default', 7, 0.08)],
  indirect=['branch'],
)
@pytest.mark.parametrize('coefficients', ['jordan', 'polar_express'])
@pytest.mark.parametrize('exponent', [-1, -3, -6])
def test_default_precision_hardly_changes_the_update(
  monkeypatch, branch, mantissa_bits, atol, coefficients, exponent
):
  matrix = _spectrum(0, (64, 256), exponent)
  with jax.default_matmul_precision('highest'):
    expected = _update(ns_coeffs=coefficients)(matrix)

  def product(x, y, dtype):
    x, y = (jax.lax.reduce_precision(z, 8, mantissa_bits) for z in (x, y))
    return jnp.matmul(x, y, preferred_element_type=dtype)

  monkeypatch.setattr(newton_schulz, '_product', product)
  found = _update(ns_coeffs=coefficients)(matrix)
  assert 0 < jnp.linalg.norm(found - expected, 2) < atol


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.complex64])
@pytest.mark.parametrize(
  'shape, coefficients',
  [
    ((2, 12, 12), 'jordan'),
    ((2, 30, 12), 'dion'),
    ((8, 40), 'polar_express'),
    # Large enough for products in blocks.
    ((523, 541), 'jordan'),
  ],
  ids=str,
)
def test_each_platform_follows_the_formula(branch, shape, coefficients, dtype):
  del branch
  matrix = normal(0, shape, dtype)
  transform = merit_optax.scale_by_muon(
    coefficients, 6, beta=0.0, nesterov=False, weight_dimension_numbers=_STACK
  )
  found, _ = jax.jit(transform.update)(matrix, transform.init(matrix))
  u, values, v = np.linalg.svd(
    np.asarray(matrix, np.complex128), full_matrices=False
  )
  values /= np.linalg.norm(values, axis=-1, keepdims=True)
  for a, b, c in check_coefficients(coefficients, 6):
    values = a * values + b * values**3 + c * values**5
  expected = (u * values[..., None, :]) @ v
  np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize(
  'dtype, exponents', [('float32', (-18, 18)), ('float64', (-150, 150))]
)
@hypothesis.given(
  st.integers(0, 2**31),
  st.sampled_from([(1, 7), (5, 5), (2, 4, 10)]),
  st.data(),
)
def test_singular_values_are_near_one_at_any_scale(
  dtype, exponents, seed, shape, data
):
  matrix = np.random.default_rng(seed).normal(size=shape) + np.eye(*shape[-2:])
  scale = 10.0 ** data.draw(st.floats(*exponents))
  with enable_x64(dtype == 'float64'):
    found = _update(eps=0.0)(jnp.asarray(matrix * scale, dtype))
  assert found.dtype == dtype
  values = np.linalg.svd(np.asarray(found, np.float64), compute_uv=False)
  assert values.max() < 1.25
  # Those of the smallest fraction take more iterations than five.
  ratios = np.linalg.svd(matrix, compute_uv=False)
  small = ratios < 0.02 * np.linalg.norm(ratios, axis=-1, keepdims=True)
  assert np.all((values > 0.6) | small)


def test_products_in_bfloat16_are_near():
  gradient = _spectrum(2, (16, 48), -1)
  exact, rough = _update()(gradient), _update(ns_dtype='bfloat16')(gradient)
  assert rough.dtype == jnp.float32
  difference = jnp.linalg.norm(rough - exact) / jnp.linalg.norm(exact)
  assert 1e-4 < difference < 0.03


_polar = functools.partial(_update, ns_coeffs='polar_express', ns_steps=8)


def test_float16_keeps_small_singular_values_that_bfloat16_loses():
  def updates(exponent):
    matrix = _spectrum(0, (16, 48), exponent)
    return [
      _polar(ns_dtype=dtype)(matrix) for dtype in (None, 'float16', 'bfloat16')
    ]

  _, *smallest = (np.linalg.svd(x, compute_uv=False)[-1] for x in updates(-3))
  float16, bfloat16 = np.abs(np.subtract(1, smallest))
  assert float16 < 2e-3 < bfloat16
  # Eight iterations bring smaller ones half the way, in the right direction.
  exact, *rounded = updates(-4)
  float16, bfloat16 = (np.linalg.norm(x - exact, 2) for x in rounded)
  assert float16 < 0.02
  assert bfloat16 > 0.2


@pytest.mark.parametrize('size', [1e-9, 1e9])
def test_small_and_large_gradients_become_orthogonal_in_float16(size):
  found = _polar(ns_dtype='float16')(size * normal(0, (16, 48)))
  np.testing.assert_allclose(found @ found.T, np.eye(16), atol=0.01)


@pytest.mark.parametrize(
  'transform', [merit_optax.scale_by_muon(), merit_optax.scale_by_lmo('row')]
)
def test_a_norm_that_overflows_is_not_silent(transform):
  gradients = jnp.full((12, 30), 3e38)
  updates, _ = transform.update(gradients, transform.init(gradients))
  assert jnp.isnan(updates).all()


def test_one_matrix_that_is_not_finite_spoils_no_other():
  gradient = jnp.ones((2, 4, 10)).at[1, 0, 0].set(jnp.nan)
  with jax.numpy_rank_promotion('raise'):
    found = _update()(gradient)
  assert jnp.isfinite(found[0]).all()
  assert jnp.isnan(found[1]).any()


def test_vectors_are_one_row():
  params = {'vector': jnp.array([3.0, 0.0, -4.0]), 'scalar': jnp.array(-2.0)}
  transform = merit_optax.scale_by_muon('polar_express', 8)
  updates, _ = transform.update(params, transform.init(params))
  np.testing.assert_allclose(updates['vector'], [0.6, 0.0, -0.8], atol=1e-3)
  np.testing.assert_allclose(updates['scalar'], -1.0, atol=1e-3)


def test_complex_matrices_become_unitary():
  matrix = normal(0, (4, 7), jnp.complex64)
  transform = merit_optax.scale_by_muon('polar_express', 8)
  found, _ = transform.update(matrix, transform.init(matrix))
  np.testing.assert_allclose(found @ found.T.conj(), np.eye(4), atol=1e-3)
  given = merit_optax.scale_by_muon(ns_dtype='bfloat16')
  with pytest.raises(ValueError, match='^ns_dtype must be None for complex'):
    given.init(matrix)
