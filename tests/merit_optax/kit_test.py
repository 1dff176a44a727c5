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
from tests.merit_optax.arrays import normal, run

_Spec = optax.contrib.MuonDimensionNumbers
_RATE = 0.1
_ALL = ('weight', 'row', 'column')


def _tree(seed):
  """Returns a matrix, a stack of two, a fused projection and a vector."""
  return {
    'w': normal(seed, (5, 3)),
    'layers': normal(seed + 1, (2, 4, 6)),
    'qkv': normal(seed + 2, (4, 2, 3, 5)),
    'b': normal(seed + 3, (4,)),
  }


# Heads and features are columns; each of query, key and value is a matrix.
_SPECS = {
  'w': _Spec(),
  'layers': _Spec(1, 2),
  'qkv': _Spec(0, (1, 3)),
  'b': None,
}
# Each matrix of the tree, by the axes that count matrices.
_BATCH = {'w': (), 'layers': (0,), 'qkv': (2,), 'b': ()}


def _matrices(name, x):
  """Returns the matrices of a parameter, in float64, one in a row."""
  x = np.asarray(x, np.float64)
  axes = _BATCH[name]
  moved = np.moveaxis(x, axes, range(len(axes)))
  return moved.reshape(int(np.prod(moved.shape[: len(axes)])), -1)


# Rows of the table, against what they are.


def test_the_chain_of_lamb_equals_optax_lamb():
  params = {'w': normal(0, (5, 3)), 'b': normal(1, (4,)), 's': jnp.ones(())}
  gradients = [
    jax.tree.map(lambda x, i=i: jnp.cos(i * x), params) for i in (1, 2, 3)
  ]
  chain = optax.chain(
    optax.scale_by_adam(0.9, 0.999, 1e-6),
    optax.add_decayed_weights(0.1),
    merit_optax.scale_by_l2_norm_trust_ratio(),
    optax.scale_by_learning_rate(_RATE),
  )
  lamb = optax.lamb(_RATE, weight_decay=0.1)
  actual, expected = (
    [step.params for step in run(optimizer, params, gradients)]
    for optimizer in (chain, lamb)
  )
  chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_lamb_of_stacked_layers_is_that_of_separate_ones():
  scales = jnp.array([1.0, 10.0, 0.1])[:, None, None]
  params, gradients = scales * normal(0, (3, 5, 4)), normal(1, (3, 5, 4))
  ratio = merit_optax.scale_by_l2_norm_trust_ratio(
    weight_dimension_numbers=_Spec(1, 2)
  )
  together, _ = ratio.update(gradients, ratio.init(params), params)
  lamb = optax.scale_by_trust_ratio()
  alone = [
    lamb.update(g, lamb.init(w), w)[0]
    for w, g in zip(params, gradients, strict=True)
  ]
  chex.assert_trees_all_close(together, jnp.stack(alone), rtol=1e-6)


def test_hyperball_is_its_formula():
  params = _tree(0)
  del params['b']
  gradients = [jax.tree.map(jnp.sin, _tree(10 * i)) for i in (1, 2, 3)]
  for gradient in gradients:
    del gradient['b']
  specs = {name: _SPECS[name] for name in params}
  hyperball = optax.chain(
    merit_optax.scale_by_l2_norm_trust_ratio(weight_dimension_numbers=specs),
    optax.scale_by_learning_rate(_RATE),
    merit_optax.keep_matrix_norms(weight_dimension_numbers=specs),
  )
  expected = {name: _matrices(name, w) for name, w in params.items()}
  radius = {
    name: np.linalg.norm(w, axis=1, keepdims=True)
    for name, w in expected.items()
  }
  steps = run(hyperball, params, gradients)
  for step, gradient in zip(steps, gradients, strict=True):
    for name, w in expected.items():
      r, u = radius[name], _matrices(name, gradient[name])
      moved = w - _RATE * r * u / np.linalg.norm(u, axis=1, keepdims=True)
      expected[name] = r * moved / np.linalg.norm(moved, axis=1, keepdims=True)
      np.testing.assert_allclose(
        _matrices(name, step.params[name]), expected[name], rtol=1e-5, atol=1e-6
      )


# The l2 ratio.


_elements = st.one_of(
  st.just(0.0),
  st.floats(2.0**-10, 2.0**10, width=32),
  st.floats(-(2.0**10), -(2.0**-10), width=32),
)
_arrays = hnp.arrays(np.float32, (3, 4), elements=_elements)


@functools.cache
def _l2(ratios):
  transform = merit_optax.scale_by_l2_norm_trust_ratio(ratios=ratios)
  return jax.jit(lambda z, w: transform.update(z, transform.init(w), w)[0])


@pytest.mark.parametrize('ratios', [('weight',), _ALL], ids=str)
@hypothesis.given(z=_arrays, w=_arrays)
def test_the_l2_ratio_is_that_of_the_formula(ratios, z, w):
  axes = {'weight': (0, 1), 'row': (1,), 'column': (0,)}
  w_norms, z_norms = (
    [
      np.sqrt(np.sum(x.astype(np.float64) ** 2, axes[name], keepdims=True))
      for name in ratios
    ]
    for x in (w, z)
  )
  pairs = list(zip(w_norms, z_norms, strict=True))
  void = functools.reduce(
    np.logical_or, [(a == 0) | (b == 0) for a, b in pairs]
  )
  largest = functools.reduce(
    np.maximum, [a / np.where(b == 0, 1, b) for a, b in pairs]
  )
  expected = np.where(void, 1, largest) * z
  np.testing.assert_allclose(_l2(ratios)(z, w), expected, rtol=1e-5)


def test_further_arguments_of_the_l2_ratio_are_those_of_optax():
  options = {'min_norm': 9.0, 'trust_coefficient': 3.0, 'eps': 0.5}
  w, z = normal(0, (3, 4)), normal(1, (3, 4))
  ours = merit_optax.scale_by_l2_norm_trust_ratio(*options.values())
  optax_ratio = optax.scale_by_trust_ratio(**options)
  chex.assert_trees_all_close(
    ours.update(z, ours.init(w), w)[0],
    optax_ratio.update(z, optax_ratio.init(w), w)[0],
    rtol=1e-6,
  )


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_squares_of_half_precision_are_summed_in_float32(dtype):
  # The square of 300 leaves float16.
  z, w = jnp.ones((8, 8), dtype), jnp.full((8, 8), 300, dtype)
  np.testing.assert_array_equal(_l2(('weight',))(z, w), w)


# Any direction.

_matrix_specs = functools.partial(jax.tree.map, lambda _: _Spec(1, 2))


def _relative(direction, learning_rate=_RATE, norm='l2'):
  ratio = {
    'l2': merit_optax.scale_by_l2_norm_trust_ratio,
    'max': functools.partial(
      merit_optax.scale_by_max_norm_trust_ratio, ratios=('weight',)
    ),
  }[norm]
  return optax.chain(
    direction,
    ratio(weight_dimension_numbers=_matrix_specs),
    optax.scale_by_learning_rate(learning_rate),
    merit_optax.keep_matrix_norms(norm, weight_dimension_numbers=_matrix_specs),
  )


def _norms(x, norm):
  order = {'l2': 2, 'max': np.inf}[norm]
  flat = np.asarray(x, np.float64).reshape(len(x), -1)
  return np.linalg.norm(flat, order, axis=1)


def _loss(params):
  return jnp.sum(params**2)


@pytest.mark.parametrize(
  'direction, norm',
  [
    (
      optax.contrib.scale_by_muon(weight_dimension_numbers=_matrix_specs),
      'l2',
    ),
    (optax.scale_by_lion(), 'max'),
    # Does not move in its first step.
    (optax.contrib.scale_by_adopt(), 'max'),
    # Wants to know the loss.
    (optax.contrib.sophia(1.0), 'l2'),
  ],
  ids=['muon', 'lion', 'adopt', 'sophia'],
)
def test_any_direction_moves_by_the_rate_and_keeps_each_norm(direction, norm):
  direction = optax.with_extra_args_support(direction)
  optimizer = _relative(direction, norm=norm)
  # Layers of different sizes, of which each keeps its own.
  old = jnp.array([1.0, 0.1])[:, None, None] * normal(0, (2, 4, 6))
  start = _norms(old, norm)
  state, direction_state = optimizer.init(old), direction.init(old)
  _, state = optimizer.update(old, state, old, obj_fn=_loss)
  _, direction_state = direction.update(old, direction_state, old, obj_fn=_loss)
  for seed in (1, 2):
    gradient = normal(seed, old.shape)
    z, direction_state = direction.update(
      gradient, direction_state, old, obj_fn=_loss
    )
    updates, state = optimizer.update(gradient, state, old, obj_fn=_loss)
    new = optax.apply_updates(old, updates)
    np.testing.assert_allclose(_norms(new, norm), start, rtol=1e-6)
    # Before the norm is restored, the step has the size of the rate.
    scale = _RATE * _norms(old, norm) / _norms(z, norm)
    moved = np.asarray(old) - scale[:, None, None] * np.asarray(z)
    restored = (start / _norms(moved, norm))[:, None, None] * moved
    np.testing.assert_allclose(new, restored, rtol=1e-4, atol=1e-5)
    old = new


@optax.inject_hyperparams
def _injected(learning_rate):
  return _relative(optax.scale_by_lion(), learning_rate)


def test_a_part_of_a_tree_gets_what_it_gets_alone():
  params, gradients = _tree(0), [_tree(10), _tree(20)]
  partition = optax.partition(
    {'layers': _injected(_RATE), 'rest': optax.sgd(_RATE)},
    lambda p: {name: 'layers' if name == 'layers' else 'rest' for name in p},
  )
  together = run(partition, params, gradients)
  alone = run(
    _injected(_RATE), params['layers'], [g['layers'] for g in gradients]
  )
  for actual, expected in zip(together, alone, strict=True):
    chex.assert_trees_all_close(
      actual.params['layers'], expected.params, rtol=1e-5, atol=1e-6
    )


def test_specs_of_the_masked_part_are_enough():
  transform = merit_optax.keep_matrix_norms(
    weight_dimension_numbers={'layers': _Spec(1, 2)}
  )
  masked = optax.masked(
    transform, {'w': False, 'layers': True, 'qkv': False, 'b': False}
  )
  params, updates = _tree(0), _tree(10)
  actual, _ = masked.update(updates, masked.init(params), params)
  assert jnp.any(actual['layers'] != updates['layers'])
  del actual['layers'], updates['layers']
  chex.assert_trees_all_equal(actual, updates)
  with pytest.raises(ValueError, match='are missing'):
    transform.init(params)


# Norms kept.


def _keep(norm='l2', specs=None):
  transform = merit_optax.keep_matrix_norms(
    norm, weight_dimension_numbers=specs
  )
  return jax.jit(lambda u, w: transform.update(u, transform.init(w), w)[0])


@pytest.mark.parametrize('norm', ['l2', 'max'])
def test_each_matrix_of_every_shape_keeps_its_norm(norm):
  params, updates = _tree(0), _tree(10)
  kept = _keep(norm, _SPECS)(updates, params)
  chex.assert_trees_all_equal(kept['b'], updates['b'])
  order = {'l2': 2, 'max': np.inf}[norm]
  for name in ('w', 'layers', 'qkv'):
    new, old = (
      _matrices(name, x) for x in (params[name] + kept[name], params[name])
    )
    np.testing.assert_allclose(
      *(np.linalg.norm(x, order, axis=1) for x in (new, old)), rtol=1e-6
    )
    # And goes where it was told to.
    aim = _matrices(name, params[name] + updates[name])
    parallel = np.sum(aim * new, 1) / (
      np.linalg.norm(aim, axis=1) * np.linalg.norm(new, axis=1)
    )
    np.testing.assert_allclose(parallel, 1, rtol=1e-6)


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
  sizes = [_norms(x[None], 'l2') for x in (end, start)]
  np.testing.assert_allclose(*sizes, rtol=1e-5)


def test_what_has_no_norm_to_keep_moves_as_told():
  w, u = jnp.ones((2, 3)), 0.1 * normal(0, (2, 3))
  keep = _keep()
  np.testing.assert_array_equal(keep(u, jnp.zeros((2, 3))), u)
  np.testing.assert_array_equal(keep(-w, w), -w)
  tree = [normal(1, shape) for shape in ((), (3,), (0, 3), (2, 0))]
  tree += [None, optax.MaskedNode(), ()]
  chex.assert_trees_all_equal(keep(tree, tree), tree)
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
  if update_dtype == jnp.float32:  # Which holds the step without rounding.
    np.testing.assert_allclose(
      *(_norms(x[None], 'l2') for x in (w + kept, w.astype(jnp.float32))),
      rtol=1e-6,
    )
  new = optax.apply_updates(w, kept)
  assert new.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    *(_norms(x.astype(jnp.float32)[None], 'l2') for x in (new, w)), rtol=1e-3
  )


def test_gradients_pass_through_zeros():
  def f(u):
    transform = merit_optax.scale_by_l2_norm_trust_ratio(ratios=_ALL)
    w = jnp.array([[1.0, 2.0], [0.0, 0.0]])
    z, _ = transform.update(u, transform.init(w), w)
    return jnp.sum(_keep()(z, w))

  gradient = jax.jit(jax.grad(f))(jnp.array([[0.0, 0.0], [0.0, 1.0]]))
  assert jnp.all(jnp.isfinite(gradient))


# What it bounds.


@pytest.mark.parametrize('norm', ['l2', 'max'])
def test_kept_norms_bound_attention_logits_at_any_rate(norm):
  features, heads, head_features = 8, 2, 4
  shape = (features, heads, head_features)
  specs = {name: _Spec(0, (1, 2)) for name in ('query', 'key')}
  params = {'query': normal(0, shape) / 9, 'key': normal(1, shape) / 9}
  x = normal(2, (16, features))
  x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))  # RMS norm

  def largest_logit(params):
    q, k = (jnp.einsum('td,dhk->thk', x, params[n]) for n in ('query', 'key'))
    return merit_optax.attention_statistics(
      q, k, layout='TNH', is_causal=False
    ).max_logit

  def bound(params):
    # |x| = sqrt(D), and a head's kernel stretches by no more than its l2 norm.
    sizes = {
      'l2': [jnp.sqrt(jnp.sum(w * w)) for w in params.values()],
      'max': [
        jnp.sqrt(features * head_features) * jnp.max(jnp.abs(w))
        for w in params.values()
      ],
    }[norm]
    return features * sizes[0] * sizes[1] / jnp.sqrt(head_features)

  def train(last, rate=0.5, steps=50):
    optimizer = optax.chain(
      merit_optax.scale_by_l2_norm_trust_ratio(weight_dimension_numbers=specs),
      optax.scale_by_learning_rate(rate),
      last,
    )

    def step(params, _):
      gradients = jax.grad(lambda p: -jnp.sum(largest_logit(p)))(params)
      updates, _ = optimizer.update(gradients, optimizer.init(params), params)
      return optax.apply_updates(params, updates), None

    return jax.jit(lambda p: jax.lax.scan(step, p, length=steps)[0])(params)

  limit = bound(params)
  keep = merit_optax.keep_matrix_norms(norm, weight_dimension_numbers=specs)
  assert jnp.all(largest_logit(train(keep)) <= limit * 1.0001)
  # Nor is the bound so wide that nothing would break it.
  assert jnp.all(largest_logit(train(keep)) > limit / 100)
  assert jnp.all(largest_logit(train(optax.identity())) > 100 * limit)
