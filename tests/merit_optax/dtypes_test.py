"""dtypes of updates, state and arithmetic, and moments of lower precision."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import enable_x64, normal

_RATE = 0.1
_MIXED = [
  ('float32', 'bfloat16'),
  ('bfloat16', 'float32'),
  ('complex64', 'float32'),
]


def _tree(seed, dtype):
  return {'w': normal(seed, (4, 3), dtype), 'b': normal(seed, (3,), dtype)}


def _dtypes(tree):
  return jax.tree.map(lambda x: jnp.dtype(x.dtype).name, tree)


def _adam(state):
  return optax.tree.get(state, 'ScaleByAdamState')


@pytest.mark.parametrize(
  'params_dtype, gradient_dtype',
  [
    *_MIXED,
    *((dtype, dtype) for dtype in ('bfloat16', 'float16', 'float64')),
    ('bfloat16', 'float16'),
    ('float32', 'float64'),
  ],
)
def test_dtypes_are_those_of_lamb(params_dtype, gradient_dtype):
  with enable_x64():
    params, gradient = _tree(0, params_dtype), _tree(1, gradient_dtype)
    ours, peer = merit_optax.merit(_RATE), optax.lamb(_RATE)
    state, peer_state = ours.init(params), peer.init(params)
    first = _adam(state)
    assert _dtypes(first) == _dtypes(_adam(peer_state))
    for _ in range(2):
      updates, state = jax.eval_shape(ours.update, gradient, state, params)
      expected, peer_state = jax.eval_shape(
        peer.update, gradient, peer_state, params
      )
      assert _dtypes(updates) == _dtypes(expected)
      # The first moment of optax takes the dtype to which it and the gradient
      # promote: twice the memory for bfloat16, and a second compilation. Ours
      # stays as it was made.
      assert _dtypes(_adam(state)) == _dtypes(first)


@pytest.mark.parametrize(
  'params_dtype, gradient_dtype',
  [('bfloat16', 'bfloat16'), ('float16', 'float16'), _MIXED[1], _MIXED[2]],
)
def test_updates_are_right_in_every_dtype(params_dtype, gradient_dtype):
  with enable_x64():
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
  with enable_x64():
    transform = merit_optax.scale_by_max_norm_trust_ratio()
    z, w = jnp.asarray([[3.0]], jnp.float64), jnp.asarray([[0.1]], jnp.float64)
    update, _ = transform.update(z, transform.init(w), w)
    assert abs(float(update[0, 0]) - 0.1) < 1e-15


@pytest.mark.parametrize(
  'build',
  [
    merit_optax.scale_by_adam,
    functools.partial(
      merit_optax.scale_by_adam, bias_correction=True, nu_dtype='float32'
    ),
    merit_optax.scale_by_muon,
  ],
  ids=['adam', 'corrected', 'muon'],
)
@pytest.mark.parametrize(
  'params, gradient, mu_dtype, mu, update',
  [
    ('bfloat16', 'bfloat16', None, 'bfloat16', 'bfloat16'),
    ('bfloat16', 'float32', None, 'bfloat16', 'float32'),
    ('float32', 'float16', None, 'float32', 'float32'),
    ('bfloat16', 'float16', None, 'bfloat16', 'float32'),
    ('float32', 'float32', 'bfloat16', 'bfloat16', 'float32'),
    ('float32', 'bfloat16', 'bfloat16', 'bfloat16', 'bfloat16'),
    ('complex64', 'complex64', None, 'complex64', 'complex64'),
  ],
)
def test_moments_keep_their_dtypes(
  build, params, gradient, mu_dtype, mu, update
):
  transform = build(mu_dtype=mu_dtype)
  state = transform.init(_tree(0, params))
  updates, new = jax.eval_shape(transform.update, _tree(1, gradient), state)
  chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
  for tree, dtype in ((state.mu, mu), (updates, update)):
    assert set(_dtypes(tree).values()) == {dtype}


@pytest.mark.parametrize(
  'make, rate',
  [
    (merit_optax.scale_by_adam, 'b1'),
    (merit_optax.scale_by_muon, 'beta'),
  ],
)
def test_first_moments_that_cannot_hold_an_average_are_refused(make, rate):
  with pytest.raises(ValueError, match='^mu_dtype must be None for complex'):
    make(mu_dtype='float32').init(jnp.ones((2, 3), jnp.complex64))
  with pytest.raises(ValueError, match=f'^{rate} must be at most 0.996'):
    make(**{rate: 0.999}).init(jnp.ones((2, 3), jnp.bfloat16))
