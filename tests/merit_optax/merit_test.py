"""The optimizer as a whole: its chain, its arguments, its trees and dtypes."""

import inspect

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run

_RATE = 0.1


def _params():
  # One below the clip, so that nothing hides the ratio, and one beyond it.
  return {'w': normal(0, (5, 3)) / 4, 'b': 40 * normal(1, (4,))}


def _gradients(steps):
  return [
    {'w': normal(9 + step, (5, 3)), 'b': normal(99 + step, (4,))}
    for step in range(steps)
  ]


def _updates(optimizer, steps=4):
  return [x.updates for x in run(optimizer, _params(), _gradients(steps))]


def test_every_argument_reaches_its_transform():
  adam = {
    **{'b1': 0.8, 'b2': 0.7, 'eps': 0.1, 'eps_root': 0.2},
    **{'mu_dtype': 'bfloat16', 'nu_dtype': 'float16', 'bias_correction': True},
  }
  ratio = {
    'ratios': ('row', 'column'),
    'min_norm': 0.4,
    'weight_dimension_numbers': {
      'w': optax.contrib.MuonDimensionNumbers(1, 0),
      'b': None,
    },
  }
  others = {
    'weight_decay': 0.3,
    'mask': lambda params: {'w': True, 'b': False},
    'clip_threshold': 0.5,
    'trust_ratio_mask': {'w': True, 'b': False},
  }
  everything = adam | ratio | others
  assert everything.keys() == (
    inspect.signature(merit_optax.merit).parameters.keys() - {'learning_rate'}
  )
  chain = optax.chain(
    merit_optax.scale_by_adam(**adam),
    optax.add_decayed_weights(0.3, {'w': True, 'b': False}),
    optax.masked(
      merit_optax.scale_by_max_norm_trust_ratio(**ratio),
      {'w': True, 'b': False},
    ),
    merit_optax.elementwise_clip(0.5),
    optax.scale_by_learning_rate(_RATE),
  )
  actual, expected = (
    list(run(optimizer, _params(), _gradients(4)))
    for optimizer in (merit_optax.merit(_RATE, **everything), chain)
  )
  chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize(
  'settings, clip',
  [
    ({}, merit_optax.elementwise_clip()),
    ({'clip_threshold': None}, optax.identity()),
  ],
)
def test_defaults_are_those_of_the_transforms(settings, clip):
  chain = optax.chain(
    merit_optax.scale_by_adam(),
    merit_optax.scale_by_max_norm_trust_ratio(),
    clip,
    optax.scale_by_learning_rate(_RATE),
  )
  merit = merit_optax.merit(_RATE, **settings)
  chex.assert_trees_all_equal(_updates(merit), _updates(chain))


def test_weight_decay_schedules_are_refused_where_optax_ignores_them(
  monkeypatch,
):
  monkeypatch.setattr(optax, '__version__', '0.2.6')
  with pytest.raises(ValueError, match=r'must be a number with optax 0\.2\.6'):
    merit_optax.merit(_RATE, weight_decay=lambda step: 0.1)
  merit_optax.merit(_RATE, weight_decay=0.1)


def test_schedules_count_steps_from_zero():
  rates, decays = np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.4, 0.6])
  both = merit_optax.merit(
    jnp.asarray(rates).__getitem__,
    weight_decay=jnp.asarray(decays).__getitem__,
  )
  params, gradients = _params(), _gradients(3)
  state = both.init(params)
  for rate, decay, gradient in zip(rates, decays, gradients, strict=True):
    constant = merit_optax.merit(rate, weight_decay=decay)
    constant_state = (state[0], *constant.init(params)[1:])
    expected, _ = constant.update(gradient, constant_state, params)
    updates, state = both.update(gradient, state, params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5)


def test_complex_parameters_keep_their_phase():
  params, gradient = normal(0, (2, 3, 4), jnp.complex64)
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  (straight,) = run(optimizer, params, [gradient])
  (turned,) = run(optimizer, 1j * params, [1j * gradient])
  straight, turned = straight.updates, turned.updates
  assert turned.dtype == jnp.complex64
  np.testing.assert_allclose(turned, 1j * straight, rtol=1e-6)
  assert np.max(np.abs(turned)) > 0.5 * _RATE


@pytest.mark.parametrize('empty', [{}, (), [], {'a': {}, 'b': None}], ids=str)
def test_empty_trees_pass_through(empty):
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  updates, _ = optimizer.update(empty, optimizer.init(empty), empty)
  assert updates == empty


def test_odd_leaves_leave_the_others_alone():
  odd = {
    'none': None,
    'masked': optax.MaskedNode(),
    'empty': jnp.zeros(0),
    'no_rows': jnp.zeros((0, 3)),
    'no_columns': jnp.zeros((3, 0)),
    'scalar': jnp.array(2.0),
    'zero': jnp.array(0.0),
    'one': jnp.ones((1, 1)),
  }
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  params, gradient = odd | _params(), odd | _gradients(1)[0]
  (step,) = run(optimizer, params, [gradient])
  (alone,) = run(optimizer, _params(), _gradients(1))
  chex.assert_trees_all_equal_shapes_and_dtypes(step.updates, params)
  chex.assert_tree_all_finite(step.updates)
  for name, expected in alone.updates.items():
    np.testing.assert_allclose(step.updates[name], expected, rtol=1e-6)
