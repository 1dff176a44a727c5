"""What the trust ratios promise, for any input."""

import functools

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from merit_optax.matrices.norms import l2_norm, max_norm
from merit_optax.transforms.trust_ratio import largest_ratio, ratio
from tests.merit_optax.arrays import (
  enable_x64,
  normal,
  oracle_ratios,
  oracle_scale,
)

_ALL = ('weight', 'row', 'column')
# Few shapes, since each is a compilation: a matrix and one column.
_SHAPES = ((3, 4), (4, 1))
# Each of ratio, product and rate may round up once.
_ULPS = 1 + 3 * 2.0**-24

_positive = st.floats(2.0**-10, 2.0**10, width=32)
_nonzero = st.one_of(_positive, _positive.map(lambda x: -x))
_with_zeros = st.one_of(st.just(0.0), _nonzero)
_extreme = st.one_of(
  st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-30, 1e-19, 1e-6]),
  st.sampled_from([1.0, -1.0, 1e6, -1e19, 1e20, 1e30, -1e30, 3e38, -3e38]),
  st.floats(-(2.0**127), 2.0**127, width=32),
).map(lambda x: float(np.float32(x)))


@st.composite
def _pairs(draw, elements):
  """Draws an update and a weight of the same shape."""
  shape = draw(st.sampled_from(_SHAPES))
  array = hnp.arrays(np.float32, shape, elements=elements)
  return draw(array), draw(array)


_BUILD = {
  'max': merit_optax.scale_by_max_norm_trust_ratio,
  'l2': merit_optax.scale_by_l2_norm_trust_ratio,
}


@functools.cache
def _jitted(kind='max', **options):
  transform = _BUILD[kind](**options)
  return jax.jit(lambda z, w: transform.update(z, transform.init(w), w)[0])


def _scale(z, w, kind='max', **options):
  return np.asarray(_jitted(kind, **options)(z, w))


@functools.cache
def _steps(**options):
  """Returns a function from weights and gradients to all later weights."""
  optimizer = merit_optax.merit(**options)

  def step(carry, gradient):
    params, state = carry
    updates, state = optimizer.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    return (params, state), (params, updates)

  def run(params, gradients):
    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]

  return jax.jit(run)


# The formula.


@pytest.mark.parametrize(
  'kind, options',
  [
    ('max', {}),
    ('max', {'ratios': ('row',)}),
    ('max', {'ratios': ('weight', 'column')}),
    ('max', {'min_norm': 0.5, 'trust_coefficient': 3.0, 'eps': 0.125}),
    ('max', {'min_ratio': 0.5, 'max_ratio': 1.5}),
    ('l2', {}),
    ('l2', {'ratios': _ALL, 'min_ratio': 2.0}),
    ('l2', {'ratios': _ALL, 'max_ratio': 0.5}),
  ],
  ids=str,
)
@hypothesis.given(pair=_pairs(_with_zeros))
def test_ratio_follows_the_formula(kind, options, pair):
  z, w = pair
  numbers = options.copy()
  names = numbers.pop('ratios', _ALL if kind == 'max' else ('weight',))
  bounds = [numbers.pop(name, None) for name in ('min_ratio', 'max_ratio')]
  ratios = oracle_ratios(z, w, kind=kind, **numbers)
  expected = oracle_scale(z, [ratios[name] for name in names], *bounds)
  rtol = 1e-6 if kind == 'max' else 1e-5
  np.testing.assert_allclose(_scale(z, w, kind, **options), expected, rtol=rtol)


# The bound.


@pytest.mark.parametrize('decay', [0.0, 0.25])
@hypothesis.given(pair=_pairs(_nonzero))
def test_a_step_is_at_most_the_rate_times_the_largest_weight(decay, pair):
  gradient, w = pair
  rate = 0.5
  _, updates = _steps(learning_rate=rate, weight_decay=decay)(w, gradient[None])
  bound = rate * min(1, np.max(np.abs(w)).astype(np.float64))
  assert np.max(np.abs(updates)) <= bound * _ULPS


@hypothesis.given(exponent=st.floats(0, 38), seed=st.integers(0, 2**31))
def test_the_bound_holds_after_a_gradient_whose_square_overflows(
  exponent, seed
):
  gradients = np.array(normal(seed, (8, 3, 4)))
  gradients[2, 0, 0] = 10.0**exponent
  w = np.array(normal(seed + 1, (3, 4)))
  params, updates = _steps(learning_rate=0.25)(w, gradients)
  before = np.concatenate([w[None], params[:-1]])
  largest = np.abs(before).max((1, 2)).astype(np.float64)
  assert np.all(np.abs(updates).max((1, 2)) <= 0.25 * largest * _ULPS)


# Invariances.


@hypothesis.given(pair=_pairs(_nonzero), power=st.integers(-50, 50))
def test_scaled_updates_do_not_depend_on_the_scale_but_on_that_of_the_weights(
  pair, power
):
  z, w = pair
  scaled = _scale(z, w)
  np.testing.assert_array_equal(_scale(np.ldexp(z, power), w), scaled)
  np.testing.assert_array_equal(
    _scale(z, np.ldexp(w, power)), np.ldexp(scaled, power)
  )


# Norms that are zero.


_TINY = np.finfo(np.float32).tiny


@pytest.mark.parametrize('jit', [True, False], ids=['jit', 'eager'])
@pytest.mark.parametrize('small', [1e-45, np.nextafter(_TINY, 0)])
def test_subnormal_norms_count_as_zero(small, jit):
  # Hardware that keeps them would otherwise disagree with hardware that
  # flushes them, by a factor of 1e38.
  scale = _jitted() if jit else _jitted().__wrapped__
  z = np.array([[1.0, 2.0], [4.0, 2.0]], np.float32)
  w = np.array([[1.0, 4.0], [small, -small]], np.float32)
  np.testing.assert_array_equal(scale(z, w), [[2.0, 4.0], z[1]])
  scaled = scale(w, z)
  np.testing.assert_array_equal(scaled[0], [4.0, 4.0])
  assert np.max(np.abs(scaled[1])) <= small


@hypothesis.given(st.tuples(_extreme, _extreme).map(np.abs))
def test_a_ratio_is_infinite_where_one_norm_vanishes_and_nowhere_else(sizes):
  w, z = jnp.asarray(sizes, jnp.float32)
  found = ratio(w, z)
  assert jnp.isinf(found) == (min(sizes) < _TINY)
  assert largest_ratio([found]) == (1 if min(sizes) < _TINY else found)
  if min(sizes) >= _TINY:
    expected = min(np.float64(sizes[0]) / sizes[1], 1 / np.float64(_TINY))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=_TINY)


# The stale row: with one gradient and then none.


def _path_of_a_stale_row(**options):
  """Returns the first row after each step, which one gradient reached."""
  random = np.random.default_rng(0)
  w = (0.1 * random.normal(size=(6, 4))).astype(np.float32)
  gradients = random.normal(size=(400, 6, 4)).astype(np.float32)
  gradients[1:, 0] = 0
  params, _ = _steps(learning_rate=0.01, **options)(w, gradients)
  return np.asarray(params)[:, 0]


def test_weight_decay_takes_a_stale_row_to_zero():
  path = _path_of_a_stale_row(weight_decay=0.1)
  # It loses the rate a step, whatever the decay is.
  ratio = np.max(np.abs(path[-1])) / np.max(np.abs(path[-101]))
  np.testing.assert_allclose(ratio, 0.99**100, rtol=0.02)


def test_a_floor_of_the_norms_stops_a_stale_row():
  path = _path_of_a_stale_row(min_norm=1e-3)
  assert np.max(np.abs(path[-1] - path[200])) < 1e-5
  assert np.max(np.abs(path[-1] - path[0])) > 1e-2


# Finite for everything finite.


@st.composite
def _extreme_trees(draw, leading=()):
  shapes = {'w': (2, 3), 'b': (3,), 's': ()}
  return {
    k: draw(hnp.arrays(np.float32, leading + v, elements=_extreme))
    for k, v in shapes.items()
  }


@pytest.mark.parametrize(
  'options',
  [
    {'weight_decay': 0.1},
    {'bias_correction': True, 'clip_threshold': None, 'ratios': ('row',)},
  ],
  ids=str,
)
@hypothesis.given(params=_extreme_trees(), gradients=_extreme_trees((3,)))
def test_updates_are_finite(options, params, gradients):
  params, updates = _steps(learning_rate=0.01, **options)(params, gradients)
  for leaf in jax.tree.leaves((params, updates)):
    assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize('part', [1, 1j, -0.5 + 0.8j])
def test_updates_of_complex_numbers_below_1e19_are_finite(part):
  gradients = np.full((3, 3, 4), 1e19 * part, np.complex64)
  w = np.array(normal(0, (3, 4), jnp.complex64))
  assert np.all(np.isfinite(_steps(learning_rate=0.01)(w, gradients)))


@pytest.mark.parametrize('spoiled, rest', [(np.nan, np.nan), (np.inf, 0.0)])
def test_behind_a_clip_nan_spreads_to_all_parameters_and_infinity_does_not(
  spoiled, rest
):
  params = {'a': jnp.ones((3, 4)), 'b': jnp.ones((3, 4))}
  gradients = {**params, 'a': params['a'].at[0, 0].set(spoiled)}
  clipped = optax.chain(optax.clip_by_global_norm(1.0), merit_optax.merit(0.1))
  updates, _ = clipped.update(gradients, clipped.init(params), params)
  assert np.all(np.isnan(updates['a']))
  np.testing.assert_array_equal(updates['b'], np.full((3, 4), rest))


@hypothesis.settings(max_examples=100)
@hypothesis.given(pair=_pairs(_extreme))
def test_scaled_updates_are_finite(pair):
  assert np.all(np.isfinite(_scale(*pair)))


@pytest.mark.parametrize('small', [0.0, 1e-40])
@pytest.mark.parametrize('large', [1e30, 3e38])
def test_a_huge_weight_beside_a_tiny_update_is_not_nan(large, small):
  # The plain formula multiplies an infinite ratio with zero.
  z = np.array([[1.2e-38, small], [0.0, 1.2e-38]], np.float32)
  w = np.full((2, 2), large, np.float32)
  scaled = _scale(z, w)
  assert np.all(np.isfinite(scaled))
  # As far as the largest ratio goes.
  np.testing.assert_allclose(scaled[0, 0], z[0, 0] * 2.0**126, rtol=1e-6)


def test_a_bounded_ratio_does_not_hide_nan():
  z = np.array([[np.nan, 1.0], [1.0, 1.0]], np.float32)
  scaled = _scale(z, np.ones_like(z), 'l2', min_ratio=0.5, max_ratio=2.0)
  assert np.all(np.isnan(scaled))


# Norms.


@pytest.mark.parametrize(
  'dtype', ['float16', 'bfloat16', 'float32', 'complex64']
)
@pytest.mark.parametrize('shape', [(640, 80), (9, 16, 64)], ids=str)
def test_maxima_of_many_numbers(shape, dtype):
  # With jax 0.12, bfloat16 had NaN and other numbers than those of the array.
  x = np.array(normal(0, shape, dtype))
  rtol = 1e-6 if np.iscomplexobj(x) else 0

  @jax.jit
  def maxima(x):
    norms = [functools.partial(max_norm, axis=axis) for axis in _AXES]
    return [jax.vmap(f)(x) if x.ndim == 3 else f(x) for f in norms]

  for axis, found in zip(_AXES, maxima(x), strict=True):
    assert found.dtype == np.abs(x).dtype
    of_matrix = tuple(np.add(axis, x.ndim - 2))
    expected = np.abs(x).astype(np.float32).max(of_matrix, keepdims=True)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=rtol)


_AXES = ((0,), (1,), (0, 1))
# Exponents of numbers whose squares are normal.
_RANGES = {'float32': (-18, 18), 'float64': (-150, 150)}


@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.grad, has_aux=True)
def _gradient_and_norms(x, axis):
  norms = l2_norm(x, axis)
  return norms.sum(), norms


@pytest.mark.parametrize('axis', [(1,), (0, 1)])
@pytest.mark.parametrize('dtype', _RANGES)
@hypothesis.given(data=st.data())
def test_l2_norms_and_gradients_as_far_as_squares_are_normal(dtype, axis, data):
  sizes = st.floats(*_RANGES[dtype]).map(lambda x: 10.0**x)
  elements = st.one_of(st.just(0.0), sizes, sizes.map(lambda x: -x))
  # Arrays of NumPy are rounded as they are filled.
  x = data.draw(hnp.arrays(np.float64, (3, 4), elements=elements)).astype(dtype)
  with enable_x64(dtype == 'float64'):
    gradient, norms = map(np.asarray, _gradient_and_norms(x, axis))
  assert norms.dtype == x.dtype
  x = x.astype(np.longdouble)
  expected = np.sqrt(np.sum(x**2, axis, keepdims=True))
  eps = np.finfo(dtype).eps
  np.testing.assert_allclose(norms, expected, rtol=8 * eps)
  expected = x / np.where(expected == 0, 1, expected)
  np.testing.assert_allclose(gradient, expected, rtol=64 * eps)


@pytest.mark.parametrize('dtype', _RANGES)
@pytest.mark.parametrize('norm', ['max', 'row', 'column', 'rms'])
@hypothesis.given(data=st.data())
def test_directions_have_their_full_size_however_small_gradients_are(
  norm, dtype, data
):
  size = 10.0 ** data.draw(st.floats(*_RANGES[dtype]))
  with enable_x64(dtype == 'float64'):
    transform = merit_optax.scale_by_lmo(norm)
    gradient = jnp.full((3, 4), size, dtype)
    direction, _ = transform.update(gradient, transform.init(gradient))
  np.testing.assert_allclose(direction, 1, rtol=1e-6)


# Precision.


@pytest.mark.parametrize('dtype', [jnp.float16, jnp.bfloat16])
def test_ratios_of_half_precision_are_wider(dtype):
  # The ratio overflows in float16, and has digits that bfloat16 does not.
  w = jnp.array([[3000.0, 1.0], [2.0, 5.0]], dtype)
  z = jnp.array([[1.5e-5, 1e-5], [0.7e-5, 0.3e-5]], dtype)
  actual = _scale(z, w)
  assert actual.dtype == dtype
  z, w = z.astype(jnp.float32), w.astype(jnp.float32)
  expected = oracle_scale(z, oracle_ratios(z, w).values())
  expected = jnp.asarray(expected, jnp.float32).astype(dtype)
  np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_squares_of_half_precision_are_summed_in_float32(dtype):
  # The square of 300 leaves float16.
  z, w = jnp.ones((8, 8), dtype), jnp.full((8, 8), 300, dtype)
  np.testing.assert_array_equal(_scale(z, w, 'l2'), w)


def test_complex_norms_are_magnitudes():
  z = jnp.array([[3 + 4j, 1j], [1, 2]], jnp.complex64)
  w = jnp.array([[6 - 8j, 0], [1, 1j]], jnp.complex64)
  scaled = _scale(z, w)
  assert scaled.dtype == jnp.complex64
  np.testing.assert_allclose(scaled, 2 * z, rtol=1e-6)
