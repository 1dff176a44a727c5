"""Bad arguments are named when a transform is built; good ones pass."""

import inspect

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import call, transforms

_NAN, _INF = float('nan'), float('inf')
_NO_NUMBERS = (
  *('0.5', True, [0.5], 1j, object, jnp.float32, _NAN, -_INF, 10**400),
  *(np.array([0.5]), np.float32(_INF), np.bool_(True)),
  *(jnp.array([0.5, 0.5]), jnp.array(_NAN), jnp.array(True), jnp.array(1j)),
)
_NEGATIVE = (*_NO_NUMBERS, None, -1e-9, jnp.array(-1.0))
_NOT_POSITIVE = (*_NEGATIVE, 0, np.uint8(0))
_NO_RATES = (*_NEGATIVE, 1, 1.5)
_NO_DTYPES = ('nonsense', '', 3, True, [], 'int8', object, 'complex64')
_NO_DTYPES += (jnp.float8_e4m3fn,)
_NO_PATTERNS = (3, ['a'], {'(': 1}, {3: 1})
_NO_RATIOS = ('row', (), None, 3, ('rows',), ('row', 1), [['row']])
_NO_COEFFICIENTS = (
  *('keller', 3, None, (1, 2), (1, 2, 'a'), [[1, 2]], (), [()]),
  *((1.0, 2.0, _NAN), ((1, 2, 3), (1, 2))),
)
_SWITCHES = (*('bias_correction', 'nesterov', 'calibrate', 'is_causal'),)
_NOT_POSITIVE_OR_NONE = [v for v in _NOT_POSITIVE if v is not None]
# By the name of the argument, in whatever function.
_BAD = {
  'learning_rate': _NO_NUMBERS,
  'weight_decay': _NEGATIVE,
  **dict.fromkeys(['b1', 'b2', 'beta'], _NO_RATES),
  **dict.fromkeys(['eps', 'eps_root', 'min_norm'], _NEGATIVE),
  **dict.fromkeys(['mu_dtype', 'nu_dtype'], _NO_DTYPES),
  **dict.fromkeys(
    ['trust_coefficient', 'max_delta', 'threshold'], _NOT_POSITIVE
  ),
  **dict.fromkeys(
    ['clip_threshold', 'min_ratio', 'max_ratio'], _NOT_POSITIVE_OR_NONE
  ),
  **dict.fromkeys(_SWITCHES, ('no', None, 1)),
  'ratios': _NO_RATIOS,
  'ns_coeffs': _NO_COEFFICIENTS,
  'ns_steps': (0, 5.0, '5', True),
  'ns_dtype': (*_NO_DTYPES, 'float64'),
  'shardings': (3, True, 'fsdp', object()),
  'hidden': ('(', '['),
  'direction': (None, optax.sgd, 0.1),
  'others': (optax.sgd, 0.1),
  'optimizer': ('adamw', None, 3, 'muon-hyperball'),
  'steps': (0, 400.0, '400', None, True),
  'width': (0, 64.0, '64', True),
  'norm': ('l1', 2, None, ['l2']),
  'factor': (None, 0.2, 'max'),
  **dict.fromkeys(['qk_clip-query', 'qk_clip-key'], (*_NO_PATTERNS, {}, None)),
  'num_key_heads': (0, 2.0, '2', True, jnp.ones((), int)),
  'layout': ('', 'BTN', 'BBTNH', 'btnh', 'BTNK', 3, None, tuple('BTNH')),
  'scale': _NO_NUMBERS,
  **dict.fromkeys(['stacked', 'overrides', 'fused'], _NO_PATTERNS),
}
_RATES = (0, 0.9, 1 - 1e-9, np.float32(0.5), np.int64(0))
_NUMBERS = (0, 1e-30, 1e30, np.float32(2), np.array(2), ml_dtypes.bfloat16(0.5))
_POSITIVE = (1e-30, 1, 1e30, np.int32(2))
_GOOD_NUMBERS = {
  'learning_rate': (*_NUMBERS, -0.1),
  **dict.fromkeys(['weight_decay', 'min_norm', 'eps', 'eps_root'], _NUMBERS),
  **dict.fromkeys(['b1', 'b2', 'beta'], _RATES),
  **dict.fromkeys(['clip_threshold', 'max_delta'], _POSITIVE),
  **dict.fromkeys(['trust_coefficient', 'min_ratio', 'max_ratio'], _POSITIVE),
}
_GOOD = {
  'learning_rate': (optax.cosine_decay_schedule(1, 9),),
  'weight_decay': (optax.constant_schedule(0.1),),
  **dict.fromkeys(['clip_threshold', 'min_ratio', 'max_ratio'], (None,)),
  **dict.fromkeys(_SWITCHES, (True, np.False_)),
  'ratios': (
    *(('row',), ['weight', 'column'], {'row', 'column'}, ('row', 'row')),
    np.array(['row']),
  ),
  **dict.fromkeys(
    ['mu_dtype', 'nu_dtype'],
    (None, 'float32', float, jnp.bfloat16, np.dtype('float16')),
  ),
  'ns_coeffs': ('jordan', 'dion', 'polar_express', (3, -4.0, 2), [[1, 2, 3]]),
  'ns_steps': (1, np.int32(9), None),
  'ns_dtype': (None, 'float32', jnp.bfloat16, 'float16'),
  'shardings': (None, P('x'), {'w': P()}, [P()], lambda params: P()),
  'hidden': (None, 'kernel', ['a', 'b'], {'w': True}, lambda tree: tree),
}
# What the others take has tests of its own.
_FUNCTIONS = sorted(
  {name for name in merit_optax.__all__ if name.islower()}
  - {'describe', 'hidden_matrices', 'state_shardings', 'update_statistics'}
)
_TRANSFORMS = transforms()


def _each(table, functions):
  """Returns tests for each argument of functions that a table has values of."""
  return [
    pytest.param(function, name, table[key], id=f'{function}-{name}')
    for function in functions
    for name in inspect.signature(getattr(merit_optax, function)).parameters
    for key in (name, f'{function}-{name}')
    if key in table
  ]


@pytest.mark.parametrize('function, name, values', _each(_BAD, _FUNCTIONS))
def test_bad_values_are_named(function, name, values):
  for value in values:
    with pytest.raises(ValueError) as error:
      call(function, **{name: value})
    # The name first: "eps" is a part of "eps_root".
    assert str(error.value).startswith(f'{name} must ')
    given = value  # Of a mapping, its pattern.
    if isinstance(value, dict) and value:
      (given,) = value
    assert f'got {given!r}' in str(error.value)


@pytest.mark.parametrize(
  'function, name, values',
  _each(_GOOD, _TRANSFORMS) + _each(_GOOD_NUMBERS, _TRANSFORMS),
)
def test_good_values_pass(function, name, values):
  for value in values:
    built = call(function, **{name: value})
    assert isinstance(built, optax.GradientTransformation), value


@pytest.mark.parametrize(
  'function, name, values',
  _each(
    _GOOD_NUMBERS,
    ('merit', 'scale_by_l2_norm_trust_ratio', 'scale_by_adam'),
  ),
)
def test_arrays_and_tracers_pass_unread(function, name, values):
  params = {'w': jnp.full((2, 3), 0.5)}

  def update(value):
    optimizer = call(function, **{name: value})
    return optimizer.update(params, optimizer.init(params), params)[0]

  del values
  expected = update(0.25)
  for actual in (update(jnp.array(0.25)), jax.jit(update)(0.25)):
    np.testing.assert_allclose(actual['w'], expected['w'], rtol=1e-5)


def test_every_argument_of_every_function_is_checked():
  # Masks and dimension numbers are held against the parameters, which are not
  # there yet. Arrays have tests of their own.
  fitted = {
    *('mask', 'trust_ratio_mask', 'weight_dimension_numbers'),
    'params',
    # Of merit.
    'settings',
  }
  unchecked = {
    f'{function}-{name}'
    for function in _FUNCTIONS
    for name in inspect.signature(getattr(merit_optax, function)).parameters
    if not {name, f'{function}-{name}'} & (fitted | _BAD.keys())
  }
  assert unchecked == {'attention_statistics-query', 'attention_statistics-key'}


def test_bounds_are_in_order():
  build = merit_optax.scale_by_max_norm_trust_ratio
  for bounds in ((2.0, 1.0), (jnp.array(2.0), np.float32(1))):
    with pytest.raises(ValueError, match='^max_ratio must .* below min_ratio'):
      build(min_ratio=bounds[0], max_ratio=bounds[1])
  for bounds in ((1, 1), (0.5, jnp.array(0.5)), (None, 1e-9), (1e9, None)):
    build(min_ratio=bounds[0], max_ratio=bounds[1])
  # The values of tracers are not known.
  jax.jit(lambda x: build(min_ratio=x, max_ratio=0.5).init({}))(2.0)


def _are_matrices(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


@pytest.mark.parametrize(
  'name, value',
  [
    ('mu_dtype', jnp.bfloat16),
    ('weight_dimension_numbers', merit_optax.flax_dimension_numbers),
    ('mask', _are_matrices),
    ('trust_ratio_mask', _are_matrices),
  ],
)
def test_arguments_that_inject_hyperparams_calls_are_refused(name, value):
  build = optax.inject_hyperparams(merit_optax.merit)
  with pytest.raises(ValueError, match=f"'{name}' in static_args"):
    # Alone, a parameter would fit any boolean.
    build(0.1, **{name: value}).init(jnp.ones((2, 3)))


@pytest.mark.parametrize(
  'name, values',
  [
    ('stacked', (1.7, True, (0.5,), '1', None)),
    ('overrides', (((0,), (1,)), 1, 'row')),
  ],
)
def test_values_of_patterns_are_checked(name, values):
  for value in values:
    with pytest.raises(ValueError, match=rf"^{name}\['kernel'\] must be"):
      call('flax_dimension_numbers', **{name: {'kernel': value}})
