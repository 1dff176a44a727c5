"""The optimizer as a whole: its chain, its arguments, its trees and dtypes."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax

_RATE = 0.1
_NON_DEFAULTS = {
  'b1': {'b1': 0.5},
  'b2': {'b2': 0.5},
  'eps': {'eps': 0.3},
  'eps_root': {'eps_root': 0.3},
  'weight_decay': {'weight_decay': 0.3},
  'mask': {'weight_decay': 0.3, 'mask': lambda p: {'w': False, 'b': True}},
  'mu_dtype': {'mu_dtype': jnp.bfloat16},
  'nu_dtype': {'nu_dtype': jnp.bfloat16},
  # The ratio cancels the correction, but for eps.
  'bias_correction': {'bias_correction': True, 'eps': 0.3},
  'clip_threshold': {'clip_threshold': 0.25},
  'no clip': {'clip_threshold': None},
  'weight': {'ratios': ('weight',)},
  'row': {'ratios': ('row',)},
  'column': {'ratios': ('column',)},
  'trust_ratio_mask': {'trust_ratio_mask': lambda p: {'w': False, 'b': True}},
  'min_norm': {'min_norm': 5.0},
  'weight_dimension_numbers': {
    'weight_dimension_numbers': optax.contrib.MuonDimensionNumbers((), (1,))
  },
}


def _normal(seed, shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _params(dtype=jnp.float32):
  # One below the clip, so that nothing hides the ratio, and one beyond it.
  return {
    'w': _normal(0, (5, 3), dtype) / 4,
    'b': 40 * _normal(1, (4,), dtype),
  }


def _gradients(steps, params, dtype=jnp.float32):
  return [
    {k: _normal(9 + step, v.shape, dtype) for k, v in params.items()}
    for step in range(steps)
  ]


def _run(optimizer, params, gradients):
  """Returns the updates and the state after each step, under jit."""
  update = jax.jit(optimizer.update)
  state = optimizer.init(params)
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    yield updates, state


def _run_standing(optimizer, params, gradients):
  """Yields the updates of each step, parameters left where they are.

  Without jit, which would spend most of its time on compiling.
  """
  state = optimizer.init(params)
  for gradient in gradients:
    updates, state = optimizer.update(gradient, state, params)
    yield updates


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
  params = _params()
  gradients = _gradients(4, params)
  merit = merit_optax.merit(_RATE, **_EVERYTHING)
  actual = list(_run(merit, params, gradients))
  expected = list(_run(chain, params, gradients))
  chex.assert_trees_all_equal(actual, expected)


@functools.cache
def _last_update(**options):
  params = _params()
  optimizer = merit_optax.merit(_RATE, **options)
  *_, last = _run_standing(optimizer, params, _gradients(2, params))
  return last


@pytest.mark.parametrize('name', _NON_DEFAULTS)
def test_every_argument_changes_the_update(name):
  changed = _NON_DEFAULTS[name]
  # Arguments that only act beside another one are compared with it alone.
  beside = {'mask': 'weight_decay', 'bias_correction': 'eps'}.get(name)
  base = {beside: changed[beside]} if beside else {}
  old, new = (jax.tree.leaves(_last_update(**x)) for x in (base, changed))
  assert any(
    not np.allclose(x, y, rtol=1e-4, atol=0)
    for x, y in zip(old, new, strict=True)
  )


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


@pytest.mark.parametrize(
  'rate', [0.5, np.float32(0.5), np.array(0.5), jnp.array(0.5), 0, 2]
)
def test_learning_rate_is_a_factor_of_the_update(rate):
  params = _params()
  gradient = _gradients(1, params)
  (actual,) = _run_standing(merit_optax.merit(rate), params, gradient)
  (unit,) = _run_standing(merit_optax.merit(1.0), params, gradient)
  expected = optax.tree.scale(float(rate), unit)
  chex.assert_trees_all_close(actual, expected, rtol=1e-6)


def test_learning_rate_schedule_counts_steps_from_zero():
  params = _params()
  gradients = _gradients(4, params)

  def schedule(count):
    return 0.1 * (count + 1)

  actual = _run_standing(merit_optax.merit(schedule), params, gradients)
  unit = _run_standing(merit_optax.merit(1.0), params, gradients)
  for step, (x, y) in enumerate(zip(actual, unit, strict=True)):
    expected = optax.tree.scale(0.1 * (step + 1), y)
    chex.assert_trees_all_close(x, expected, rtol=1e-6)


def test_update_goes_against_the_gradient():
  params = {'w': jnp.ones((2, 3))}
  gradient = {'w': jnp.ones((2, 3))}
  ((updates, _),) = _run(merit_optax.merit(_RATE), params, [gradient])
  chex.assert_trees_all_close(updates, {'w': jnp.full((2, 3), -_RATE)})


def test_weight_decay_schedule_counts_steps_from_zero():
  params = _params()
  gradients = _gradients(4, params)

  def decay(step):
    return 0.2 * (step + 1)

  optimizer = merit_optax.merit(_RATE, weight_decay=decay)
  actual = list(_run_standing(optimizer, params, gradients))
  for step, updates in enumerate(actual):
    # With the parameters held, the moments do not see the decay.
    constant = merit_optax.merit(_RATE, weight_decay=decay(step))
    expected = list(_run_standing(constant, params, gradients))[step]
    chex.assert_trees_all_close(updates, expected, rtol=1e-5)


def test_weight_decay_schedules_are_refused_where_optax_ignores_them(
  monkeypatch,
):
  monkeypatch.setattr(optax, '__version__', '0.2.6')
  with pytest.raises(ValueError, match=r'must be a number with optax 0\.2\.6'):
    merit_optax.merit(_RATE, weight_decay=lambda step: 0.1)
  merit_optax.merit(_RATE, weight_decay=0.1)


def test_weight_decay_acts_inside_the_ratio():
  params = {'w': jnp.array([[0.5, -0.25], [0.125, 0.5]])}
  optimizer = merit_optax.merit(_RATE, weight_decay=0.25)
  gradient = {'w': jnp.zeros((2, 2))}
  ((updates, _),) = _run(optimizer, params, [gradient])
  # z is a quarter of w, so that the ratio is 4 and the decay cancels out.
  chex.assert_trees_all_close(updates, {'w': -_RATE * params['w']})


@pytest.mark.parametrize(
  'mask',
  [{'w': True, 'b': False}, lambda p: {k: v.ndim > 1 for k, v in p.items()}],
  ids=['tree', 'function'],
)
def test_mask_says_which_parameters_are_decayed(mask):
  params = _params()
  gradients = _gradients(2, params)
  run = functools.partial(_run, params=params, gradients=gradients)
  optimizers = (
    merit_optax.merit(_RATE, weight_decay=0.5, mask=mask),
    merit_optax.merit(_RATE, weight_decay=0.5),
    merit_optax.merit(_RATE),
  )
  masked, decayed, plain = (list(run(o))[-1][0] for o in optimizers)
  chex.assert_trees_all_equal(masked['w'], decayed['w'])
  chex.assert_trees_all_equal(masked['b'], plain['b'])
  assert not np.allclose(decayed['w'], plain['w'])
  assert not np.allclose(decayed['b'], plain['b'])


@pytest.mark.parametrize(
  'mask',
  [{'w': True, 'b': False}, lambda p: {k: v.ndim > 1 for k, v in p.items()}],
  ids=['tree', 'function'],
)
def test_trust_ratio_mask_leaves_the_others_to_adam(mask):
  params = _params()
  gradient = _gradients(1, params)
  masked = merit_optax.merit(_RATE, trust_ratio_mask=mask, clip_threshold=None)
  (actual,) = _run_standing(masked, params, gradient)
  (scaled,) = _run_standing(merit_optax.merit(_RATE), params, gradient)
  (adam,) = _run_standing(merit_optax.scale_by_adam(), params, gradient)
  chex.assert_trees_all_equal(actual['w'], scaled['w'])
  chex.assert_trees_all_close(actual['b'], -_RATE * adam['b'], rtol=1e-6)


def test_clip_threshold_bounds_the_step_before_the_learning_rate():
  params = _params()
  gradient = _gradients(1, params)
  updates = {
    threshold: next(
      _run_standing(
        merit_optax.merit(_RATE, clip_threshold=threshold),
        params,
        gradient,
      )
    )
    for threshold in (None, 1.0, 0.25)
  }
  for threshold in (1.0, 0.25):
    largest = _RATE * threshold
    clipped = jax.tree.map(
      lambda x, m=largest: jnp.clip(x, -m, m), updates[None]
    )
    chex.assert_trees_all_close(updates[threshold], clipped, rtol=1e-6)
  assert jnp.max(jnp.abs(updates[None]['b'])) > 2 * _RATE


@pytest.mark.parametrize(
  'transform',
  [
    merit_optax.merit(_RATE),
    merit_optax.scale_by_max_norm_trust_ratio(),
  ],
  ids=['merit', 'trust_ratio'],
)
def test_missing_params_raise_the_message_of_optax(transform):
  params = _params()
  peer = optax.scale_by_trust_ratio()
  with pytest.raises(ValueError) as expected:
    peer.update(params, peer.init(params), None)
  with pytest.raises(ValueError) as actual:
    transform.update(params, transform.init(params))
  assert str(actual.value) == str(expected.value)


def test_unknown_extra_arguments_are_ignored():
  params = _params()
  optimizer = merit_optax.merit(_RATE)
  state = optimizer.init(params)
  actual = optimizer.update(params, state, params, value=1.0)
  chex.assert_trees_all_equal(actual, optimizer.update(params, state, params))


_OPTIONS = {
  'defaults': {},
  'decay': {'weight_decay': 0.1},
  'schedules': {'weight_decay': lambda count: 0.1 * count},
  'bias_correction': {'bias_correction': True},
  'dtypes': {'mu_dtype': jnp.bfloat16, 'nu_dtype': jnp.float32},
}


@pytest.mark.parametrize('name', _OPTIONS)
@pytest.mark.parametrize(
  'params_dtype, gradient_dtype',
  [
    (jnp.float32, jnp.float32),
    (jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.float16),
  ],
)
def test_state_keeps_its_types(params_dtype, gradient_dtype, name):
  params = _params(params_dtype)
  (gradient,) = _gradients(1, params, gradient_dtype)
  optimizer = merit_optax.merit(_RATE, **_OPTIONS[name])
  state = optimizer.init(params)
  _, new = jax.eval_shape(optimizer.update, gradient, state, params)
  # Weak types count: a change of them is a second compilation.
  assert jax.tree.map(jax.typeof, state) == jax.tree.map(
    lambda x: jax.core.ShapedArray(x.shape, x.dtype, x.weak_type), new
  )


def test_complex_parameters_keep_their_phase():
  params, gradient = (
    {'w': np.asarray(_normal(i, (3, 4)) + 1j * _normal(i + 2, (3, 4)))}
    for i in (0, 1)
  )
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  ((straight, _),) = _run(optimizer, params, [gradient])
  params, gradient = jax.tree.map(lambda x: 1j * x, (params, gradient))
  ((turned, _),) = _run(optimizer, params, [gradient])
  assert turned['w'].dtype == jnp.complex64
  np.testing.assert_allclose(turned['w'], 1j * straight['w'], rtol=1e-6)
  assert np.max(np.abs(turned['w'])) > 0.5 * _RATE


@pytest.mark.parametrize('empty', [{}, (), [], {'a': {}, 'b': None}], ids=str)
def test_empty_trees_pass_through(empty):
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  state = optimizer.init(empty)
  updates, _ = optimizer.update(empty, state, empty)
  assert updates == empty


@pytest.mark.parametrize(
  'odd',
  [
    None,
    optax.MaskedNode(),
    jnp.zeros(0),
    jnp.zeros((0, 3)),
    jnp.zeros((3, 0)),
    jnp.array(2.0),
    jnp.array(0.0),
    jnp.ones((1, 1)),
  ],
  ids=lambda x: f'{getattr(x, "shape", type(x).__name__)}',
)
def test_odd_leaves_leave_the_others_alone(odd):
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  params = {'odd': odd, 'w': _normal(0, (5, 3))}
  gradient = {'odd': odd, 'w': _normal(1, (5, 3))}
  ((updates, _),) = _run(optimizer, params, [gradient])
  (alone,) = _run_standing(optimizer, params['w'], [gradient['w']])
  chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
  chex.assert_tree_all_finite(updates)
  chex.assert_trees_all_close(updates['w'], alone, rtol=1e-6)


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


def test_state_maps_like_the_parameters():
  params = _params()
  state = merit_optax.merit(_RATE).init(params)
  mapped = optax.tree.map_params(
    merit_optax.merit(_RATE), lambda x: 'moment', state
  )
  names = {'w': 'moment', 'b': 'moment'}
  assert mapped[0].mu == names
  assert mapped[0].nu == names
