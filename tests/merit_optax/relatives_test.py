"""MERIT's relatives as chains of the kit, against their published formulas.

Of each matrix alone, in float64: what a stack of matrices, or a mesh, makes of
it is then its own.
"""

import functools
import math

import chex
import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run

_Spec = optax.contrib.MuonDimensionNumbers
_STEPS = 5
_RATE = 0.02
_MOMENTUM = 0.95
_DECAY = 0.1
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Rows are inputs. Of each layer two matrices, wide and tall.
_SHAPES = {'up': (3, 8, 24), 'down': (3, 24, 8), 'square': (8, 8)}
_SPECS = {'up': _Spec(1, 2), 'down': _Spec(1, 2), 'square': _Spec(0, 1)}


def _tree(seed, shapes=_SHAPES):
  """Returns matrices of different sizes, which differ within stacks too."""
  tree = {}
  for i, (name, shape) in enumerate(shapes.items()):
    sizes = jnp.linspace(0.1, 0.5, shape[0])
    sizes = sizes.reshape(-1, *[1] * (len(shape) - 1))
    tree[name] = normal([seed, i], shape) * sizes
  return tree


def _gradients(shapes=_SHAPES):
  return [_tree(10 + i, shapes) for i in range(_STEPS)]


def _run_alone(rule, params, gradients):
  """Yields the parameters after each step of a rule for single matrices.

  Args:
    rule: Function from a matrix and its gradients of all steps to an iterator
      over the matrix after each step, in float64.
    params: Tree of stacks of matrices, or of matrices.
    gradients: Such a tree for each step.
  """

  def steps(w, *gs):
    if w.ndim > 2:
      return np.stack([steps(*x) for x in zip(w, *gs, strict=True)], axis=1)
    return np.stack(list(rule(w, gs)))

  trees = jax.tree.map(
    lambda x: np.asarray(x, np.float64), [params, *gradients]
  )
  all_steps = jax.tree.map(steps, *trees)
  for i in range(len(gradients)):
    yield jax.tree.map(lambda x, i=i: x[i], all_steps)


def _assert_follows(optimizer, rule, params=None, gradients=None):
  params = _tree(0) if params is None else params
  gradients = _gradients() if gradients is None else gradients
  actual = run(optimizer, params, gradients)
  expected = _run_alone(rule, params, gradients)
  for step, formula in zip(actual, expected, strict=True):
    chex.assert_trees_all_close(
      jax.tree.map(np.asarray, step.params), formula, rtol=0, atol=1e-6
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


_l2 = functools.partial(
  merit_optax.scale_by_l2_norm_trust_ratio, weight_dimension_numbers=_SPECS
)
_shape = functools.partial(
  merit_optax.scale_by_shape, weight_dimension_numbers=_SPECS
)
_lmo = functools.partial(
  merit_optax.scale_by_lmo, weight_dimension_numbers=_SPECS
)


def _moonlight(m, n):
  return 0.2 * math.sqrt(max(m, n))


def _norm(x):
  return np.sqrt(np.sum(np.abs(x) ** 2))


def _orthogonal(m):
  """Returns a matrix after five Newton-Schulz iterations."""
  a, b, c = _COEFFICIENTS
  x = m / (_norm(m) + 1e-8)
  x = x.T if x.shape[0] > x.shape[1] else x
  for _ in range(5):
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
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


# LARS.


def test_lars_is_that_of_optax():
  params = {'w': normal(0, (5, 3)), 'zero': jnp.zeros((2, 2))}
  params |= {'b': jnp.ones(4), 's': jnp.ones(())}
  gradients = [
    jax.tree.map(lambda x, i=i: jnp.cos(i + x), params) for i in range(_STEPS)
  ]
  chain = optax.chain(
    optax.add_decayed_weights(1e-2),
    merit_optax.scale_by_l2_norm_trust_ratio(trust_coefficient=0.001, eps=1e-8),
    optax.scale_by_learning_rate(1.0),
    optax.trace(0.9),
  )
  lars = optax.lars(1.0, weight_decay=1e-2, trust_coefficient=0.001, eps=1e-8)
  actual, expected = (
    [step.params for step in run(optimizer, params, gradients)]
    for optimizer in (chain, lars)
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)


# OrScale.


def _orscale_rule(directions, shape_factor, min_ratio, max_ratio, calibrate):
  def rule(w, gradients):
    c = None
    for q in directions(gradients):
      d = _DECAY * w + shape_factor(*w.shape) * q
      if c is None:
        c = _norm(w) / _norm(d) if calibrate else 1
      r = np.clip(_norm(w) / (c * _norm(d)), min_ratio, max_ratio)
      w = w - _RATE * r * d
      yield w

  return rule


def _orscale(front):
  return optax.chain(
    front,
    optax.add_decayed_weights(_DECAY),
    _l2(min_ratio=0.5, max_ratio=1.5),
    optax.scale_by_learning_rate(_RATE),
  )


def _orscale_lm(front):
  return optax.chain(
    front,
    _shape(_moonlight),
    optax.add_decayed_weights(_DECAY),
    _l2(min_ratio=0.1, max_ratio=5.0, calibrate=True),
    optax.scale_by_learning_rate(_RATE),
  )


@pytest.mark.parametrize(
  'front, directions',
  [
    (_muon(), _muon_directions),
    (_muon_uncorrected(), _uncorrected_directions),
  ],
  ids=['corrected', 'published'],
)
@pytest.mark.parametrize(
  'orscale, settings, zeros',
  [
    # Zero to begin with, where the formula has the least ratio.
    (_orscale, (lambda m, n: 1, 0.5, 1.5, False), True),
    (_orscale_lm, (_moonlight, 0.1, 5.0, True), False),
  ],
  ids=['orscale', 'orscale_lm'],
)
def test_orscale_is_its_formula(front, directions, orscale, settings, zeros):
  params = _tree(0)
  if zeros:
    params['up'] = params['up'].at[0].set(0)
  rule = _orscale_rule(directions, *settings)
  _assert_follows(orscale(front), rule, params)


# Scion.

_RADIUS = 3.0


def _rms(x, axis):
  return np.sqrt(np.mean(x**2, axis, keepdims=True))


def _scion_rule(lmo):
  def rule(w, gradients):
    d = 0
    for g in gradients:
      d = 0.9 * d + 0.1 * g
      w = (1 - _RATE) * w - _RATE * _RADIUS * lmo(d)
      yield w

  return rule


# Of a matrix with inputs in rows: the transpose of those in the paper.
def _embedding(d):
  return d / _rms(d, 1)


def _head(d):
  return d / np.linalg.norm(d, axis=0) / math.sqrt(d.shape[0])


def _hidden(d):
  return math.sqrt(d.shape[1] / d.shape[0]) * _orthogonal(d)


_LAYERS = {
  'sign': ('max', lambda m, n: 1 / m, lambda d: np.sign(d) / d.shape[0]),
  'embedding': ('row', lambda m, n: 1, _embedding),
  'head': ('column', lambda m, n: 1 / m, _head),
  'bias': ('rms', lambda m, n: 1, lambda d: d / _rms(d, (0, 1))),
  'hidden': (None, lambda m, n: math.sqrt(n / m), _hidden),
}


@pytest.mark.parametrize('layer', _LAYERS)
def test_scion_is_its_formula(layer):
  norm, factor, lmo = _LAYERS[layer]
  if norm is None:
    direction = _muon(nesterov=False, beta=0.9)
  else:
    direction = optax.chain(optax.ema(0.9, debias=False), _lmo(norm))
  scion = optax.chain(
    direction,
    _shape(factor),
    optax.scale(_RADIUS),
    optax.add_decayed_weights(1.0),
    optax.scale_by_learning_rate(_RATE),
  )
  _assert_follows(scion, _scion_rule(lmo))


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


# Bounds of the ratio.

_elements = st.one_of(
  st.just(0.0),
  st.floats(2.0**-10, 2.0**10, width=32),
  st.floats(-(2.0**10), -(2.0**-10), width=32),
)
_arrays = hnp.arrays(np.float32, (3, 4), elements=_elements)
_RATIO_TRANSFORMS = {
  'max': merit_optax.scale_by_max_norm_trust_ratio,
  'l2': merit_optax.scale_by_l2_norm_trust_ratio,
  'calibrated': functools.partial(
    merit_optax.scale_by_l2_norm_trust_ratio, calibrate=True
  ),
}


@functools.cache
def _two_updates(name, min_ratio, max_ratio):
  transform = _RATIO_TRANSFORMS[name](min_ratio=min_ratio, max_ratio=max_ratio)

  def run(z, w):
    _, state = transform.update(jnp.flip(z) - 1, transform.init(w), w)
    return transform.update(z, state, w)[0]

  return jax.jit(run)


@pytest.mark.parametrize('bounds', [(0.5, 1.5), (2.0, None)], ids=str)
@pytest.mark.parametrize('name', ['max', 'calibrated'])
@hypothesis.given(z=_arrays, w=_arrays)
def test_the_applied_ratio_lies_within_its_bounds(name, bounds, z, w):
  scaled = np.asarray(_two_updates(name, *bounds)(z, w), np.float64)
  ratio = scaled[z != 0] / z[z != 0]
  least, most = bounds
  assert np.all(ratio >= (0 if least is None else least) * (1 - 1e-6))
  assert np.all(ratio <= (np.inf if most is None else most) * (1 + 1e-6))
  # And is the ratio itself where that lies in between.
  free = np.asarray(_two_updates(name, None, None)(z, w))[z != 0] / z[z != 0]
  is_zero = not np.all(np.any(w, 1)) or not np.all(np.any(w, 0))
  if not is_zero:
    np.testing.assert_allclose(ratio, np.clip(free, *bounds), rtol=1e-5)


@pytest.mark.parametrize(
  'min_ratio, max_ratio, expected',
  [
    (None, None, 1.0),
    (0.1, 5.0, 0.1),
    (3.0, None, 3.0),
    (None, 0.5, 0.5),
  ],
)
def test_a_zero_matrix_has_the_least_ratio_or_one(
  min_ratio, max_ratio, expected
):
  z, w = jnp.ones((2, 3)), jnp.zeros((2, 3))
  transform = merit_optax.scale_by_max_norm_trust_ratio(
    min_ratio=min_ratio, max_ratio=max_ratio
  )
  actual, _ = transform.update(z, transform.init(w), w)
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_nan_is_not_clipped_away():
  transform = _RATIO_TRANSFORMS['l2'](min_ratio=0.5, max_ratio=2.0)
  z, w = jnp.ones((2, 2)).at[0, 0].set(jnp.nan), jnp.ones((2, 2))
  actual, _ = transform.update(z, transform.init(w), w)
  assert jnp.all(jnp.isnan(actual))


# Calibration.

_calibrated = _RATIO_TRANSFORMS['calibrated']


def _applied_ratios(transform, steps):
  """Returns the ratio of each step, given pairs of update and parameter."""
  state = transform.init(steps[0][1])
  ratios = []
  for update, param in steps:
    scaled, state = transform.update(update, state, param)
    ratios.append(float(jnp.sum(scaled) / jnp.sum(update)))
  return ratios


_W = normal(0, (3, 4))
_Z = jnp.ones((3, 4))


@pytest.mark.parametrize('trust_coefficient', [1.0, 7.0])
def test_ratios_are_relative_to_the_first(trust_coefficient):
  transform = _calibrated(trust_coefficient=trust_coefficient)
  ratios = _applied_ratios(
    transform, [(_Z, _W), (_Z, 2 * _W), (4 * _Z, _W), (_Z, _W)]
  )
  np.testing.assert_allclose(ratios, [1, 2, 0.25, 1], rtol=1e-6)


@pytest.mark.parametrize('ratios', [('weight',), ('weight', 'row', 'column')])
def test_all_ratios_start_at_one(ratios):
  transform = _calibrated(ratios=ratios, weight_dimension_numbers=_SPECS)
  params, updates = _tree(0), _tree(1)
  state = transform.init(params)
  actual, state = transform.update(updates, state, params)
  chex.assert_trees_all_close(actual, updates, rtol=1e-6)
  sizes = [3, 3, 1]
  if len(ratios) > 1:
    sizes = [3 + 3 * 32, 3 + 3 * 32, 1 + 16]
  assert state.first_ratios.shape == (sum(sizes),)
  assert state.first_ratios.dtype == jnp.float32


@pytest.mark.parametrize(
  'useless',
  [
    pytest.param(0 * _Z, id='zero'),
    pytest.param(_Z.at[0, 0].set(jnp.nan), id='nan'),
    pytest.param(_Z.at[0, 0].set(jnp.inf), id='inf'),
    pytest.param(0.1 * _W, id='decay'),
    pytest.param((0.1 * _W).astype(jnp.bfloat16), id='decay-bfloat16'),
    pytest.param(0.1 * _W + 1e-4 * _Z, id='mostly-decay'),
  ],
)
def test_the_first_step_is_one_that_has_a_direction(useless):
  transform = _calibrated(min_ratio=0.1, max_ratio=5.0)
  ratios = _applied_ratios(
    transform, [(useless, _W), (useless, _W), (_Z, _W), (_Z, 2 * _W)]
  )
  np.testing.assert_allclose(ratios[2:], [1, 2], rtol=1e-6)
  if np.all(np.isfinite(useless.astype(jnp.float32))) and np.any(useless):
    np.testing.assert_allclose(ratios[:2], [1, 1], rtol=1e-2)


def test_a_nan_later_passes_and_is_forgotten():
  nan = _Z.at[0, 0].set(jnp.nan)
  ratios = _applied_ratios(_calibrated(), [(_Z, _W), (nan, _W), (_Z, 3 * _W)])
  np.testing.assert_allclose(ratios, [1, np.nan, 3], rtol=1e-6)


def test_zero_matrices_keep_the_ratio_of_one():
  steps = [(_Z, 0 * _W), (_Z, 1e-3 * _W), (_Z, _W)]
  transform = _calibrated(min_ratio=0.1, max_ratio=5.0)
  np.testing.assert_allclose(_applied_ratios(transform, steps), 1, rtol=1e-6)
  # Unless something says from which size on the norm counts.
  size = float(jnp.linalg.norm(_W))
  transform = _calibrated(min_norm=size / 2)
  np.testing.assert_allclose(
    _applied_ratios(transform, steps), [1, 1, 2], rtol=1e-6
  )


def test_a_matrix_that_becomes_zero_moves_with_a_ratio_of_one():
  transform = _calibrated()
  state = transform.init(_W)
  _, state = transform.update(_Z, state, _W)
  scaled, _ = transform.update(_Z, state, 0 * _W)
  np.testing.assert_array_equal(scaled, _Z)


def test_the_state_is_a_single_leaf_that_is_no_parameter():
  transform = _calibrated(weight_dimension_numbers=_SPECS)
  state = transform.init(_tree(0))
  assert len(jax.tree.leaves(state)) == 1
  marked = optax.tree.map_params(
    transform,
    lambda _: 'parameter',
    state,
    transform_non_params=lambda _: 'other',
  )
  assert marked.first_ratios == 'other'
  for empty in ({}, (), {'a': None}, {'a': optax.MaskedNode()}):
    state = transform.init(empty)
    updates, state = transform.update(empty, state, empty)
    assert updates == empty
    assert state.first_ratios.shape == (0,)
  plain = merit_optax.scale_by_l2_norm_trust_ratio()
  assert plain.init({'w': _W}) == optax.EmptyState()


# Linear minimization oracles.


@functools.cache
def _lmo_of(norm):
  transform = merit_optax.scale_by_lmo(norm)
  return jax.jit(lambda z: transform.update(z, transform.init(z))[0])


@pytest.mark.parametrize('norm', ['max', 'row', 'column', 'rms'])
@hypothesis.given(z=_arrays, other=_arrays)
def test_directions_are_the_steepest_in_their_norm(norm, z, other):
  axis = {'max': (), 'row': 1, 'column': 0, 'rms': (0, 1)}[norm]
  z = z.astype(np.float64)
  u = np.asarray(_lmo_of(norm)(jnp.asarray(z, jnp.float32)), np.float64)
  sizes, z_sizes = _rms(u, axis), _rms(z, axis)
  np.testing.assert_allclose(sizes, z_sizes != 0, rtol=1e-6)
  inside = other / np.maximum(_rms(other.astype(np.float64), axis), 1)
  steepest = np.sum(z * u)
  assert np.sum(z * inside) <= steepest + 1e-5 * np.abs(steepest)


def test_vectors_are_scaled_as_a_whole():
  z = jnp.array([3.0, -4.0, 0.0, 0.0])
  for norm in ('row', 'column', 'rms'):
    np.testing.assert_allclose(_lmo_of(norm)(z), [1.2, -1.6, 0, 0], rtol=1e-6)
  np.testing.assert_array_equal(_lmo_of('max')(z), [1, -1, 0, 0])


def test_numbers_of_any_size_are_scaled():
  for size in (1e-15, 1e-10, 1.0, 1e10, 1e20):
    z = size * jnp.array([[1.0, -1.0], [2.0, 0.0]])
    for norm in ('max', 'row', 'column', 'rms'):
      np.testing.assert_allclose(
        _lmo_of(norm)(z), _lmo_of(norm)(z / size), rtol=1e-5
      )


def test_eps_lets_small_rows_vanish():
  transform = merit_optax.scale_by_lmo('row', eps=0.1)
  z = jnp.array([[1e-9, 1e-9], [0.1, -0.1]])
  actual, _ = transform.update(z, transform.init(z))
  np.testing.assert_allclose(actual, [[1e-8, 1e-8], [0.5, -0.5]], rtol=1e-5)


def test_complex_directions_keep_their_phase():
  z = jnp.asarray([[3 + 4j, 0], [-1j, 2]], jnp.complex64)
  np.testing.assert_allclose(
    _lmo_of('max')(z), [[0.6 + 0.8j, 0], [-1j, 1]], rtol=1e-6
  )
  np.testing.assert_allclose(
    _lmo_of('row')(z), z / _rms(np.abs(z), 1), rtol=1e-6
  )


# Shapes.


def test_factors_see_rows_and_columns():
  transform = merit_optax.scale_by_shape(
    lambda m, n: 10 * m + n,
    weight_dimension_numbers={
      'heads': _Spec(0, (1, 2)),
      'layers': _Spec(1, 2),
      'bias': None,
      'biases': _Spec((), 1),
      'scalar': None,
    },
  )
  shapes = {'heads': (2, 3, 4), 'layers': (5, 2, 3), 'bias': (4,)}
  shapes |= {'biases': (5, 3), 'scalar': ()}
  ones = {name: jnp.ones(shape) for name, shape in shapes.items()}
  actual, _ = transform.update(ones, transform.init(ones))
  factors = {'heads': 32, 'layers': 23, 'bias': 14, 'biases': 13, 'scalar': 11}
  chex.assert_trees_all_equal(
    actual, jax.tree.map(lambda x, factor: factor * x, ones, factors)
  )


# All new parts.

_PARTS = {
  'acceleration': merit_optax.add_acceleration(0.9),
  'lmo': merit_optax.scale_by_lmo('row'),
  'shape': merit_optax.scale_by_shape(_moonlight),
  'bounded': merit_optax.scale_by_max_norm_trust_ratio(
    min_ratio=0.1, max_ratio=2.0
  ),
  'calibrated': _calibrated(min_ratio=0.1, max_ratio=2.0),
}


def test_acceleration_promotes_as_scale_by_adam():
  for gradient, param, mu_dtype in (
    (jnp.bfloat16, jnp.float32, None),
    (jnp.float32, jnp.bfloat16, None),
    (jnp.bfloat16, jnp.float32, jnp.bfloat16),
  ):
    g, w = jnp.ones(3, gradient), jnp.ones(3, param)
    types = []
    for transform in (
      merit_optax.add_acceleration(mu_dtype=mu_dtype),
      merit_optax.scale_by_adam(mu_dtype=mu_dtype),
    ):
      update, state = transform.update(g, transform.init(w))
      types.append((update.dtype, state.mu.dtype))
    assert types[0] == types[1]
  with pytest.raises(ValueError, match='^mu_dtype must be None for complex'):
    merit_optax.add_acceleration(mu_dtype=jnp.float32).init(1j * jnp.ones(2))
  with pytest.raises(ValueError, match='^decay must be at most'):
    merit_optax.add_acceleration(0.999).init(jnp.ones(2, jnp.bfloat16))


@pytest.mark.parametrize('part', _PARTS)
@pytest.mark.parametrize('dtype', [jnp.float16, jnp.complex64])
def test_trees_and_states_keep_their_forms_and_dtypes(part, dtype):
  transform = _PARTS[part]
  tree = {
    'none': None,
    'masked': optax.MaskedNode(),
    'empty': jnp.zeros((0, 2), dtype),
    'columns': jnp.zeros((3, 0), dtype),
    'scalar': jnp.ones((), dtype),
    'nothing': (),
    'w': normal(0, (3, 4), dtype),
  }
  state = transform.init(tree)
  for _ in range(2):
    actual, new_state = jax.jit(transform.update)(tree, state, tree)
    chex.assert_trees_all_equal_shapes_and_dtypes(
      (actual, new_state), (tree, state)
    )
    state = new_state
  chex.assert_tree_all_finite(actual)


# On a mesh.


def _chain_of_new_parts():
  return optax.chain(
    merit_optax.add_acceleration(0.9),
    _lmo('row'),
    _shape(_moonlight),
    optax.add_decayed_weights(_DECAY),
    _l2(min_ratio=0.1, max_ratio=5.0, calibrate=True),
    optax.scale_by_learning_rate(_RATE),
  )


_PLACES = {
  'up': P(None, 'fsdp', 'tensor'),
  'down': P('fsdp', None, 'tensor'),
  'square': P(('fsdp', 'tensor')),
}


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_does_not_change_steps(axis_type):
  shapes = {'up': (4, 8, 24), 'down': (4, 24, 8), 'square': (8, 8)}
  params, gradients = _tree(0, shapes), _gradients(shapes)
  chain = _chain_of_new_parts()
  expected = [step.params for step in run(chain, params, gradients)]
  mesh = jax.make_mesh(
    (4, 2), ('fsdp', 'tensor'), axis_types=(axis_type, axis_type)
  )
  places = {k: NamedSharding(mesh, spec) for k, spec in _PLACES.items()}
  with jax.set_mesh(mesh):
    params = jax.device_put(params, places)
    gradients = jax.device_put(gradients, [places] * _STEPS)
    actual = [step.params for step in run(chain, params, gradients)]
  for name, place in places.items():
    assert actual[-1][name].sharding.is_equivalent_to(
      place, actual[-1][name].ndim
    )
  chex.assert_trees_all_close(
    *jax.device_get((actual, expected)), rtol=0, atol=1e-6
  )
