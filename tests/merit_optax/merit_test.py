"""The optimizer as a whole: its chain, its arguments, its trees and dtypes."""

import inspect

import chex
import jax
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


_EVERYTHING = {
  'b1': 0.8,
  'b2': 0.7,
  'eps': 0.1,
  'eps_root': 0.2,
  'weight_decay': 0.3,
  'mask': lambda params: {'w': True, 'b': False},
  'mu_dtype': jnp.bfloat16,
  'nu_dtype': jnp.float16,
  'bias_correction': True,
  'clip_threshold': 0.5,
  'ratios': ('row', 'column'),
  'trust_ratio_mask': {'w': True, 'b': False},
  'min_norm': 0.4,
  'weight_dimension_numbers': {
    'w': optax.contrib.MuonDimensionNumbers(1, 0),
    'b': None,
  },
}


def test_every_argument_reaches_its_transform():
  assert _EVERYTHING.keys() == (
    inspect.signature(merit_optax.merit).parameters.keys() - {'learning_rate'}
  )
  ratio = merit_optax.scale_by_max_norm_trust_ratio(
    0.4,
    ratios=('row', 'column'),
    weight_dimension_numbers=_EVERYTHING['weight_dimension_numbers'],
  )
  chain = optax.chain(
    merit_optax.scale_by_adam(
      *(0.8, 0.7, 0.1, 0.2, jnp.bfloat16),
      nu_dtype=jnp.float16,
      bias_correction=True,
    ),
    optax.add_decayed_weights(0.3, {'w': True, 'b': False}),
    optax.masked(ratio, {'w': True, 'b': False}),
    merit_optax.elementwise_clip(0.5),
    optax.scale_by_learning_rate(_RATE),
  )
  merit = merit_optax.merit(_RATE, **_EVERYTHING)
  actual, expected = (
    list(run(optimizer, _params(), _gradients(4)))
    for optimizer in (merit, chain)
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


@pytest.mark.parametrize(
  'ours, theirs',
  [
    (merit_optax.scale_by_adam, optax.scale_by_adam),
    (merit_optax.scale_by_max_norm_trust_ratio, optax.scale_by_trust_ratio),
    (merit_optax.merit, optax.lamb),
  ],
  ids=['adam', 'trust_ratio', 'merit'],
)
def test_positional_arguments_stand_in_the_order_of_optax(ours, theirs):
  ours = inspect.signature(ours).parameters.values()
  theirs = inspect.signature(theirs).parameters.values()
  positional = [p.name for p in ours if p.kind == p.POSITIONAL_OR_KEYWORD]
  assert positional == [
    p.name for p in theirs if p.kind == p.POSITIONAL_OR_KEYWORD
  ]
  assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in ours)


def test_defaults_are_the_authors():
  parameters = inspect.signature(merit_optax.merit).parameters
  defaults = {k: v.default for k, v in parameters.items()}
  assert defaults['b1'] == 0.9
  assert defaults['b2'] == 0.95
  assert defaults['eps'] == 1e-6
  assert defaults['weight_decay'] == 0.0
  assert defaults['clip_threshold'] == 1.0
  assert defaults['min_norm'] == 0.0
  assert not defaults['bias_correction']
  assert set(defaults['ratios']) == {'weight', 'row', 'column'}
  adam = inspect.signature(merit_optax.scale_by_adam).parameters
  for name in ('b1', 'b2', 'eps', 'eps_root'):
    assert adam[name].default == defaults[name]


def test_weight_decay_schedules_are_refused_where_optax_ignores_them(
  monkeypatch,
):
  monkeypatch.setattr(optax, '__version__', '0.2.6')
  with pytest.raises(ValueError, match=r'must be a number with optax 0\.2\.6'):
    merit_optax.merit(_RATE, weight_decay=lambda step: 0.1)
  merit_optax.merit(_RATE, weight_decay=0.1)


@pytest.mark.parametrize(
  'weight, gradient, expected',
  [(2.0, 3.0, -1.0), (0.5, 3.0, -0.5), (-0.5, -1e-3, 0.5), (0.0, 0.0, 0.0)],
)
def test_a_scalar_moves_by_its_own_size(weight, gradient, expected):
  # Its one norm is itself: s z = sign(z) |w|, clipped at 1.
  optimizer = merit_optax.merit(1.0)
  weight, gradient = jnp.array(weight), jnp.array(gradient)
  update, _ = optimizer.update(gradient, optimizer.init(weight), weight)
  np.testing.assert_allclose(update, expected, rtol=1e-6)
  assert update.shape == ()


def test_schedules_count_steps_from_zero():
  def rate(count):
    return 0.1 * (count + 1)

  def decay(count):
    return 0.2 * (count + 1)

  both = merit_optax.merit(rate, weight_decay=decay)
  params, gradients = _params(), _gradients(3)
  state = both.init(params)
  adam = state[0]
  for count, gradient in enumerate(gradients):
    updates, state = both.update(gradient, state, params)
    constant = merit_optax.merit(rate(count), weight_decay=decay(count))
    constant_state = (adam, *constant.init(params)[1:])
    expected, (adam, *_) = constant.update(gradient, constant_state, params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5)


def test_complex_parameters_keep_their_phase():
  params, gradient = (
    {'w': normal(i, (3, 4)) + 1j * normal(i + 2, (3, 4))} for i in (0, 1)
  )
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  (straight,) = run(optimizer, params, [gradient])
  params, gradient = jax.tree.map(lambda x: 1j * x, (params, gradient))
  (turned,) = run(optimizer, params, [gradient])
  straight, turned = straight.updates['w'], turned.updates['w']
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
