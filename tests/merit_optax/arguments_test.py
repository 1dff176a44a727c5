"""Bad arguments are named when a transform is built; good ones pass."""

import fractions
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import merit_optax

_NAN, _INF = float('nan'), float('inf')
_NO_NUMBERS = (
  *('0.5', True, False, [0.5], 1j, object, _NAN, _INF, -_INF),
  *(np.array([0.5]), np.array(_NAN), np.float32(_INF), np.bool_(True)),
  *(jnp.array([0.5, 0.5]), jnp.array(_NAN), jnp.array(True), jnp.array(1j)),
  *(fractions.Fraction(1, 2), 10**400),
)
_NEGATIVE = (*_NO_NUMBERS, None, -1e-9, -1, jnp.array(-1.0))
_NOT_POSITIVE = (*_NEGATIVE, 0, 0.0, np.uint8(0))
_NO_RATES = (*_NEGATIVE, 1, 1.0, 1.5)
_NO_DECAYS = tuple(v for v in _NEGATIVE if v is not object)
_NO_SCHEDULES = tuple(v for v in _NO_NUMBERS if v is not object)
_NO_DTYPES = (
  *('nonsense', '', 3, True, [], jnp.int32, 'int8', bool, object),
  *('complex64', jnp.float8_e4m3fn),
)
_NO_PATTERNS = (3, ['a'], {'(': 1}, {3: 1}, {b'a': 1})
_NO_RATIOS = ('row', (), [], None, 3, ('rows',), ('row', 1), {'row', 'l2'})


def _merit(**kwargs):
  return merit_optax.merit(**{'learning_rate': 0.1, **kwargs})


_adam = merit_optax.scale_by_adam
_ratio = merit_optax.scale_by_max_norm_trust_ratio
_clip = merit_optax.elementwise_clip
_l2_ratio = merit_optax.scale_by_l2_norm_trust_ratio
_keep = merit_optax.keep_matrix_norms
_acceleration = merit_optax.add_acceleration
_muon = merit_optax.scale_by_muon
_global_clip = merit_optax.clip_by_global_norm
_HEADS = {'q': merit_optax.AttentionHeads(-2)}


def _hyperball(**kwargs):
  defaults = {'direction': optax.identity(), 'learning_rate': 0.1}
  return merit_optax.hyperball(**{**defaults, **kwargs})


def _muon_hyperball(**kwargs):
  return merit_optax.muon_hyperball(**{'learning_rate': 0.1, **kwargs})


def _adam_hyperball(**kwargs):
  return merit_optax.adam_hyperball(**{'learning_rate': 0.1, **kwargs})


def _starting_rate(**kwargs):
  return merit_optax.starting_learning_rate(
    **{'optimizer': 'merit', 'steps': 400, **kwargs}
  )


def _lmo(**kwargs):
  return merit_optax.scale_by_lmo(**{'norm': 'row', **kwargs})


def _shape(**kwargs):
  return merit_optax.scale_by_shape(**{'factor': max, **kwargs})


def _qk_clip(**kwargs):
  return merit_optax.qk_clip(
    **{'threshold': 1.0, 'query': _HEADS, 'key': _HEADS, **kwargs}
  )


def _statistics(**kwargs):
  return merit_optax.merit_statistics(**{'learning_rate': 0.1, **kwargs})


def _attention(**kwargs):
  x = jnp.ones((1, 2, 3, 4))
  return merit_optax.attention_statistics(**{'query': x, 'key': x, **kwargs})


def _flax(**kwargs):
  params = {'kernel': jnp.ones((2, 2))}
  return merit_optax.flax_dimension_numbers(**{'params': params, **kwargs})


_FUNCTIONS = {
  'merit': _merit,
  'merit_statistics': _statistics,
  'scale_by_adam': _adam,
  'scale_by_max_norm_trust_ratio': _ratio,
  'scale_by_l2_norm_trust_ratio': _l2_ratio,
  'elementwise_clip': _clip,
  'keep_matrix_norms': _keep,
  'add_acceleration': _acceleration,
  'scale_by_lmo': _lmo,
  'scale_by_muon': _muon,
  'clip_by_global_norm': _global_clip,
  'hyperball': _hyperball,
  'muon_hyperball': _muon_hyperball,
  'adam_hyperball': _adam_hyperball,
  'starting_learning_rate': _starting_rate,
  'scale_by_shape': _shape,
  'qk_clip': _qk_clip,
  'attention_statistics': _attention,
  'flax_dimension_numbers': _flax,
}

_NO_COEFFICIENTS = (
  *('keller', '', 3, None, (1, 2), (1, 2, 'a'), [[1, 2]], (), [()]),
  *((1.0, 2.0, _NAN), ((1, 2, 3), (1, 2))),
)
_NO_STEPS = (0, -1, 5.0, '5', True)
_NO_RADII = ('first', None, 1.0, ['initial'])
_HYPERBALLS = (_muon_hyperball, _adam_hyperball)
_WITH_MUON = (_muon, _muon_hyperball)
_BAD_OF_MUON = {
  'ns_coeffs': _NO_COEFFICIENTS,
  'ns_steps': _NO_STEPS,
  'ns_dtype': (*_NO_DTYPES, 'float64', 'float16'),
  'beta': _NO_RATES,
  'mu_dtype': _NO_DTYPES,
  'mesh_axes': (3, True, ('fsdp', 3), {'fsdp'}),
}
_BAD_OF_HYPERBALLS = {
  'learning_rate': _NO_SCHEDULES,
  'adam_learning_rate': tuple(v for v in _NO_SCHEDULES if v is not None),
  'adam_weight_decay': _NO_DECAYS,
  'radius': _NO_RADII,
  'hidden': ('(', ['kernel', '[']),
}
_WITH_ADAM = (_merit, _statistics, _adam)
_BAD_OF_MERIT = {
  'learning_rate': _NO_SCHEDULES,
  'weight_decay': _NO_DECAYS,
  'clip_threshold': [v for v in _NOT_POSITIVE if v is not None],
  'min_norm': _NEGATIVE,
  'ratios': _NO_RATIOS,
}
_BAD_OF_RATIOS = {
  'min_norm': _NEGATIVE,
  'trust_coefficient': _NOT_POSITIVE,
  'eps': _NEGATIVE,
  'ratios': _NO_RATIOS,
  'min_ratio': [v for v in _NOT_POSITIVE if v is not None],
  'max_ratio': [v for v in _NOT_POSITIVE if v is not None],
}
_BAD = [
  *((f, *x) for f in (_merit, _statistics) for x in _BAD_OF_MERIT.items()),
  *((f, name, _NO_RATES) for f in _WITH_ADAM for name in ('b1', 'b2')),
  *((f, name, _NEGATIVE) for f in _WITH_ADAM for name in ('eps', 'eps_root')),
  *(
    (f, name, _NO_DTYPES)
    for f in _WITH_ADAM
    for name in ('mu_dtype', 'nu_dtype')
  ),
  *((f, *x) for f in (_ratio, _l2_ratio) for x in _BAD_OF_RATIOS.items()),
  (_clip, 'max_delta', _NOT_POSITIVE),
  (_keep, 'norm', ('l1', 2, None, ['l2'])),
  (_keep, 'radius', _NO_RADII),
  (_global_clip, 'max_norm', _NOT_POSITIVE),
  *((f, *x) for f in _WITH_MUON for x in _BAD_OF_MUON.items()),
  (_muon, 'eps', _NEGATIVE),
  (_hyperball, 'direction', (None, optax.sgd, 0.1)),
  (_hyperball, 'learning_rate', _NO_SCHEDULES),
  (_hyperball, 'radius', _NO_RADII),
  *((f, *x) for f in _HYPERBALLS for x in _BAD_OF_HYPERBALLS.items()),
  *((_muon_hyperball, name, _NO_RATES) for name in ('adam_b1', 'adam_b2')),
  (_muon_hyperball, 'adam_eps', _NEGATIVE),
  *((_adam_hyperball, name, _NO_RATES) for name in ('b1', 'b2')),
  (_adam_hyperball, 'eps', _NEGATIVE),
  (_adam_hyperball, 'mu_dtype', _NO_DTYPES),
  (_starting_rate, 'optimizer', ('adamw', '', None, 3, 'muon-hyperball')),
  (_starting_rate, 'steps', (0, -1, 400.0, '400', None, True)),
  (_acceleration, 'decay', _NO_RATES),
  (_acceleration, 'coefficient', _NO_NUMBERS),
  (_acceleration, 'mu_dtype', _NO_DTYPES),
  (_lmo, 'norm', ('l2', 2, None, ['row'])),
  (_lmo, 'eps', _NEGATIVE),
  (_shape, 'factor', (None, 0.2, 'max')),
  (_qk_clip, 'threshold', _NOT_POSITIVE),
  (_qk_clip, 'query', (*_NO_PATTERNS, {}, None)),
  (_qk_clip, 'key', (*_NO_PATTERNS, {}, None)),
  (_qk_clip, 'num_key_heads', (0, -1, 2.0, '2', True)),
  (_attention, 'layout', ('BTN', 3, None, tuple('BTNH'))),
  (_attention, 'scale', tuple(v for v in _NO_NUMBERS if v is not object)),
  (_flax, 'stacked', _NO_PATTERNS),
  (_flax, 'overrides', _NO_PATTERNS),
]
_RATES = (0, 0.0, 0.9, 1 - 1e-9, np.float32(0.5), np.float64(0.5), np.int64(0))
_NUMBERS = (
  *(0, 0.0, -0.0, 1e-30, 1, 1e30, np.float32(2), np.int32(2)),
  *(np.array(2), ml_dtypes.bfloat16(0.5)),
)
_POSITIVE = (1e-30, 1, 1e30, np.float32(2), np.int32(2))
_DTYPES = (None, 'float32', 'f4', float, jnp.bfloat16, np.dtype('float16'))
_RATIOS = (
  ('row',),
  ['weight', 'column'],
  {'row', 'column'},
  frozenset({'weight'}),
  ('column', 'row', 'weight'),
  ('row', 'row'),
)
_GOOD = [
  (
    _merit,
    'learning_rate',
    (*_NUMBERS, -0.1, optax.cosine_decay_schedule(1, 9)),
  ),
  (_merit, 'weight_decay', (*_NUMBERS, optax.constant_schedule(0.1))),
  (_merit, 'clip_threshold', (*_POSITIVE, None)),
  (_merit, 'mask', (None, True, {'w': True}, lambda tree: tree)),
  (_merit, 'bias_correction', (True, False)),
  (_merit, 'min_norm', _NUMBERS),
  (_merit, 'ratios', _RATIOS),
  *((f, name, _RATES) for f in (_merit, _adam) for name in ('b1', 'b2')),
  *(
    (f, name, _NUMBERS) for f in (_merit, _adam) for name in ('eps', 'eps_root')
  ),
  *(
    (f, name, _DTYPES)
    for f in (_merit, _adam)
    for name in ('mu_dtype', 'nu_dtype')
  ),
  (_ratio, 'min_norm', _NUMBERS),
  (_ratio, 'trust_coefficient', _POSITIVE),
  (_ratio, 'eps', _NUMBERS),
  (_ratio, 'ratios', _RATIOS),
  (_ratio, 'min_ratio', (*_POSITIVE, None)),
  (_l2_ratio, 'max_ratio', (*_POSITIVE, None)),
  (_l2_ratio, 'calibrate', (True, False)),
  (_acceleration, 'decay', _RATES),
  (_acceleration, 'coefficient', (*_NUMBERS, -0.1, None)),
  (_acceleration, 'mu_dtype', _DTYPES),
  (
    _muon,
    'ns_coeffs',
    (
      'jordan',
      'dion',
      'polar_express',
      (3, -4.0, 2),
      ((1, 2, 3),) * 2,
      [[1, 2, 3]],
    ),
  ),
  (_muon, 'ns_steps', (1, 5, np.int32(9), None)),
  (_muon, 'ns_dtype', (None, 'float32', jnp.bfloat16, np.float32)),
  (_muon, 'beta', _RATES),
  (_muon, 'mu_dtype', _DTYPES),
  (_muon, 'mesh_axes', ('auto', None, 'x', ('x', 'y'), ['x'], ())),
  (_keep, 'radius', ('current', 'initial')),
  (
    _muon_hyperball,
    'hidden',
    (None, 'kernel', ['a', 'b'], {'w': True}, lambda tree: tree),
  ),
  (_global_clip, 'max_norm', _POSITIVE),
  (_lmo, 'norm', ('max', 'row', 'column', 'rms')),
  (_lmo, 'eps', _NUMBERS),
  (_shape, 'factor', (max, lambda m, n: (m / n) ** 0.5)),
  (_clip, 'max_delta', _POSITIVE),
]
_NUMERIC = [case[:2] for case in _GOOD if 1e30 in case[2] or case[2] is _RATES]


def _name(build):
  return next(name for name, f in _FUNCTIONS.items() if f is build)


def _ids(cases):
  return [f'{_name(build)}-{name}' for build, name, *_ in cases]


@pytest.mark.parametrize('build, name, values', _BAD, ids=_ids(_BAD))
def test_bad_values_are_named(build, name, values):
  for value in values:
    with pytest.raises(ValueError) as error:
      build(**{name: value})
    # The name first: "eps" is a part of "eps_root".
    assert str(error.value).startswith(f'{name} must ')
    given = value
    if values is _NO_PATTERNS and isinstance(value, dict):
      (given,) = value
    assert f'got {given!r}' in str(error.value)


@pytest.mark.parametrize('build, name, values', _GOOD, ids=_ids(_GOOD))
def test_good_values_pass(build, name, values):
  for value in values:
    assert isinstance(build(**{name: value}), optax.GradientTransformation), (
      value
    )


@pytest.mark.parametrize('build, name', _NUMERIC, ids=_ids(_NUMERIC))
def test_arrays_and_tracers_pass_unread(build, name):
  params = {'w': jnp.full((2, 3), 0.5)}

  def update(value):
    optimizer = build(**{name: value})
    return optimizer.update(params, optimizer.init(params), params)[0]

  expected = update(0.25)
  for array in (jnp.array(0.25), np.array(0.25), np.float32(0.25)):
    actual = update(array)['w']
    np.testing.assert_allclose(actual, expected['w'], rtol=1e-5)
  actual = jax.jit(update)(0.25)['w']
  np.testing.assert_allclose(actual, expected['w'], rtol=1e-5)


def test_every_argument_of_every_function_is_checked():
  # Switches are any truth value. Masks and dimension numbers are held against
  # the parameters, which are not there yet. Arrays have tests of their own, and
  # so has what these take.
  switches = {'bias_correction', 'nesterov', 'is_causal', 'calibrate'}
  fitted = {
    *('mask', 'trust_ratio_mask', 'weight_dimension_numbers'),
    'adam_weight_decay_mask',
  }
  arrays = {'params', 'updates'}
  elsewhere = {
    *('describe', 'describe_partition', 'update_statistics'),
    *('describe_hyperball', 'hidden_matrices'),
    *('AttentionHeads', 'AttentionStatistics'),
    *('attention_statistics-query', 'attention_statistics-key'),
  }
  unchecked = {
    f'{function}-{name}'
    for function in set(merit_optax.__all__) - elsewhere
    for name in inspect.signature(getattr(merit_optax, function)).parameters
    if name not in switches | fitted | arrays
  } - {*_ids(_BAD), *elsewhere}
  assert not unchecked


def test_messages_say_what_is_accepted():
  with pytest.raises(ValueError) as error:
    merit_optax.merit(0.1, ratios=('diagonal',))
  for ratio in ('weight', 'row', 'column'):
    assert repr(ratio) in str(error.value)
  with pytest.raises(ValueError, match='finite number or a schedule'):
    merit_optax.merit(None)
  with pytest.raises(ValueError, match='finite number >= 0 or a schedule'):
    merit_optax.merit(0.1, weight_decay=-0.1)
  with pytest.raises(ValueError, match=r'number in \[0, 1\)'):
    merit_optax.merit(0.1, b1=1.0)


@pytest.mark.parametrize('build', [_ratio, _l2_ratio])
def test_bounds_are_in_order(build):
  for bounds in ((2.0, 1.0), (jnp.array(2.0), np.float32(1))):
    with pytest.raises(ValueError, match='^max_ratio must .* below min_ratio'):
      build(min_ratio=bounds[0], max_ratio=bounds[1])
  for bounds in ((1, 1), (0.5, jnp.array(0.5)), (None, 1e-9), (1e9, None)):
    build(min_ratio=bounds[0], max_ratio=bounds[1])
  array = jnp.array(0.5)
  jax.jit(lambda x: build(min_ratio=x, max_ratio=array).init({}))(2.0)
  jax.jit(lambda x: build(min_ratio=array, max_ratio=x).init({}))(0.1)


@pytest.mark.parametrize('ratios', [[['row']], np.array(['row', 'none'])])
def test_ratios_that_cannot_be_hashed_or_compared_are_named(ratios):
  with pytest.raises(ValueError, match='ratios must hold'):
    merit_optax.merit(0.1, ratios=ratios)


def test_numbers_of_other_kinds_are_read():
  merit_optax.merit(np.float16(0.5), ratios=np.array(['row']))
  for one in (np.uint8(1), jnp.uint8(1)):
    clip = merit_optax.elementwise_clip(one)
    clipped, _ = clip.update(jnp.array([-3.0, 0.5, 3.0]), clip.init(None))
    np.testing.assert_array_equal(clipped, [-1.0, 0.5, 1.0])
  clip = merit_optax.elementwise_clip(10**10)  # Beyond int32.
  clipped, _ = clip.update(jnp.array([-3.0]), clip.init(None))
  np.testing.assert_array_equal(clipped, [-3.0])


def test_types_that_are_taken_for_schedules_are_told():
  build = optax.inject_hyperparams(merit_optax.merit)
  with pytest.raises(ValueError, match="name 'mu_dtype' in static_args"):
    build(0.1, mu_dtype=jnp.bfloat16).init({'w': jnp.ones((2, 3))})


def test_what_patterns_stand_for_is_checked():
  for axes in (1.7, True, (0.5,), '1', None):
    with pytest.raises(ValueError, match=r"^stacked\['kernel'\] must be"):
      _flax(stacked={'kernel': axes})
  for spec in (((0,), (1,)), 1, 'row'):
    with pytest.raises(ValueError, match=r"^overrides\['kernel'\] must be"):
      _flax(overrides={'kernel': spec})


def test_a_negative_rate_climbs():
  params = {'w': jnp.full((2, 3), 0.5)}
  up, down = (
    optimizer.update(params, optimizer.init(params), params)[0]['w']
    for optimizer in (merit_optax.merit(-0.1), merit_optax.merit(0.1))
  )
  np.testing.assert_array_equal(up, -down)


# Masks.

_PARAMS = {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}


def _matrices(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


@pytest.mark.parametrize('name', ['mask', 'trust_ratio_mask'])
@pytest.mark.parametrize(
  'mask', [False, True, 1.0, {'w': 1, 'b': False}, lambda _: 0.5]
)
def test_what_cannot_be_a_mask_is_named_by_init(name, mask):
  optimizer = merit_optax.merit(0.1, **{name: mask})
  with pytest.raises(ValueError, match=f'^{name} must be a tree of booleans'):
    optimizer.init(_PARAMS)
  with pytest.raises(ValueError, match=f'^{name} must be a tree of booleans'):
    merit_optax.describe(_PARAMS, **{name: mask})


@pytest.mark.parametrize('name', ['mask', 'trust_ratio_mask'])
def test_masks_that_are_taken_for_schedules_are_refused(name):
  build = optax.inject_hyperparams(merit_optax.merit)
  for params in (_PARAMS, {'w': jnp.ones((2, 3))}, jnp.ones((2, 3))):
    with pytest.raises(ValueError, match=f"name '{name}' in static_args"):
      build(0.1, **{name: _matrices}).init(params)
  build = optax.inject_hyperparams(merit_optax.merit, static_args=name)
  injected = build(0.1, weight_decay=0.1, **{name: _matrices})
  plain = merit_optax.merit(0.1, weight_decay=0.1, **{name: _matrices})
  for actual, expected in zip(
    *(
      jax.tree.leaves(x.update(_PARAMS, x.init(_PARAMS), _PARAMS)[0])
      for x in (injected, plain)
    ),
    strict=True,
  ):
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize('mask', [lambda _: True, {'w': np.True_, 'b': False}])
def test_masks_of_other_forms_pass(mask):
  merit_optax.merit(0.1, mask=mask, trust_ratio_mask=mask).init(_PARAMS)
  alone = jnp.ones((2, 3))
  merit_optax.merit(0.1, trust_ratio_mask=lambda _: False).init(alone)


def test_dimension_numbers_that_are_taken_for_a_schedule_are_refused():
  specs = merit_optax.flax_dimension_numbers
  build = optax.inject_hyperparams(merit_optax.merit)
  with pytest.raises(ValueError, match="'weight_dimension_numbers' in static"):
    build(0.1, weight_dimension_numbers=specs).init(_PARAMS)


def test_only_numbers_that_were_rounded_get_the_hint():
  with pytest.raises(ValueError, match='^b2 must be .* hyperparam_dtype'):
    _adam(b2=jnp.array(0.999, jnp.bfloat16))
  with pytest.raises(ValueError, match='^b2 must be') as error:
    _adam(b2=jnp.array(True))
  assert 'hyperparam_dtype' not in str(error.value)
