"""Chains of the parts of relative optimizers, against what they replace."""

import functools

import chex
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from merit_optax.matrices.norms import l2_norm
from tests.merit_optax.arrays import MATRICES, normal, run

_Spec = optax.contrib.MuonDimensionNumbers
_RATE = 0.1
_ALL = ('weight', 'row', 'column')


def _tree(seed):
  """Returns a matrix, a stack of two and a fused projection."""
  return {
    'w': normal(seed, (5, 3)),
    'layers': normal(seed + 1, (2, 4, 6)),
    'qkv': normal(seed + 2, (4, 2, 3, 5)),
  }


# Heads and features are columns; each of query, key and value is a matrix.
_SPECS = {'w': _Spec(), 'layers': _Spec(1, 2), 'qkv': _Spec(0, (1, 3))}


def _matrices(name, x):
  """Returns the matrices of a parameter, in float64, one in a row."""
  x = np.asarray(x, np.float64)
  if name == 'w':
    return x.reshape(1, -1)
  stack = np.moveaxis(x, {'layers': 0, 'qkv': 2}[name], 0)
  return stack.reshape(len(stack), -1)


# Rows of the table, against what they are.


_LAMB = optax.chain(
  optax.scale_by_adam(0.9, 0.999, 1e-6),
  optax.add_decayed_weights(0.1),
  merit_optax.scale_by_l2_norm_trust_ratio(),
  optax.scale_by_learning_rate(_RATE),
)
_LARS = optax.chain(
  optax.add_decayed_weights(1e-2),
  merit_optax.scale_by_l2_norm_trust_ratio(trust_coefficient=0.001, eps=0.1),
  optax.scale_by_learning_rate(1.0),
  optax.trace(0.9),
)


@pytest.mark.parametrize(
  'chain, peer',
  [
    (_LAMB, optax.lamb(_RATE, weight_decay=0.1)),
    (
      _LARS,
      optax.lars(1.0, weight_decay=1e-2, trust_coefficient=0.001, eps=0.1),
    ),
  ],
  ids=['lamb', 'lars'],
)
def test_chains_of_optimizers_that_optax_has(chain, peer):
  params = {'w': normal(0, (5, 3)), 'b': normal(1, (4,)), 's': jnp.ones(())}
  params |= {'zero': jnp.zeros((2, 2))}
  gradients = [
    jax.tree.map(lambda x, i=i: jnp.cos(i + x), params) for i in range(5)
  ]
  actual, expected = (
    [step.params for step in run(optimizer, params, gradients)]
    for optimizer in (chain, peer)
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-7)


def _norms(x, norm):
  """Returns the norm of each matrix, in float64."""
  flat = np.asarray(x, np.float64).reshape(len(x), -1)
  order = {'l2': 2, 'max': np.inf}[norm]
  return np.linalg.norm(flat, order, axis=1, keepdims=True)


@pytest.mark.parametrize('norm', ['l2', 'max'])
def test_hyperball_is_its_formula(norm):
  ratio = {
    'l2': merit_optax.scale_by_l2_norm_trust_ratio,
    'max': merit_optax.scale_by_max_norm_trust_ratio,
  }[norm]
  hyperball = optax.chain(
    ratio(ratios=('weight',), weight_dimension_numbers=_SPECS),
    optax.scale_by_learning_rate(_RATE),
    merit_optax.keep_matrix_norms(norm, weight_dimension_numbers=_SPECS),
  )
  params, *gradients = map(_tree, (0, 10, 20, 30))
  steps = list(run(hyperball, params, gradients))
  for name, start in params.items():
    w = _matrices(name, start)
    radius = _norms(w, norm)
    for step, gradient in zip(steps, gradients, strict=True):
      u = _matrices(name, gradient[name])
      w = w - _RATE * radius * u / _norms(u, norm)
      w = radius * w / _norms(w, norm)
      actual = _matrices(name, step.params[name])
      np.testing.assert_allclose(actual, w, rtol=1e-5, atol=1e-6)


# The l2 norm and its ratio.


_IN_RANGE = st.floats(-12, 18).map(lambda x: float(np.float32(10.0**x)))
_WIDE = hnp.arrays(
  np.float32,
  (3, 4),
  elements=st.one_of(st.just(0.0), _IN_RANGE, _IN_RANGE.map(lambda x: -x)),
)


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.grad, has_aux=True)
def _gradient_and_norms(x, axis):
  norms = l2_norm(x, axis)
  return norms.sum(), norms


@pytest.mark.parametrize('axis', [(0,), (1,), (0, 1)])
@hypothesis.given(x=_WIDE)
def test_l2_norms_and_gradients_from_1e_12_to_1e18(axis, x):
  gradient, norms = _gradient_and_norms(x, axis)
  x = x.astype(np.float64)
  expected = np.sqrt(np.sum(x**2, axis, keepdims=True))
  np.testing.assert_allclose(norms, expected, rtol=1e-6)
  expected = x / np.where(expected == 0, 1, expected)
  np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_l2_norms_beyond_count_as_zero_or_are_infinite():
  x = jnp.array([[9e-15], [1.1e-14], [1.8e19], [1.9e19]])
  expected = [[0], [1.1e-14], [1.8e19], [jnp.inf]]
  np.testing.assert_allclose(l2_norm(x, (1,)), expected, rtol=1e-6)


@functools.cache
def _l2(ratios=('weight',), min_ratio=None, max_ratio=None):
  transform = merit_optax.scale_by_l2_norm_trust_ratio(
    ratios=ratios, min_ratio=min_ratio, max_ratio=max_ratio
  )
  return jax.jit(lambda z, w: transform.update(z, transform.init(w), w)[0])


@pytest.mark.parametrize('ratios', [('weight',), _ALL], ids=str)
@pytest.mark.parametrize(
  'bounds', [(None, None), (0.5, 1.5), (2.0, None), (None, 0.5)], ids=str
)
@hypothesis.given(z=MATRICES, w=MATRICES)
def test_the_l2_ratio_is_that_of_the_formula(ratios, bounds, z, w):
  axes = {'weight': (0, 1), 'row': (1,), 'column': (0,)}
  void, largest = False, 0
  for name in ratios:
    of_w, of_z = (
      np.sqrt(np.sum(x.astype(np.float64) ** 2, axes[name], keepdims=True))
      for x in (w, z)
    )
    void = void | (of_w == 0) | (of_z == 0)
    largest = np.maximum(largest, of_w / np.where(of_z == 0, 1, of_z))
  least, most = bounds
  # What has no norm has the least ratio, or 1.
  ratio = np.clip(np.where(void, least or 1, largest), least, most)
  np.testing.assert_allclose(_l2(ratios, *bounds)(z, w), ratio * z, rtol=1e-5)


def test_nan_is_not_clipped_away():
  z, w = jnp.ones((2, 2)).at[0, 0].set(jnp.nan), jnp.ones((2, 2))
  assert jnp.all(jnp.isnan(_l2(min_ratio=0.5, max_ratio=2.0)(z, w)))


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_squares_of_half_precision_are_summed_in_float32(dtype):
  # The square of 300 leaves float16.
  z, w = jnp.ones((8, 8), dtype), jnp.full((8, 8), 300, dtype)
  np.testing.assert_array_equal(_l2()(z, w), w)


# Norms kept.


def _keep(norm='l2', specs=None):
  transform = merit_optax.keep_matrix_norms(
    norm, weight_dimension_numbers=specs
  )
  return jax.jit(lambda u, w: transform.update(u, transform.init(w), w)[0])


def test_rounding_of_a_thousand_steps_stays_below_1e_5():
  @jax.jit
  def train(w):
    def step(w, key):
      u = 0.05 * jnp.linalg.norm(w) * jax.random.normal(key, w.shape) / 8
      return w + _keep()(u, w), None

    return jax.lax.scan(step, w, jax.random.split(jax.random.key(1), 1000))[0]

  start = normal(0, (8, 8)) / 20
  end = train(start)
  assert np.abs(np.sum(start * end)) < 0.9 * np.sum(start * start)
  np.testing.assert_allclose(
    _norms(end[None], 'l2'), _norms(start[None], 'l2'), rtol=1e-5
  )


def test_what_has_no_norm_to_keep_moves_as_told():
  w, u = jnp.ones((2, 3)), 0.1 * normal(0, (2, 3))
  keep = _keep()
  np.testing.assert_array_equal(keep(u, jnp.zeros((2, 3))), u)
  np.testing.assert_array_equal(keep(-w, w), -w)
  # A spec may say that a matrix is a vector.
  spec = _Spec((), (0, 1))
  np.testing.assert_array_equal(_keep(specs=spec)(u, w), u)


@pytest.mark.parametrize('norm', ['l2', 'max'])
def test_complex_matrices_keep_their_norm(norm):
  w, u = normal(0, (2, 3, 4)) + 1j * normal(1, (2, 3, 4))
  kept = _keep(norm)(u, w)
  assert kept.dtype == jnp.complex64
  np.testing.assert_allclose(
    *(_norms(np.abs(x)[None], norm) for x in (w + kept, w)), rtol=1e-6
  )


def test_a_norm_that_overflows_is_not_a_matrix_of_zeros():
  # Before the step, or after it.
  for before, update in ((1.0, 1e38), (1e38, -0.99e38)):
    params = jnp.ones((2, 4, 4)).at[1].set(before)
    updates = jnp.zeros_like(params).at[1].set(update)
    kept = _keep(specs=_Spec(1, 2))(updates, params)
    assert jnp.all(kept[0] == 0)
    assert jnp.isnan(kept[1]).all()


@pytest.mark.parametrize('norm', ['max', 'l2'])
def test_a_kept_norm_hides_no_nan(norm):
  params = jnp.ones((2, 64, 40))
  updates = jnp.ones_like(params).at[1, 5, 7].set(jnp.nan)
  kept = _keep(norm, _Spec(1, 2))(updates, params)
  assert jnp.isfinite(kept[0]).all()
  assert jnp.isnan(kept[1, 5, 7])


@pytest.mark.parametrize('update_dtype', [jnp.float32, jnp.bfloat16])
def test_half_precision_is_widened_and_dtypes_promote(update_dtype):
  w = normal(0, (64, 64)).astype(jnp.bfloat16)
  u = (normal(1, (64, 64)) / 8).astype(update_dtype)
  kept = _keep()(u, w)
  assert kept.dtype == update_dtype
  # A step too small for the sum to hold in bfloat16 is turned, and not lost.
  w_32, u_32 = w.astype(jnp.float32), 1e-3 * u.astype(jnp.float32)
  along = w_32 * jnp.sum(w_32 * u_32) / jnp.sum(w_32 * w_32)
  small = _keep()(u_32.astype(update_dtype), w).astype(jnp.float32)
  error = jnp.linalg.norm(small - (u_32 - along))
  assert error < 0.01 * jnp.linalg.norm(u_32)
  norm = _norms(w_32[None], 'l2')
  if update_dtype == jnp.float32:  # Which holds the step without rounding.
    np.testing.assert_allclose(_norms((w + kept)[None], 'l2'), norm, rtol=1e-6)
  new = optax.apply_updates(w, kept)
  assert new.dtype == jnp.bfloat16
  np.testing.assert_allclose(_norms(new[None], 'l2'), norm, rtol=1e-3)


def test_gradients_pass_through_zeros():
  def f(u):
    transform = merit_optax.scale_by_l2_norm_trust_ratio(ratios=_ALL)
    w = jnp.array([[1.0, 2.0], [0.0, 0.0]])
    z, _ = transform.update(u, transform.init(w), w)
    return jnp.sum(_keep()(z, w))

  gradient = jax.jit(jax.grad(f))(jnp.array([[0.0, 0.0], [0.0, 1.0]]))
  assert jnp.all(jnp.isfinite(gradient))
