"""MERIT's relatives as chains of the kit, against their published formulas.

Of each matrix alone, in float64: what a stack of matrices, or a mesh, makes of
it is then its own.
"""

import functools
import math

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import MATRICES, normal, run

_Spec = optax.contrib.MuonDimensionNumbers
_STEPS = 5
_RATE = 0.02
_MOMENTUM = 0.95
_DECAY = 0.1
# Rows are inputs. Of each layer two matrices, wide and tall.
_SHAPES = {'up': (4, 8, 24), 'down': (4, 24, 8), 'square': (8, 8)}
_SPECS = {'up': _Spec(1, 2), 'down': _Spec(1, 2), 'square': _Spec(0, 1)}


def _tree(seed):
  """Returns matrices of different sizes, which differ within stacks too."""
  return {
    name: normal([seed, i], shape)
    * np.linspace(0.1, 0.5, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    for i, (name, shape) in enumerate(_SHAPES.items())
  }


def _gradients():
  return [_tree(10 + i) for i in range(_STEPS)]


def _assert_follows(optimizer, rule, params=None):
  """Checks an optimizer against a rule.

  The rule is a function from a matrix and its gradients to an iterator over the
  matrix after each step.
  """
  params, gradients = params or _tree(0), _gradients()
  steps = [step.params for step in run(optimizer, params, gradients)]
  for name, shape in _SHAPES.items():
    stacks, found = (
      [np.asarray(x[name], np.float64).reshape(-1, *shape[-2:]) for x in trees]
      for trees in ([params, *gradients], steps)
    )
    for i, (w, *of_matrix) in enumerate(zip(*stacks, strict=True)):
      for step, expected in zip(found, rule(w, of_matrix), strict=True):
        np.testing.assert_allclose(
          step[i], expected, rtol=0, atol=1e-6, err_msg=f'{name} {i}'
        )


def _muon(nesterov=True, beta=_MOMENTUM):
  return merit_optax.scale_by_muon(
    beta=beta,
    nesterov=nesterov,
    weight_dimension_numbers=lambda p: jax.tree.map(lambda _: _Spec(-2, -1), p),
  )


# A plain momentum in front, and no momentum in Muon, whose own corrects the
# terms of Nesterov's momentum for their start at zero.
def _muon_uncorrected():
  return optax.chain(
    optax.trace(_MOMENTUM, nesterov=True), _muon(beta=0.0, nesterov=False)
  )


_l2, _shape, _lmo = (
  functools.partial(build, weight_dimension_numbers=_SPECS)
  for build in (
    merit_optax.scale_by_l2_norm_trust_ratio,
    merit_optax.scale_by_shape,
    merit_optax.scale_by_lmo,
  )
)


def _moonlight(m, n):
  return 0.2 * math.sqrt(max(m, n))


def _orthogonal(m):
  """Returns a matrix after five Newton-Schulz iterations."""
  x = m / (np.linalg.norm(m) + 1e-8)
  x = x.T if x.shape[0] > x.shape[1] else x
  for _ in range(5):
    gram = x @ x.T
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
  return x.T if m.shape[0] > m.shape[1] else x


def _muon_directions(gradients):
  """Yields Muon's updates, as Optax corrects Nesterov's momentum."""
  m = 0
  for t, g in enumerate(gradients, 1):
    m = _MOMENTUM * m + (1 - _MOMENTUM) * g
    yield _orthogonal(
      _MOMENTUM * m / (1 - _MOMENTUM ** (t + 1))
      + (1 - _MOMENTUM) * g / (1 - _MOMENTUM**t)
    )


def _uncorrected_directions(gradients):
  """Yields Muon's updates as published."""
  m = 0
  for g in gradients:
    m = _MOMENTUM * m + g
    yield _orthogonal(_MOMENTUM * m + g)


# OrScale.


def _orscale_rule(directions, shape_factor, min_ratio, max_ratio, calibrate):
  def rule(w, gradients):
    c = None
    for q in directions(gradients):
      d = _DECAY * w + shape_factor(*w.shape) * q
      ratio = np.linalg.norm(w) / np.linalg.norm(d)
      if c is None:
        c = ratio if calibrate else 1
      w = w - _RATE * np.clip(ratio / c, min_ratio, max_ratio) * d
      yield w

  return rule


_ORSCALE = {
  'orscale': (lambda m, n: 1, 0.5, 1.5, False),
  'orscale_lm': (_moonlight, 0.1, 5.0, True),
}


@pytest.mark.parametrize(
  'front, directions',
  [
    (_muon(), _muon_directions),
    (_muon_uncorrected(), _uncorrected_directions),
  ],
  ids=['corrected', 'published'],
)
@pytest.mark.parametrize('name', _ORSCALE)
def test_orscale_is_its_formula(front, directions, name):
  factor, *bounds, calibrate = _ORSCALE[name]
  orscale = optax.chain(
    front,
    _shape(factor),
    optax.add_decayed_weights(_DECAY),
    _l2(min_ratio=bounds[0], max_ratio=bounds[1], calibrate=calibrate),
    optax.scale_by_learning_rate(_RATE),
  )
  params = _tree(0)
  if name == 'orscale':  # Zero to begin with, where the ratio is the least.
    params['up'] = params['up'].at[0].set(0)
  rule = _orscale_rule(directions, *_ORSCALE[name])
  _assert_follows(orscale, rule, params)


# Scion.

_RADIUS = 3.0
# Over which the root mean square becomes 1.
_AXES = {'max': (), 'row': 1, 'column': 0, 'rms': (0, 1)}


def _rms(x, axis):
  return np.sqrt(np.mean(x**2, axis, keepdims=True))


@pytest.mark.parametrize('norm', [*_AXES, 'spectral'])
def test_scion_is_its_formula(norm):
  if norm == 'spectral':
    direction = _muon(nesterov=False, beta=0.9)
  else:
    direction = optax.chain(optax.ema(0.9, debias=False), _lmo(norm))

  def factor(m, n):
    return math.sqrt(n / m)

  def lmo(d):
    is_spectral = norm == 'spectral'
    return _orthogonal(d) if is_spectral else d / _rms(d, _AXES[norm])

  def rule(w, gradients):
    d = 0
    for g in gradients:
      d = 0.9 * d + 0.1 * g
      step = _RADIUS * factor(*w.shape) * lmo(d)
      w = (1 - _RATE) * w - _RATE * step
      yield w

  scion = optax.chain(
    direction,
    _shape(factor),
    optax.scale(_RADIUS),
    optax.add_decayed_weights(1.0),
    optax.scale_by_learning_rate(_RATE),
  )
  _assert_follows(scion, rule)


# MONA.


@pytest.mark.parametrize('decay, coefficient', [(0.99, None), (0.7, 1.5)])
def test_mona_is_its_formula(decay, coefficient):
  alpha = -1 / (2 * (1 - decay)) if coefficient is None else coefficient

  def accelerated(gradients):
    before, a = 0, 0
    for g in gradients:
      a = decay * a + (1 - decay) * (g - before)
      before = g
      yield g + alpha * a

  def rule(w, gradients):
    for q in _muon_directions(accelerated(gradients)):
      w = w - _RATE * (q + _DECAY * w)
      yield w

  mona = optax.chain(
    merit_optax.add_acceleration(decay, coefficient),
    _muon(),
    optax.add_decayed_weights(_DECAY),
    optax.scale_by_learning_rate(_RATE),
  )
  _assert_follows(mona, rule)


# Calibration.


_calibrated = functools.partial(
  merit_optax.scale_by_l2_norm_trust_ratio, calibrate=True
)


def _applied_ratios(transform, steps):
  """Returns the ratio of each step, given pairs of update and parameter."""
  state, ratios = transform.init(_W), []
  for update, param in steps:
    scaled, state = transform.update(update, state, param)
    sums = [jnp.sum(x, dtype=jnp.float32) for x in (scaled, update)]
    ratios.append(float(sums[0] / sums[1]))
  return ratios


_W = normal(0, (3, 4))
_Z = jnp.ones((3, 4))
_NAN = _Z.at[0, 0].set(jnp.nan)
_BOUNDS = {'min_ratio': 0.1, 'max_ratio': 5.0}
_SIZES = [(_Z, _W), (_Z, 2 * _W), (4 * _Z, _W), (_Z, _W)]
_FROM_ZERO = [(_Z, 0 * _W), (_Z, 1e-3 * _W), (_Z, _W)]
_HALF_NORM = float(jnp.linalg.norm(_W)) / 2
# Updates without a direction of their own, and what is left of their sums.
_USELESS = {
  'zero': (0 * _Z, np.nan),
  'nan': (_NAN, np.nan),
  'inf': (_Z.at[0, 0].set(jnp.inf), np.nan),
  'decay': (0.1 * _W, 1),
  'decay-bfloat16': ((0.1 * _W).astype(jnp.bfloat16), 1),
  'mostly-decay': (0.1 * _W + 1e-4 * _Z, 1),
}


@pytest.mark.parametrize(
  'settings, steps, expected',
  [
    # Relative to the first.
    ({}, _SIZES, [1, 2, 0.25, 1]),
    ({'trust_coefficient': 7.0}, _SIZES, [1, 2, 0.25, 1]),
    ({}, [(_Z, _W), (_NAN, _W), (_Z, 3 * _W)], [1, np.nan, 3]),
    (_BOUNDS, _FROM_ZERO, [1, 1, 1]),
    # Unless something says from which size on the norm counts.
    ({'min_norm': _HALF_NORM}, _FROM_ZERO, [1, 1, 2]),
    ({}, [(_Z, _W), (_Z, 0 * _W)], [1, 1]),
    *(
      pytest.param(
        _BOUNDS,
        [(update, _W), (update, _W), (_Z, _W), (_Z, 2 * _W)],
        [ratio, ratio, 1, 2],
        id=name,
      )
      for name, (update, ratio) in _USELESS.items()
    ),
    # Whatever else is in the ratios.
    *(
      (settings, [(0.1 * _W, _W), (_Z, _W), (_Z, 2 * _W)], [1, 1, 2])
      for settings in (
        {'trust_coefficient': 7.0},
        {'min_norm': _HALF_NORM},
        {'eps': _HALF_NORM},
      )
    ),
  ],
)
def test_calibrated_ratios(settings, steps, expected):
  ratios = _applied_ratios(_calibrated(**settings), steps)
  np.testing.assert_allclose(ratios, expected, rtol=1e-6)


@pytest.mark.parametrize(
  'ratios, size',
  [
    (('weight',), 4 + 4 + 1),
    (('weight', 'row', 'column'), 2 * (4 + 4 * 32) + 1 + 16),
  ],
)
def test_all_ratios_start_at_one(ratios, size):
  transform = _calibrated(ratios=ratios, weight_dimension_numbers=_SPECS)
  params, updates = _tree(0), _tree(1)
  state = transform.init(params)
  actual, state = transform.update(updates, state, params)
  chex.assert_trees_all_close(actual, updates, rtol=1e-6)
  assert state.first_ratios.shape == (size,)
  assert state.first_ratios.dtype == jnp.float32


# Linear minimization oracles.


@functools.cache
def _lmo_of(norm, eps=0.0):
  transform = merit_optax.scale_by_lmo(norm, eps)
  return jax.jit(lambda z: transform.update(z, transform.init(z))[0])


@pytest.mark.parametrize('norm', _AXES)
@hypothesis.given(z=MATRICES, other=MATRICES)
def test_directions_are_the_steepest_in_their_norm(norm, z, other):
  axis = _AXES[norm]
  z = z.astype(np.float64)
  u = np.asarray(_lmo_of(norm)(jnp.asarray(z, jnp.float32)), np.float64)
  sizes, z_sizes = _rms(u, axis), _rms(z, axis)
  np.testing.assert_allclose(sizes, z_sizes != 0, rtol=1e-6)
  inside = other / np.maximum(_rms(other.astype(np.float64), axis), 1)
  steepest = np.sum(z * u)
  assert np.sum(z * inside) <= steepest + 1e-5 * np.abs(steepest)


_COMPLEX = np.array([[3 + 4j, 0], [-1j, 2]], np.complex64)


@pytest.mark.parametrize(
  'norm, eps, z, expected',
  [
    # Vectors as a whole.
    ('row', 0.0, [3, -4, 0, 0], [1.2, -1.6, 0, 0]),
    ('column', 0.0, [3, -4, 0, 0], [1.2, -1.6, 0, 0]),
    ('rms', 0.0, [3, -4, 0, 0], [1.2, -1.6, 0, 0]),
    ('max', 0.0, [3, -4, 0, 0], [1, -1, 0, 0]),
    # Small rows vanish.
    ('row', 0.1, [[1e-9, 1e-9], [0.1, -0.1]], [[1e-8, 1e-8], [0.5, -0.5]]),
    # Phases stay.
    ('max', 0.0, _COMPLEX, [[0.6 + 0.8j, 0], [-1j, 1]]),
    ('row', 0.0, _COMPLEX, _COMPLEX / _rms(np.abs(_COMPLEX), 1)),
  ],
)
def test_directions_of_vectors_with_eps_and_complex(norm, eps, z, expected):
  actual = _lmo_of(norm, eps)(1.0 * jnp.asarray(z))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


# Shapes.


def test_factors_see_rows_and_columns():
  shapes = [(2, 3, 4), (5, 2, 3), (4,), (5, 3), ()]
  specs = [_Spec(0, (1, 2)), _Spec(1, 2), None, _Spec((), 1), None]
  transform = merit_optax.scale_by_shape(
    lambda m, n: 10 * m + n, weight_dimension_numbers=specs
  )
  ones = [jnp.ones(shape) for shape in shapes]
  actual, _ = transform.update(ones, transform.init(ones))
  expected = jax.tree.map(jnp.full_like, ones, [32, 23, 14, 13, 11])
  chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize('factor', [None, np.nan, jnp.ones((7, 1, 1))])
def test_factors_that_are_no_numbers_are_refused(factor):
  transform = merit_optax.scale_by_shape(lambda *_: factor)
  with pytest.raises(ValueError, match=r'^factor\(rows, columns\) must be'):
    transform.update(jnp.ones((4, 6)), optax.EmptyState())


def test_factors_are_not_rounded_to_the_dtype_and_empty_arrays_have_none():
  transform = merit_optax.scale_by_shape(lambda m, n: (n / m) ** 0.5)
  updates = {
    'w': normal(0, (127, 128), jnp.bfloat16),
    'empty': jnp.ones((0, 5)),
  }
  found, _ = transform.update(updates, transform.init(updates))
  exact = (128 / 127) ** 0.5 * updates['w'].astype(jnp.float32)
  expected = updates | {'w': exact.astype(jnp.bfloat16)}
  chex.assert_trees_all_equal(found, expected)
