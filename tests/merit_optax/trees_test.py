"""Trees as people have them: boxes, callable models, numbers, other leaves."""

import functools
from typing import NamedTuple

import chex
import equinox as eqx
from flax import linen, nnx
from flax.core import freeze
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run

# Nothing is guessed of these trees.
pytestmark = pytest.mark.filterwarnings('error::UserWarning')

_Spec = optax.contrib.MuonDimensionNumbers
_PARAMS = {'w': jnp.ones((3, 2)), 'b': jnp.ones(2)}


def _have_rows(params):
  return jax.tree.map(lambda x: len(x.shape) > 1, params)


# All transforms that see parameters, one way or another.
_TRANSFORMS = {
  'merit': lambda: merit_optax.merit(0.1, weight_decay=0.1),
  'adam_hyperball': lambda: merit_optax.adam_hyperball(0.1, hidden=_have_rows),
  'muon': lambda: merit_optax.muon(0.1, hidden=_have_rows),
  'muon_hyperball': lambda: merit_optax.muon_hyperball(0.1, hidden=_have_rows),
  'initial radius': lambda: merit_optax.keep_matrix_norms(radius='initial'),
  'calibrated': lambda: merit_optax.scale_by_l2_norm_trust_ratio(
    calibrate=True
  ),
  'acceleration': merit_optax.add_acceleration,
}


_MASK_ARGUMENTS = pytest.mark.parametrize(
  'argument', ['mask', 'trust_ratio_mask']
)


def _step(optimizer, params, gradients=None):
  gradients = params if gradients is None else gradients
  return optimizer.update(gradients, optimizer.init(params), params)[0]


def _mlp():
  """Returns a model with an activation as a leaf."""
  return eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))


# Names.


def _boxed():
  init = linen.with_partitioning(linen.initializers.lecun_normal(), ('x', None))
  layer = linen.Dense(2, kernel_init=init)
  return layer.init(jax.random.key(0), jnp.ones((1, 4)))['params']


def _linear_state():
  return nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Param)


@pytest.mark.parametrize('boxed', [_boxed, _linear_state])
@pytest.mark.parametrize('specs_of, params_of', [(0, 0), (0, 1), (1, 0)])
def test_specs_fit_parameters_in_boxes_and_out_of_them(
  boxed, specs_of, params_of
):
  plain = {'kernel': jnp.ones((4, 2)), 'bias': jnp.ones(2)}
  specs, params = ((boxed(), plain)[i] for i in (specs_of, params_of))
  numbers = merit_optax.flax_dimension_numbers(specs)
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=numbers)
  expected = _step(merit_optax.merit(0.1), params)
  chex.assert_trees_all_equal(_step(optimizer, params), expected)


def test_a_spec_of_no_parameter_is_named():
  specs = {'w': _Spec(), 'b': None, 'typo': {'x': _Spec()}}
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  with pytest.warns(UserWarning, match='no parameter: typo/x'):
    optimizer.init(_PARAMS)


def test_specs_of_all_parameters_fit_each_part_of_a_partition():
  part = merit_optax.merit(
    0.1, weight_dimension_numbers={'w': _Spec(), 'b': None}
  )
  parts = {'x': part, 'y': part}
  optax.partition(parts, {'w': 'x', 'b': 'y'}).init(_PARAMS)


# Masks.


def _masked(argument, mask):
  return merit_optax.merit(0.1, weight_decay=0.1, **{argument: mask})


def _are_matrices(params):
  return jax.tree.map(lambda x: x.ndim > 1, params)


_MASKS = [
  {'w': True, 'b': False},
  freeze({'w': True, 'b': False}),
  {'w': np.array(True), 'b': jnp.array(False)},
  {'w': np.True_, 'b': np.False_},
  _are_matrices,
  # With a boolean in it, as in a tree of them.
  jax.tree_util.Partial(lambda flag, params: _are_matrices(params), True),
]


@_MASK_ARGUMENTS
@pytest.mark.parametrize('mask', _MASKS)
@pytest.mark.parametrize('container', [dict, freeze])
def test_masks_fit_by_name(argument, mask, container):
  actual = _step(_masked(argument, mask), container(_PARAMS))
  expected = _step(_masked(argument, _MASKS[0]), _PARAMS)
  chex.assert_trees_all_equal(dict(actual), expected)


@pytest.mark.parametrize(
  'take',
  [
    lambda params, tree: _step(_masked('mask', tree), params),
    lambda params, tree: _step(_masked('trust_ratio_mask', tree), params),
    lambda *x: merit_optax.describe(x[0], mask=x[1], trust_ratio_mask=x[1]),
  ],
  ids=['mask', 'trust_ratio_mask', 'describe'],
)
def test_a_tree_of_a_models_type_is_no_function_though_one_can_call_it(take):
  params = eqx.filter(_mlp(), eqx.is_inexact_array)
  tree = _are_matrices(params)
  chex.assert_trees_all_equal(
    take(params, tree), take(params, lambda _: tree), strict=True
  )


@pytest.mark.parametrize(
  'mask, message',
  [
    ({'w': True}, r"missing are \['b'\]"),
    ({'w': True, 'b': True, 'c': True}, r"too many \['c'\]"),
    ({'w': jnp.ones((3, 2), bool), 'b': True}, 'one for each'),
    ({'w': 1, 'b': True}, 'tree of booleans'),
    (lambda _: 0.5, 'tree of booleans'),
    (True, 'static_args'),
  ],
)
@_MASK_ARGUMENTS
def test_masks_that_do_not_fit_are_refused(argument, mask, message):
  describe = functools.partial(merit_optax.describe, **{argument: mask})
  for take in (_masked(argument, mask).init, describe):
    with pytest.raises(ValueError, match=f'^{argument} must.*{message}'):
      take(_PARAMS)


# Leaves.


@pytest.mark.parametrize(
  'make',
  [
    *(make for name, make in _TRANSFORMS.items() if name != 'acceleration'),
    merit_optax.scale_by_max_norm_trust_ratio,
    merit_optax.keep_matrix_norms,
  ],
)
def test_updates_without_parameters_are_refused(make):
  transform = make()
  with pytest.raises(ValueError, match='not passing `params`'):
    transform.update(_PARAMS, transform.init(_PARAMS), None)


@pytest.mark.parametrize(
  'take',
  [
    merit_optax.describe,
    merit_optax.muon_hyperball(0.1, hidden=_have_rows).init,
    lambda params: merit_optax.update_statistics(params, params),
  ],
)
def test_paths_that_are_written_the_same_are_refused(take):
  with pytest.raises(ValueError, match=r"paths .* \['a/b'\] more than once"):
    take({'a/b': jnp.ones((4, 4)), 'a': {'b': jnp.ones((2, 4))}})


@pytest.mark.parametrize(
  'transform',
  [
    merit_optax.merit(0.1, weight_decay=0.1),
    merit_optax.scale_by_adam(),
    merit_optax.add_acceleration(0.9),
    merit_optax.scale_by_lmo('row'),
    merit_optax.scale_by_shape(lambda m, n: 0.2 * max(m, n) ** 0.5),
    merit_optax.scale_by_max_norm_trust_ratio(min_ratio=0.1, max_ratio=2.0),
    merit_optax.scale_by_l2_norm_trust_ratio(
      min_ratio=0.1, max_ratio=2.0, calibrate=True
    ),
    merit_optax.keep_matrix_norms(radius='initial'),
    merit_optax.elementwise_clip(jnp.float32(0.3)),
  ],
  ids=[
    *('merit', 'adam', 'acceleration', 'lmo', 'shape', 'max_norm', 'l2_norm'),
    *('keep_norms', 'clip'),
  ],
)
@pytest.mark.parametrize('dtype', [jnp.float16, jnp.complex64])
def test_odd_leaves_keep_their_forms_and_leave_others_alone(transform, dtype):
  matrix = normal(0, (3, 4), dtype)
  tree = {
    'none': None,
    'masked': optax.MaskedNode(),
    'empty': jnp.zeros((0, 2), dtype),
    'columns': jnp.zeros((3, 0), dtype),
    'scalar': jnp.ones((), dtype),
    'zero': jnp.zeros((), dtype),
    'one': jnp.ones((1, 1), dtype),
    'nothing': (),
    'w': matrix,
  }
  update = jax.jit(transform.update)
  state, state_alone = transform.init(tree), transform.init(matrix)
  for _ in range(2):
    actual, new_state = update(tree, state, tree)
    alone, state_alone = update(matrix, state_alone, matrix)
    chex.assert_trees_all_equal_shapes_and_dtypes(
      (actual, new_state), (tree, state)
    )
    state = new_state
  chex.assert_tree_all_finite(actual)
  np.testing.assert_allclose(actual['w'], alone, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize('make', _TRANSFORMS.values(), ids=_TRANSFORMS)
def test_what_has_no_update_is_passed_over(make):
  optimizer, params = make(), eqx.filter(_mlp(), eqx.is_inexact_array)
  state = optimizer.init(params)
  actual, _ = optimizer.update(params, state, _mlp())
  expected, _ = optimizer.update(params, state, params)
  chex.assert_trees_all_equal(actual, expected)


_TAKE_TREES = {
  name: (lambda tree, make=make: make().init(tree))
  for name, make in _TRANSFORMS.items()
} | {
  'describe': merit_optax.describe,
  'hidden_matrices': merit_optax.hidden_matrices,
  'flax_dimension_numbers': merit_optax.flax_dimension_numbers,
}


@pytest.mark.parametrize('take', _TAKE_TREES.values(), ids=_TAKE_TREES)
def test_other_leaves_are_named(take):
  tree = {'layer': {'kernel': jnp.ones((3, 2)), 'activation': jax.nn.relu}}
  with pytest.raises(ValueError, match="got .* as 'layer/activation'"):
    take(tree)
  with pytest.raises(ValueError, match="float8_e4m3fn for 'kernel'"):
    take({'kernel': jnp.ones((3, 2), jnp.float8_e4m3fn)})


@pytest.mark.parametrize(
  'make',
  [
    *_TRANSFORMS.values(),
    merit_optax.scale_by_adam,
    merit_optax.scale_by_muon,
    merit_optax.scale_by_max_norm_trust_ratio,
    lambda: merit_optax.elementwise_clip(1.0),
  ],
)
def test_updates_of_few_bits_are_named(make):
  params = {'kernel': jnp.ones((3, 2))}
  updates = {'kernel': jnp.ones((3, 2), jnp.float8_e4m3fn)}
  message = "updates must have .* got float8_e4m3fn for 'kernel'"
  with pytest.raises(ValueError, match=message):
    make().update(updates, make().init(params), params)


@pytest.mark.parametrize('absent', [None, optax.MaskedNode()])
@pytest.mark.parametrize(
  'make',
  [merit_optax.scale_by_adam, merit_optax.scale_by_muon]
  + [_TRANSFORMS[x] for x in ('merit', 'acceleration')],
)
def test_what_the_state_has_needs_an_update(make, absent):
  transform = make()
  state = transform.init(_PARAMS)
  with pytest.raises(ValueError, match="^updates must hold an array for 'b'"):
    transform.update(_PARAMS | {'b': absent}, state, _PARAMS)


@pytest.mark.parametrize('make', _TRANSFORMS.values(), ids=_TRANSFORMS)
def test_updates_of_other_shapes_are_named(make):
  updates = _PARAMS | {'w': jnp.ones(2)}  # It would broadcast.
  with pytest.raises(ValueError, match=r"got \(2,\) for 'w' of shape \(3, 2\)"):
    _step(make(), _PARAMS, updates)


@pytest.mark.parametrize('value', [2.0, 2, 2.0 + 1.0j])
def test_numbers_are_arrays(value):
  optimizer, array = merit_optax.merit(0.1), jnp.asarray(value)
  states = optimizer.init(value), optimizer.init(array)
  chex.assert_trees_all_equal_shapes_and_dtypes(*states)
  assert _step(optimizer, value, 1.0 * array) == _step(
    optimizer, array, 1.0 * array
  )


# Dtypes.


@hypothesis.given(
  gradient=st.floats(1e2, 6e4),
  dtype=st.sampled_from([jnp.float16, jnp.float32]),
)
def test_a_large_gradient_freezes_no_element(gradient, dtype):
  if dtype == jnp.float32:
    gradient *= 1e17
  params, optimizer = jnp.ones((2, 2), dtype), merit_optax.merit(0.1)
  state = optimizer.init(params)
  _, state = optimizer.update(params * gradient, state, params)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
  _, decayed = optimizer.update(params, state, params)
  assert (decayed[0].nu < state[0].nu).all()


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize('make', _TRANSFORMS.values(), ids=_TRANSFORMS)
def test_promotion_may_be_forbidden(make, dtype):
  params = {'w': jnp.ones((3, 2), dtype), 'b': jnp.ones(2, dtype)}
  expected = _step(make(), params)
  # Nor is anything wrong with arrays of NumPy.
  gradients = jax.tree.map(np.asarray, params)
  with jax.numpy_dtype_promotion('strict'), jax.numpy_rank_promotion('raise'):
    actual = _step(make(), params, gradients)
    merit_optax.update_statistics(actual, params)
  chex.assert_trees_all_equal(actual, expected)


# Kernels beside a bias.


@pytest.mark.parametrize(
  'name, kernel, bias',
  [
    ('value', (2, 16, 1), (2, 1)),  # Two critics.
    ('out', (6, 8, 4), (6, 4)),  # Six layers.
    ('query', (3, 8, 16), (16,)),  # A convolution with a window of three.
    ('query', (8, 8, 4), (8, 4)),  # Heads, or eight layers.
  ],
)
def test_a_name_that_the_bias_contradicts_is_refused(name, kernel, bias):
  params = {name: {'kernel': jnp.ones(kernel), 'bias': jnp.ones(bias)}}
  # Of a matrix it may be anything.
  params['matrix'] = {'kernel': jnp.ones((4, 3)), 'bias': jnp.ones(4)}
  for take in (
    merit_optax.flax_dimension_numbers,
    merit_optax.muon_hyperball(0.1, hidden='kernel').init,
  ):
    with pytest.raises(ValueError, match=f'{name}/kernel .* beside a bias'):
      take(params)
  if name != 'query':  # As the message advises.
    merit_optax.flax_dimension_numbers(params, stacked={name: 1})


# Rarer trees.


class _Critic(eqx.Module):
  value: object
  target: object


class _Nets(NamedTuple):
  policy: object
  value: object


def test_a_field_named_value_keeps_its_name_in_a_partition():
  params = {'net': _Nets(jnp.ones((3, 2)), jnp.ones((4, 3))), 'l': jnp.ones(3)}
  labels = {'net': _Nets('z', 'a'), 'l': 'a'}
  hidden = 'net/value'
  optimizer = optax.partition(
    {'a': merit_optax.muon(0.1, hidden=hidden), 'z': optax.set_to_zero()},
    labels,
  )
  update = _step(optimizer, params)['net'].value
  alone = _step(merit_optax.muon(0.1, hidden='w'), {'w': params['net'].value})
  chex.assert_trees_all_close(update, alone['w'], rtol=1e-5)


def test_a_field_named_value_keeps_its_name():
  both = {'c': _Critic(jnp.ones((3, 2)), jnp.ones(2))}
  statistics = merit_optax.update_statistics(both, both)
  assert {x.rpartition('/')[0] for x in statistics} == {'c/value', 'c/target'}
  # And beside what is left out, where it might be the value of a box.
  params = {'c': _Critic(jnp.ones((3, 2)), None)}
  assert '\nvalue ' in merit_optax.describe(params['c'])
  _masked('mask', {'c': _Critic(True, False)}).init(params)
  specs = {'c': {'value': _Spec(), 'target': None}}
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  optimizer.init(params)
  optimizer.init({'c': _Critic(optax.MaskedNode(), jnp.ones(2))})
  with pytest.raises(ValueError, match='missing'):
    _masked('mask', {'c': _Critic(True, None)}).init(both)


_ONE_ARRAY = {
  'first_ratios': merit_optax.scale_by_l2_norm_trust_ratio(calibrate=True),
  'radius': merit_optax.keep_matrix_norms(radius='initial'),
}


@pytest.mark.parametrize('name', _ONE_ARRAY)
def test_joined_numbers_are_one_array_that_is_no_parameter(name):
  transform = _ONE_ARRAY[name]
  state = transform.init(_PARAMS)
  assert len(jax.tree.leaves(state)) == 1
  marked = optax.tree.map_params(
    transform, lambda _: 'moment', state, transform_non_params=lambda _: 'other'
  )
  assert getattr(marked, name) == 'other'
  for empty in ({}, (), {'a': None}, {'a': optax.MaskedNode()}):
    updates, state = transform.update(empty, transform.init(empty), empty)
    assert updates == empty
    # Orbax would not save an empty array.
    assert getattr(state, name).shape == (1,)
  with pytest.raises(ValueError, match='updates must hold .*zeros'):
    state = transform.init(_PARAMS)
    transform.update(_PARAMS | {'w': None}, state, _PARAMS)


def test_a_step_without_updates_leaves_a_calibration_as_it_is():
  transform = merit_optax.scale_by_l2_norm_trust_ratio(calibrate=True)
  params = {'w': jnp.ones((3, 2)), 'b': None}
  gradients = {'w': normal(0, (3, 2)), 'b': None}
  _, state = transform.update(gradients, transform.init(params), params)
  updates, after = transform.update({'w': None, 'b': None}, state, params)
  assert updates == {'w': None, 'b': None}
  assert after == state
  assert state.first_ratios > 0


@_MASK_ARGUMENTS
def test_an_entry_of_an_empty_container_is_not_too_many(argument):
  params = [(jnp.ones((3, 2)), jnp.ones(2)), (), {'d': {}}]
  _masked(argument, [True, False, {'d': True}]).init(params)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float32'])
def test_an_infinite_gradient_is_no_drift(dtype):
  mask = {'w': True, 'b': False}
  params = optax.tree.cast(_PARAMS, dtype)
  optimizer = merit_optax.merit(0.1, trust_ratio_mask=mask)
  spoiled = jax.tree.map(lambda x: x.at[0].set(jnp.inf), params)
  *_, last = run(optimizer, params, [spoiled, params])
  for moments in (last.state[0].mu, last.state[0].nu):
    assert jnp.isinf(moments['b']).tolist() == [True, False]
  assert all(np.isnan(x[0]).all() for x in jax.tree.leaves(last.params))


def test_integers_do_not_move():
  params = _PARAMS | {'n': jnp.array(3)}
  gradients = jax.grad(lambda x: x['w'].sum() + x['b'].sum(), allow_int=True)
  for zero in (jnp.array(0), gradients(params)['n']):
    updates = _step(merit_optax.merit(0.1), params, _PARAMS | {'n': zero})
    assert updates['n'] == 0


def test_eager_steps_compile_nothing_anew(caplog):
  optimizer = optax.inject_hyperparams(merit_optax.merit)(0.1)
  state = optimizer.init(_PARAMS)
  for _ in range(2):
    _, state = optimizer.update(_PARAMS, state, _PARAMS)
  with jax.log_compiles(), caplog.at_level('WARNING'):
    optimizer.update(_PARAMS, state, _PARAMS)
  assert not [x for x in caplog.messages if x.startswith('Compiling')]
