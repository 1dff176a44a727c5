"""The parts of relative optimizers, and chains of them by their formulas.

Formulas are calculated for each matrix alone, in float64.
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
from tests.merit_optax.arrays import (
  MATRICES,
  muon_directions,
  normal,
  norms,
  orthogonal,
  run,
)

_Spec = optax.contrib.MuonDimensionNumbers
_STEPS = 5
_RATE = 0.02
_MOMENTUM = 0.9
_DECAY = 0.1
# Rows are inputs. Two layers of wide matrices, and a tall one.
_SHAPES = {'up': (2, 8, 24), 'down': (24, 8)}
_SPECS = {'up': _Spec(1, 2), 'down': _Spec(0, 1)}


def _tree(seed):
  """Returns matrices of different sizes, which differ within stacks too."""
  return {
    name: normal([seed, i], shape)
    * np.linspace(0.1, 0.5, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    for i, (name, shape) in enumerate(_SHAPES.items())
  }


# Optimizers that Optax has.


_LAMB = optax.chain(
  optax.scale_by_adam(0.9, 0.999, 1e-6),
  optax.add_decayed_weights(0.1),
  merit_optax.scale_by_l2_norm_trust_ratio(),
  optax.scale_by_learning_rate(0.1),
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
    (_LAMB, optax.lamb(0.1, weight_decay=0.1)),
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
    jax.tree.map(lambda x, i=i: np.cos(i + x), params) for i in range(5)
  ]
  actual, expected = (
    [step.params for step in run(optimizer, params, gradients)]
    for optimizer in (chain, peer)
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-7)


# Published formulas.


def _assert_follows(optimizer, rule, params=None, rtol=0):
  """Checks an optimizer against a rule.

  The rule is a function from a matrix and its gradients to an iterator over the
  matrix after each step.
  """
  params = params or _tree(0)
  gradients = [_tree(10 + i) for i in range(_STEPS)]
  steps = [step.params for step in run(optimizer, params, gradients)]
  for name, shape in _SHAPES.items():
    stacks, found = (
      [np.asarray(x[name], np.float64).reshape(-1, *shape[-2:]) for x in trees]
      for trees in ([params, *gradients], steps)
    )
    for i, (w, *of_matrix) in enumerate(zip(*stacks, strict=True)):
      for step, expected in zip(found, rule(w, of_matrix), strict=True):
        np.testing.assert_allclose(
          step[i], expected, rtol=rtol, atol=1e-6, err_msg=f'{name} {i}'
        )


_l2, _max, _shape, _lmo, _keep = (
  functools.partial(build, weight_dimension_numbers=_SPECS)
  for build in (
    merit_optax.scale_by_l2_norm_trust_ratio,
    merit_optax.scale_by_max_norm_trust_ratio,
    merit_optax.scale_by_shape,
    merit_optax.scale_by_lmo,
    merit_optax.keep_matrix_norms,
  )
)


def _muon(**settings):
  return merit_optax.scale_by_muon(weight_dimension_numbers=_SPECS, **settings)


def _uncorrected_directions(gradients):
  """Yields Muon's updates as published."""
  m = 0
  for g in gradients:
    m = _MOMENTUM * m + g
    yield orthogonal(_MOMENTUM * m + g)


_HYPERBALLS = {
  'l2': merit_optax.hyperball(
    optax.identity(), _RATE, weight_dimension_numbers=_SPECS
  ),
  'max': optax.chain(
    _max(ratios=('weight',)),
    optax.scale_by_learning_rate(_RATE),
    _keep('max'),
  ),
}


@pytest.mark.parametrize('norm', _HYPERBALLS)
def test_hyperball_is_its_formula(norm):
  def rule(w, gradients):
    radius = norms(w, None, norm)
    for g in gradients:
      w = w - _RATE * radius * g / norms(g, None, norm)
      w = radius * w / norms(w, None, norm)
      yield w

  _assert_follows(_HYPERBALLS[norm], rule, rtol=1e-5)


# A plain momentum in front, and no momentum in Muon, whose own corrects the
# terms of Nesterov's momentum for their start at zero.
def _muon_uncorrected():
  return optax.chain(
    optax.trace(_MOMENTUM, nesterov=True), _muon(beta=0.0, nesterov=False)
  )


@pytest.mark.parametrize(
  'front, directions, factor, bounds, calibrate',
  [
    (_muon_uncorrected, _uncorrected_directions, None, (0.5, 1.5), False),
    (
      *(_muon, muon_directions),
      *(lambda m, n: 0.2 * math.sqrt(max(m, n)), (0.1, 5.0), True),
    ),
  ],
  ids=['orscale', 'orscale_lm'],
)
def test_orscale_is_its_formula(front, directions, factor, bounds, calibrate):
  def rule(w, gradients):
    c = None
    for q in directions(gradients):
      d = _DECAY * w + (factor(*w.shape) if factor else 1) * q
      ratio = np.linalg.norm(w) / np.linalg.norm(d)
      if c is None:
        c = ratio if calibrate else 1
      w = w - _RATE * np.clip(ratio / c, *bounds) * d
      yield w

  orscale = optax.chain(
    front(),
    _shape(factor) if factor else optax.identity(),
    optax.add_decayed_weights(_DECAY),
    _l2(min_ratio=bounds[0], max_ratio=bounds[1], calibrate=calibrate),
    optax.scale_by_learning_rate(_RATE),
  )
  params = _tree(0)
  if not calibrate:  # Zero to begin with, where the ratio is the least.
    params['up'] = params['up'].at[0].set(0)
  _assert_follows(orscale, rule, params)


@pytest.mark.parametrize(
  'axis, bounds, ratios',
  [
    (None, {'min_ratio': 1.0}, ('weight',)),
    (0, {'min_ratio': 1.0}, ('column',)),
    (None, {}, ('weight',)),
  ],
  ids=['floor', 'row_floor', 'relative_update'],
)
def test_sizes_relative_to_the_weights_are_their_formulas(axis, bounds, ratios):
  share = 0.35

  # Kernels are (in, out), so a row of PyTorch's weights is a column here.
  def rule(w, gradients):
    for g in gradients:
      size = share * norms(w, axis, 'l2') / norms(g, axis, 'l2')
      w = w - _RATE * np.maximum(size, bounds.get('min_ratio', 0)) * g
      yield w

  chain = optax.chain(
    _l2(trust_coefficient=share, ratios=ratios, **bounds),
    optax.scale_by_learning_rate(_RATE),
  )
  # Updates of the first are above the floor, of the second below it.
  params = {k: x * {'up': 2, 'down': 6}[k] for k, x in _tree(0).items()}
  _assert_follows(chain, rule, params)


# Over which the root mean square becomes 1.
_AXES = {'max': (), 'row': 1, 'column': 0, 'rms': (0, 1)}


def _rms(x, axis):
  return np.sqrt(np.mean(x**2, axis, keepdims=True))


@pytest.mark.parametrize('norm', ['max', 'row', 'spectral'])
def test_scion_is_its_formula(norm):
  radius = 3.0
  if norm == 'spectral':
    direction = _muon(nesterov=False)
  else:
    direction = optax.chain(optax.ema(0.9, debias=False), _lmo(norm))

  def factor(m, n):
    return math.sqrt(n / m)

  def rule(w, gradients):
    d = 0
    for g in gradients:
      d = 0.9 * d + 0.1 * g
      step = orthogonal(d) if norm == 'spectral' else d / _rms(d, _AXES[norm])
      w = (1 - _RATE) * w - _RATE * radius * factor(*w.shape) * step
      yield w

  scion = optax.chain(
    direction,
    _shape(factor),
    optax.scale(radius),
    optax.add_decayed_weights(1.0),
    optax.scale_by_learning_rate(_RATE),
  )
  _assert_follows(scion, rule)


# Norms in a run: trust ratios on Muon's direction, and weight decay.


def _growth(*transforms):
  """Returns the norm of a matrix under random gradients, over its first one.

  Nothing but the rule decides on the norm then. After 300, 600 and 900 steps.
  """
  muon = merit_optax.scale_by_muon(weight_dimension_numbers=_Spec(0, 1))
  rate = optax.scale_by_learning_rate(0.05)
  optimizer = optax.chain(muon, *transforms, rate)
  start = normal(0, (12, 24)) / 5

  @jax.jit
  def run():
    def step(carry, key):
      w, state = carry
      g = jax.random.normal(key, w.shape)
      updates, state = optimizer.update(g, state, w)
      w = optax.apply_updates(w, updates)
      return (w, state), jnp.linalg.norm(w)

    keys = jax.random.split(jax.random.key(1), 900)
    return jax.lax.scan(step, (start, optimizer.init(start)), keys)[1]

  return np.asarray(run() / jnp.linalg.norm(start), np.float64)[299::300]


def test_norms_run_away_under_decay_after_an_unbounded_ratio_alone():
  decay = optax.add_decayed_weights(_DECAY)
  unbounded = merit_optax.scale_by_l2_norm_trust_ratio()
  bounded = merit_optax.scale_by_l2_norm_trust_ratio(
    min_ratio=0.5, max_ratio=1.5
  )
  first, second, third = _growth(unbounded, decay)
  # Exponentially: each step grows by a fraction of the norm, whatever that is.
  assert third > 100 * first
  np.testing.assert_allclose(third / second, second / first, rtol=0.5)
  for chain in ((decay, unbounded), (bounded, decay)):
    _, second, third = _growth(*chain)
    np.testing.assert_allclose(third, second, rtol=0.15)


# Kept norms.


def _kept(norm='l2', specs=None):
  transform = merit_optax.keep_matrix_norms(
    norm, weight_dimension_numbers=specs
  )
  return jax.jit(lambda u, w: transform.update(u, transform.init(w), w)[0])


def test_zeros_and_vectors_have_no_norm_to_keep():
  w, u = jnp.ones((2, 3)), 0.1 * normal(0, (2, 3))
  np.testing.assert_array_equal(_kept()(u, jnp.zeros((2, 3))), u)
  np.testing.assert_array_equal(_kept()(-w, w), -w)
  # A spec may say that a matrix is a vector.
  spec = _Spec((), (0, 1))
  np.testing.assert_array_equal(_kept(specs=spec)(u, w), u)


@pytest.mark.parametrize('norm', ['max', 'l2'])
def test_a_kept_norm_hides_no_nan(norm):
  params = jnp.ones((2, 64, 40))
  updates = jnp.ones_like(params).at[1, 5, 7].set(jnp.nan)
  kept = _kept(norm, _Spec(1, 2))(updates, params)
  assert jnp.isfinite(kept[0]).all()
  assert jnp.isnan(kept[1, 5, 7])


def test_a_norm_that_overflows_is_nan_and_no_zero():
  w, u = jnp.full((2, 3), 1e20), jnp.ones((2, 3))
  for update, param in ((u, w), (w, u), (-(1 - 1e-5) * w, w)):
    assert jnp.isnan(_kept('l2')(update, param)).all()
  np.testing.assert_array_equal(_kept('max')(u, w), 0 * w)


def test_bfloat16_weights_take_steps_too_small_for_their_sum():
  w = normal(0, (64, 64), jnp.bfloat16)
  u = normal(1, (64, 64)) / 8000

  @jax.jit
  def step(w, u):
    kept = _kept()(u, w)
    return kept, _kept()(u.astype(jnp.bfloat16), w), w + kept

  kept, narrow, new = step(w, u)
  # The step is turned, and not lost.
  along = w * np.sum(np.asarray(w, np.float32) * u) / norms(w, None, 'l2') ** 2
  for update, dtype in ((kept, jnp.float32), (narrow, jnp.bfloat16)):
    assert update.dtype == dtype
    error = norms(update - (u - along), None, 'l2')
    assert error < 0.01 * norms(u, None, 'l2')
  # float32 holds the step without rounding.
  np.testing.assert_allclose(
    norms(new, None, 'l2'), norms(w, None, 'l2'), rtol=1e-6
  )


# Calibration.


_calibrated = functools.partial(
  merit_optax.scale_by_l2_norm_trust_ratio, calibrate=True
)


def _applied_ratios(transform, steps):
  """Returns the ratio of each step, given pairs of update and parameter."""
  state, ratios = transform.init(_W), []

  @jax.jit
  def step(update, state, param):
    scaled, state = transform.update(update, state, param)
    sums = [jnp.sum(x, dtype=jnp.float32) for x in (scaled, update)]
    return sums[0] / sums[1], state

  for update, param in steps:
    ratio, state = step(update, state, param)
    ratios.append(float(ratio))
  return ratios


_W = normal(0, (3, 4))
_Z = jnp.ones((3, 4))
# As long as the parameter and at right angles to it.
_ACROSS = _Z - jnp.sum(_W) / jnp.sum(_W**2) * _W
_ACROSS *= jnp.linalg.norm(_W) / jnp.linalg.norm(_ACROSS)
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
  'decay-bfloat16': ((0.1 * _W).astype(jnp.bfloat16), 1),
  'mostly-decay': (_W + _ACROSS / 200, 1),
}


@pytest.mark.parametrize(
  'settings, steps, expected',
  [
    # Relative to the first.
    ({}, _SIZES, [1, 2, 0.25, 1]),
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
    # Of an update with a direction of its own, though it is mostly decay.
    (
      {},
      [(_W + _ACROSS / 50, _W), (_Z, _W)],
      [1, np.sqrt(np.mean(_W**2) * (1 + 1 / 50**2))],
    ),
    # Whatever else is in the ratios.
    *(
      (settings, [(0.1 * _W, _W), (_Z, _W), (_Z, 2 * _W)], [1, 1, 2])
      for settings in ({'trust_coefficient': 7.0}, {'eps': _HALF_NORM})
    ),
  ],
)
def test_calibrated_ratios(settings, steps, expected):
  ratios = _applied_ratios(_calibrated(**settings), steps)
  np.testing.assert_allclose(ratios, expected, rtol=1e-6)


def test_all_ratios_start_at_one():
  transform = _calibrated(
    ratios=('weight', 'row', 'column'), weight_dimension_numbers=_SPECS
  )
  params, updates = _tree(0), _tree(1)
  state = jax.jit(transform.init)(params)
  actual, state = jax.jit(transform.update)(updates, state, params)
  chex.assert_trees_all_close(actual, updates, rtol=1e-6)
  assert state.first_ratios.shape == (3 * (1 + 8 + 24),)
  assert state.first_ratios.dtype == jnp.float32


# Linear minimization oracles.


@functools.cache
def _direction(norm, eps=0.0):
  transform = merit_optax.scale_by_lmo(norm, eps)
  return jax.jit(lambda z: transform.update(z, transform.init(z))[0])


@pytest.mark.parametrize('norm', _AXES)
@hypothesis.given(z=MATRICES, other=MATRICES)
def test_directions_are_the_steepest_in_their_norm(norm, z, other):
  axis = _AXES[norm]
  z = z.astype(np.float64)
  u = np.asarray(_direction(norm)(jnp.asarray(z, jnp.float32)), np.float64)
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
    ('max', 0.0, [3, -4, 0, 0], [1, -1, 0, 0]),
    # Small rows vanish.
    ('row', 0.1, [[1e-9, 1e-9], [0.1, -0.1]], [[1e-8, 1e-8], [0.5, -0.5]]),
    # Phases stay.
    ('max', 0.0, _COMPLEX, [[0.6 + 0.8j, 0], [-1j, 1]]),
    ('row', 0.0, _COMPLEX, _COMPLEX / _rms(np.abs(_COMPLEX), 1)),
  ],
)
def test_directions_of_vectors_with_eps_and_complex(norm, eps, z, expected):
  actual = _direction(norm, eps)(1.0 * jnp.asarray(z))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


# Shapes.


def test_factors_depend_on_rows_and_columns():
  shapes = [(2, 3, 4), (5, 2, 3), (4,), (5, 3), (), (0, 5)]
  specs = [_Spec(0, (1, 2)), _Spec(1, 2), None, _Spec((), 1), None, _Spec()]
  transform = merit_optax.scale_by_shape(
    lambda m, n: 10 * m + n if m else 1 / m, weight_dimension_numbers=specs
  )
  ones = [jnp.ones(shape) for shape in shapes]
  actual, _ = transform.update(ones, transform.init(ones))
  expected = jax.tree.map(jnp.full_like, ones, [32, 23, 14, 13, 11, 0])
  chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize('factor', [None, np.nan, jnp.ones((7, 1, 1))])
def test_factors_that_are_no_numbers_are_refused(factor):
  transform = merit_optax.scale_by_shape(lambda *_: factor)
  with pytest.raises(ValueError, match=r'^factor\(rows, columns\) must be'):
    transform.update(jnp.ones((4, 6)), optax.EmptyState())
