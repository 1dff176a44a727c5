"""Trees as people have them: boxes, callable models, numbers, other leaves."""

import functools

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
  'muon': lambda: merit_optax.muon(0.1, hidden=_have_rows, ns_steps=1),
  'keep_matrix_norms': merit_optax.keep_matrix_norms,
  'calibrated': lambda: merit_optax.scale_by_l2_norm_trust_ratio(
    calibrate=True
  ),
  'acceleration': merit_optax.add_acceleration,
}
_EACH_TRANSFORM = pytest.mark.parametrize(
  'make', _TRANSFORMS.values(), ids=_TRANSFORMS
)
_MASK_ARGUMENTS = pytest.mark.parametrize(
  'argument', ['mask', 'trust_ratio_mask']
)


def _step(optimizer, params, gradients=None):
  """Returns the first updates; gradients are the parameters by default."""

  @jax.jit
  def step(params, gradients):
    return optimizer.update(gradients, optimizer.init(params), params)[0]

  return step(params, params if gradients is None else gradients)


def _mlp():
  """Returns a model with an activation as a leaf, whose trees are callable."""
  return eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))


# Names.


def _boxed():
  init = linen.with_partitioning(linen.initializers.lecun_normal(), ('x', None))
  layer = linen.Dense(2, kernel_init=init)
  return jax.jit(layer.init)(jax.random.key(0), np.ones((1, 4)))['params']


def _linear_state():
  return nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Param)


@pytest.mark.parametrize('boxed', [_boxed, _linear_state])
@pytest.mark.parametrize('are_specs_boxed', [True, False])
def test_specs_fit_parameters_in_boxes_and_out_of_them(boxed, are_specs_boxed):
  trees = boxed(), {'kernel': jnp.ones((4, 2)), 'bias': jnp.ones(2)}
  specs, params = trees if are_specs_boxed else reversed(trees)
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


class _Critic(eqx.Module):
  value: object
  target: object


# The only array in a box is named `value`, too.


def test_a_field_named_value_keeps_its_name():
  both = {'c': _Critic(jnp.ones((3, 2)), jnp.ones(2))}
  statistics = merit_optax.update_statistics(both, both)
  assert {x.rpartition('/')[0] for x in statistics} == {'c/value', 'c/target'}
  # And beside a field that is left out.
  params = {'c': _Critic(jnp.ones((3, 2)), None)}
  assert '\nvalue ' in merit_optax.describe(params['c'])
  _masked('mask', {'c': _Critic(True, False)}).init(params)
  specs = {'c': {'value': _Spec(), 'target': None}}
  optimizer = merit_optax.merit(0.1, weight_dimension_numbers=specs)
  optimizer.init(params)
  optimizer.init({'c': _Critic(optax.MaskedNode(), jnp.ones(2))})


# Masks.


def _masked(argument, mask):
  return merit_optax.merit(0.1, weight_decay=0.1, **{argument: mask})


_MASKS = [
  {'w': True, 'b': False},
  freeze({'w': np.True_, 'b': jnp.array(False)}),
  _have_rows,
  # With a boolean in it, as in a tree of them.
  jax.tree_util.Partial(lambda flag, params: _have_rows(params), True),
]


@_MASK_ARGUMENTS
@pytest.mark.parametrize('mask', _MASKS)
def test_masks_fit_by_name(argument, mask):
  actual = _step(_masked(argument, mask), freeze(_PARAMS))
  expected = _step(_masked(argument, _MASKS[0]), _PARAMS)
  chex.assert_trees_all_equal(dict(actual), expected)


@pytest.mark.parametrize(
  'take',
  [
    lambda params, mask: _step(_masked('mask', mask), params),
    lambda params, mask: _step(_masked('trust_ratio_mask', mask), params),
    lambda params, mask: merit_optax.describe(params, mask=mask),
  ],
  ids=['mask', 'trust_ratio_mask', 'describe'],
)
def test_masks_in_a_callable_model(take):
  params = eqx.filter(_mlp(), eqx.is_inexact_array)
  mask = _have_rows(params)
  chex.assert_trees_all_equal(
    take(params, mask), take(params, lambda _: mask), strict=True
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
  'transform',
  [
    merit_optax.merit(0.1, weight_decay=0.1),
    merit_optax.add_acceleration(0.9),
    merit_optax.scale_by_lmo('row'),
    merit_optax.scale_by_muon(ns_steps=1),
    merit_optax.scale_by_shape(lambda m, n: 0.2 * max(m, n) ** 0.5),
    merit_optax.scale_by_l2_norm_trust_ratio(
      min_ratio=0.1, max_ratio=2.0, calibrate=True
    ),
    merit_optax.keep_matrix_norms(),
  ],
  ids=['merit', 'acceleration', 'lmo', 'muon', 'shape', 'l2_norm', 'keep'],
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

  @jax.jit
  def step(tree):
    state = transform.init(tree)
    return state, *transform.update(tree, state, tree)

  state, actual, new_state = step(tree)
  _, alone, _ = step(matrix)
  chex.assert_trees_all_equal_shapes_and_dtypes(
    (actual, new_state), (tree, state)
  )
  chex.assert_tree_all_finite(actual)
  np.testing.assert_allclose(actual['w'], alone, rtol=2e-3, atol=1e-3)


@_EACH_TRANSFORM
def test_leaves_without_an_update_are_passed_over(make):
  optimizer, model = make(), _mlp()
  params = eqx.filter(model, eqx.is_inexact_array)

  @jax.jit
  def steps(params):
    state = optimizer.init(params)
    # Its leaves are those of the model, with the activation.
    whole = eqx.combine(params, model)
    return [optimizer.update(params, state, x)[0] for x in (whole, params)]

  chex.assert_trees_all_equal(*steps(params))


@pytest.mark.parametrize('value', [2, 2.0 + 1.0j])
def test_numbers_are_arrays(value):
  optimizer, array = merit_optax.merit(0.1), jnp.asarray(value)
  states = optimizer.init(value), optimizer.init(array)
  chex.assert_trees_all_equal_shapes_and_dtypes(*states)
  updates, expected = (
    optimizer.update(1.0 * array, state, param)[0]
    for state, param in zip(states, (value, array), strict=True)
  )
  assert updates == expected


def test_integers_do_not_move():
  params = _PARAMS | {'n': jnp.array(3)}
  gradients = jax.grad(lambda x: x['w'].sum() + x['b'].sum(), allow_int=True)
  optimizer = merit_optax.merit(0.1)
  for zero in (jnp.array(0), gradients(params)['n']):
    # JAX takes no float0 as an argument.
    @jax.jit
    def step(zero=zero):
      state = optimizer.init(params)
      return optimizer.update(_PARAMS | {'n': zero}, state, params)[0]

    assert step()['n'] == 0


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
    merit_optax.keep_matrix_norms,
    lambda: merit_optax.elementwise_clip(1.0),
  ],
)
def test_updates_that_do_not_fit_are_refused(make):
  transform = make()
  state = transform.init(_PARAMS)

  def update(updates, params=_PARAMS):
    transform.update(updates, state, params)

  few_bits = _PARAMS | {'w': jnp.ones((3, 2), jnp.float8_e4m3fn)}
  message = "updates must have .* got float8_e4m3fn for 'w'"
  with pytest.raises(ValueError, match=message):
    update(few_bits)
  if make in (merit_optax.scale_by_adam, merit_optax.scale_by_muon):
    for absent in (None, optax.MaskedNode()):
      message = "^updates must hold an array for 'b'"
      with pytest.raises(ValueError, match=message):
        update(_PARAMS | {'b': absent})
  if make in _TRANSFORMS.values():
    # It would broadcast.
    message = r"got \(2,\) for 'w' of shape \(3, 2\)"
    with pytest.raises(ValueError, match=message):
      update(_PARAMS | {'w': jnp.ones(2)})


@pytest.mark.parametrize(
  'make',
  [
    *(make for name, make in _TRANSFORMS.items() if name != 'acceleration'),
    merit_optax.scale_by_max_norm_trust_ratio,
  ],
)
def test_updates_without_parameters_are_refused(make):
  transform = make()
  with pytest.raises(ValueError, match='not passing `params`'):
    transform.update(_PARAMS, transform.init(_PARAMS), None)


# A state of one array, of all parameters.


def test_joined_numbers_are_one_array_that_is_no_parameter():
  transform = merit_optax.scale_by_l2_norm_trust_ratio(calibrate=True)
  state = transform.init(_PARAMS)
  assert len(jax.tree.leaves(state)) == 1
  marked = optax.tree.map_params(
    transform, lambda _: 'moment', state, transform_non_params=lambda _: 'other'
  )
  assert marked.first_ratios == 'other'
  for empty in ({}, {'a': optax.MaskedNode()}):
    updates, state = transform.update(empty, transform.init(empty), empty)
    assert updates == empty
    # Orbax would not save an empty array.
    assert state.first_ratios.shape == (1,)
  with pytest.raises(ValueError, match='updates must hold .*zeros'):
    state = transform.init(_PARAMS)
    transform.update(_PARAMS | {'w': None}, state, _PARAMS)


# Dtypes.


_MERIT = merit_optax.merit(0.1)
_UPDATE = jax.jit(_MERIT.update)


@hypothesis.given(
  gradient=st.floats(1e2, 6e4),
  dtype=st.sampled_from([np.float16, np.float32]),
)
def test_a_large_gradient_freezes_no_element(gradient, dtype):
  if dtype == np.float32:
    gradient *= 1e17
  params = np.ones((2, 2), dtype)
  state = _MERIT.init(params)
  _, state = _UPDATE(params * dtype(gradient), state, params)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
  _, decayed = _UPDATE(params, state, params)
  assert (decayed[0].nu < state[0].nu).all()


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_an_infinite_gradient_stays_in_the_moments(dtype):
  mask = {'w': True, 'b': False}
  params = optax.tree.cast(_PARAMS, dtype)
  optimizer = merit_optax.merit(0.1, trust_ratio_mask=mask)
  spoiled = jax.tree.map(lambda x: x.at[0].set(jnp.inf), params)
  *_, last = run(optimizer, params, [spoiled, params])
  for moments in (last.state[0].mu, last.state[0].nu):
    assert jnp.isinf(moments['b']).tolist() == [True, False]
  assert all(np.isnan(x[0]).all() for x in jax.tree.leaves(last.params))


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
@_EACH_TRANSFORM
def test_promotion_may_be_forbidden(make, dtype):
  params = {'w': jnp.ones((3, 2), dtype), 'b': jnp.ones(2, dtype)}
  optimizer = make()
  state = optimizer.init(params)
  # Nor is anything wrong with arrays of NumPy.
  gradients = jax.tree.map(np.asarray, params)
  with jax.numpy_dtype_promotion('strict'), jax.numpy_rank_promotion('raise'):
    updates, _ = jax.jit(optimizer.update)(gradients, state, params)
    jax.eval_shape(merit_optax.update_statistics, updates, params)
  chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
