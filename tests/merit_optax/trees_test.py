"""Trees as people have them: boxes, callable models, numbers, other leaves."""

import functools

import chex
import equinox as eqx
from equinox.internal import closure_to_pytree
from flax import linen, nnx
from flax.core import freeze
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from merit_optax.matrices import masks
from merit_optax.matrices.dimension_numbers import matrix_axes
from tests.merit_optax.arrays import call, normal, run, transforms

# Nothing is guessed of these trees.
pytestmark = pytest.mark.filterwarnings('error::UserWarning')

_Spec = optax.contrib.MuonDimensionNumbers
_PARAMS = {'w': jnp.ones((3, 2)), 'b': jnp.ones(2)}


def _have_rows(params):
  return jax.tree.map(lambda x: len(x.shape) > 1, params)


# All transforms; QK-clip has its patterns.
_MUONS = {'muon', 'muon_hyperball', 'scale_by_muon'}
_TRANSFORMS = {
  name: functools.partial(
    call, name, **{'ns_steps': 1} if name in _MUONS else {}
  )
  for name in set(transforms()) - {'qk_clip'}
} | {
  'calibrated': lambda: merit_optax.scale_by_l2_norm_trust_ratio(
    min_ratio=0.1, max_ratio=2.0, calibrate=True
  )
}
_EACH_TRANSFORM = pytest.mark.parametrize('name', sorted(_TRANSFORMS))


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


# Functions, and trees that are callable.


class _Rule(eqx.Module):
  """A rule that is a tree itself, with the entries that it returns."""

  entries: object

  def __call__(self, params):
    return self.entries


_FORMS = {
  'tree': lambda entries: entries,
  'function': lambda entries: lambda _: entries,
  'closure': lambda entries: closure_to_pytree(lambda _: entries),
  'partial': lambda entries: functools.partial(_Rule(entries)),
  'Partial': lambda entries: jax.tree_util.Partial(_Rule(entries)),
  'module': _Rule,
}
_MODEL = eqx.filter(_mlp(), eqx.is_inexact_array)


@pytest.mark.parametrize('form', _FORMS.values(), ids=_FORMS)
@pytest.mark.parametrize('params', [_PARAMS, freeze(_PARAMS), _MODEL])
def test_functions_and_models_are_told_apart(form, params):
  flags = _have_rows(params)
  mask = masks.as_function('mask', form(flags))
  chex.assert_trees_all_equal(mask(params), flags)
  specs = jax.tree.map(lambda x: _Spec(-1, -2) if x.ndim > 1 else None, params)
  assert matrix_axes(form(specs), params) == matrix_axes(specs, params)


def test_an_optimizer_may_be_a_tree():
  # As optimistix.OptaxMinimiser makes one of it.
  merit = merit_optax.merit(
    0.1, weight_dimension_numbers=lambda _: {'w': _Spec(1, 0), 'b': None}
  )
  chex.assert_trees_all_equal(
    _step(closure_to_pytree(merit), _PARAMS), _step(merit, _PARAMS)
  )


# Masks.


def _masked(argument, mask):
  return merit_optax.merit(0.1, weight_decay=0.1, **{argument: mask})


@pytest.mark.parametrize('argument', ['mask', 'trust_ratio_mask'])
@pytest.mark.parametrize(
  'mask', [{'w': np.True_, 'b': jnp.array(False)}, _have_rows]
)
def test_masks_fit_by_name(argument, mask):
  actual = _step(_masked(argument, mask), freeze(_PARAMS))
  expected = _step(_masked(argument, {'w': True, 'b': False}), _PARAMS)
  chex.assert_trees_all_equal(dict(actual), expected)


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
def test_masks_that_do_not_fit_are_refused(mask, message):
  for argument in ('mask', 'trust_ratio_mask'):
    with pytest.raises(ValueError, match=f'^{argument} must.*{message}'):
      _masked(argument, mask).init(_PARAMS)


# Leaves.


@_EACH_TRANSFORM
@pytest.mark.parametrize('dtype', [jnp.float16, jnp.complex64])
def test_odd_leaves_keep_their_forms_and_leave_others_alone(name, dtype):
  transform = _TRANSFORMS[name]()
  matrix = normal(0, (3, 4), dtype)
  tree = {
    'none': None,
    'masked': optax.MaskedNode(),
    'no_rows': {'w': jnp.zeros((0, 2), dtype)},
    'no_columns': {'w': jnp.zeros((3, 0), dtype)},
    'scalar': jnp.ones((), dtype),
    'zero': jnp.zeros((), dtype),
    'one': {'w': jnp.ones((1, 1), dtype)},
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
def test_leaves_without_an_update_are_passed_over(name):
  optimizer = _TRANSFORMS[name]()

  @jax.jit
  def steps(params):
    state = optimizer.init(params)
    # Its leaves are those of the model, with the activation.
    whole = eqx.combine(params, _mlp())
    return [optimizer.update(params, state, x)[0] for x in (whole, params)]

  chex.assert_trees_all_equal(*steps(_MODEL))


@pytest.mark.parametrize('value', [2.0, 2.0 + 1.0j])
def test_numbers_are_arrays(value):
  optimizer, array = merit_optax.merit(0.1), jnp.asarray(value)
  states = optimizer.init(value), optimizer.init(array)
  chex.assert_trees_all_equal_shapes_and_dtypes(*states)
  updates, expected = (
    optimizer.update(1.0 * array, state, param)[0]
    for state, param in zip(states, (value, array), strict=True)
  )
  assert updates == expected


_TAKE_TREES = {
  name: (lambda tree, make=make: make().init(tree))
  for name, make in _TRANSFORMS.items()
  if name != 'elementwise_clip'
} | {
  'describe': merit_optax.describe,
  'hidden_matrices': merit_optax.hidden_matrices,
  'flax_dimension_numbers': merit_optax.flax_dimension_numbers,
}


@pytest.mark.parametrize('name', sorted(_TAKE_TREES))
def test_other_leaves_are_named(name):
  take = _TAKE_TREES[name]
  tree = {'layer': {'kernel': jnp.ones((3, 2)), 'activation': jax.nn.relu}}
  with pytest.raises(ValueError, match="got .* as 'layer/activation'"):
    take(tree)
  for dtype in ('float8_e4m3fn', 'int32', 'bool'):
    with pytest.raises(ValueError, match=f"got {dtype} for 'kernel'"):
      take({'kernel': jnp.ones((3, 2), dtype)})


# Which look at updates alone, without a moment of each parameter.
_STATELESS = {'elementwise_clip', 'scale_by_lmo', 'scale_by_shape'}
# Which need no parameters.
_FREE = _STATELESS | {'scale_by_adam', 'scale_by_muon'}


@_EACH_TRANSFORM
def test_updates_that_do_not_fit_are_refused(name):
  transform = _TRANSFORMS[name]()
  state = transform.init(_PARAMS)

  def refused(message, params=_PARAMS, **updates):
    with pytest.raises(ValueError, match=message):
      transform.update(_PARAMS | updates, state, params)

  few_bits = jnp.ones((3, 2), jnp.float8_e4m3fn)
  refused("updates must have .* got float8_e4m3fn for 'w'", w=few_bits)
  if name not in _STATELESS:  # It would broadcast.
    refused(r"got \(2,\) for 'w' of shape \(3, 2\)", w=jnp.ones(2))
  if name in _FREE - _STATELESS:
    for absent in (None, optax.MaskedNode()):
      refused("^updates must hold an array for 'b'", b=absent)
  if name not in _FREE:
    refused('not passing `params`', params=None)


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
def test_promotion_may_be_forbidden(name, dtype):
  params = {'w': jnp.ones((3, 2), dtype), 'b': jnp.ones(2, dtype)}
  optimizer = _TRANSFORMS[name]()
  state = optimizer.init(params)
  # Nor is anything wrong with arrays of NumPy.
  gradients = jax.tree.map(np.asarray, params)
  with jax.numpy_dtype_promotion('strict'), jax.numpy_rank_promotion('raise'):
    updates, _ = jax.eval_shape(optimizer.update, gradients, state, params)
    jax.eval_shape(merit_optax.update_statistics, updates, params)
  chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
