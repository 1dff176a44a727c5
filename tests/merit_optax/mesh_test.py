"""On a mesh: the step of one device, bit for bit, and little communication.

Both sides get the same gradients. Gradients are sums, whose last bits depend on
the sharding; the maxima that MERIT takes do not.
"""

import math
import re

import chex
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax

_AXIS_TYPES = pytest.mark.parametrize(
  'axis_type', [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name
)
_SPEC = optax.contrib.MuonDimensionNumbers
# Shape, sharding and dimension numbers of parameters that a model may hold.
_LAYOUTS = {
  'replicated': ((16, 24), P(), _SPEC()),
  'rows': ((16, 24), P('fsdp'), _SPEC()),
  'columns': ((16, 24), P(None, 'tensor'), _SPEC()),
  'rows_columns': ((16, 24), P('fsdp', 'tensor'), _SPEC()),
  'rows_twice': ((16, 24), P(('fsdp', 'tensor')), _SPEC()),
  'columns_twice': ((16, 24), P(None, ('tensor', 'fsdp')), _SPEC()),
  'layers': ((4, 6, 10), P('fsdp', None, 'tensor'), _SPEC(1, 2)),
  'layers_twice': ((8, 6, 10), P(('fsdp', 'tensor')), _SPEC(1, 2)),
  'heads': ((16, 4, 6), P('fsdp', 'tensor'), _SPEC(0, (1, 2))),
  'bias': ((24,), P('tensor'), None),
  'bias_twice': ((24,), P(('fsdp', 'tensor')), None),
  'biases_of_layers': ((4, 6), P('fsdp', 'tensor'), _SPEC((), 1)),
  'scalar': ((), P(), None),
}


def _mesh(axis_type):
  return jax.make_mesh(
    (4, 2), ('fsdp', 'tensor'), axis_types=(axis_type, axis_type)
  )


def _optimizer():
  return merit_optax.merit(
    optax.linear_schedule(0.1, 0.02, 8),
    weight_decay=0.1,
    weight_dimension_numbers={k: spec for k, (*_, spec) in _LAYOUTS.items()},
  )


def _shardings(mesh):
  return {
    name: NamedSharding(mesh, spec) for name, (_, spec, _) in _LAYOUTS.items()
  }


def _state_shardings(optimizer, params, shardings, mesh):
  """Returns the shardings of a state whose moments are placed as told."""
  return optax.tree.map_params(
    optimizer,
    lambda _, sharding: sharding,
    jax.eval_shape(optimizer.init, params),
    shardings,
    transform_non_params=lambda _: NamedSharding(mesh, P()),
  )


def _normal(seed, shape):
  return np.random.default_rng(seed).normal(size=shape)


def _params(dtype=jnp.float32):
  """Returns parameters on one device, some beyond the clip, some vanished."""
  params = {
    name: _normal(seed, shape) * 3.0 ** (seed % 3 - 1)
    for seed, (name, (shape, *_)) in enumerate(_LAYOUTS.items())
  }
  params['rows_columns'][3] = 0
  params['biases_of_layers'][:] = 0
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), params)


def _gradients(steps, dtype=jnp.float32):
  """Returns gradients on one device, of which one loses a column."""
  gradients = [
    {
      name: _normal([step, seed], shape)
      for seed, (name, (shape, *_)) in enumerate(_LAYOUTS.items())
    }
    for step in range(steps)
  ]
  for gradient in gradients:
    gradient['rows_columns'][:, 5] = 0
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), gradients)


def _step_function(optimizer):
  def step(params, state, gradient):
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  return step


def _run(step, params, state, gradients):
  """Yields parameters and state after each step."""
  for gradient in gradients:
    params, state = step(params, state, gradient)
    yield params, state


def _run_on_one_device(params, gradients):
  optimizer = _optimizer()
  step = jax.jit(_step_function(optimizer))
  return list(_run(step, params, optimizer.init(params), gradients))


def _assert_same_bits(actual, expected):
  chex.assert_trees_all_equal_structs(actual, expected)
  paths = jax.tree.leaves_with_path(actual)
  for (path, x), y in zip(paths, jax.tree.leaves(expected), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def _assert_sharded_as(tree, shardings):
  def check(path, x, sharding):
    assert x.sharding.is_equivalent_to(sharding, x.ndim), (path, x.sharding)

  jax.tree.map_with_path(check, tree, shardings)


@_AXIS_TYPES
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_sharded_steps_are_those_of_one_device_bit_by_bit(axis_type, dtype):
  params, gradients = _params(dtype), _gradients(5, dtype)
  expected = _run_on_one_device(params, gradients)
  mesh, optimizer = _mesh(axis_type), _optimizer()
  shardings = _shardings(mesh)
  state_shardings = _state_shardings(optimizer, params, shardings, mesh)
  with jax.set_mesh(mesh):
    params, *gradients = (
      jax.device_put(tree, shardings) for tree in (params, *gradients)
    )
    # On an Auto axis jit would leave the zeros of a new state replicated.
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    step = jax.jit(
      _step_function(optimizer), out_shardings=(shardings, state_shardings)
    )
    actual = list(_run(step, params, state, gradients))
  for tree in actual:
    _assert_sharded_as(tree, (shardings, state_shardings))
  _assert_same_bits(actual, expected)


def test_explicit_axes_need_no_shardings_for_the_outputs():
  params, gradients = _params(), _gradients(3)
  expected = _run_on_one_device(params, gradients)
  mesh, optimizer = _mesh(AxisType.Explicit), _optimizer()
  shardings = _shardings(mesh)
  state_shardings = _state_shardings(optimizer, params, shardings, mesh)
  with jax.set_mesh(mesh):
    params, *gradients = (
      jax.device_put(tree, shardings) for tree in (params, *gradients)
    )
    state = jax.jit(optimizer.init)(params)
    _assert_sharded_as(state, state_shardings)
    actual = list(
      _run(jax.jit(_step_function(optimizer)), params, state, gradients)
    )
  for tree in actual:
    _assert_sharded_as(tree, (shardings, state_shardings))
  _assert_same_bits(actual, expected)


@_AXIS_TYPES
@pytest.mark.parametrize('gradients_are', ['sharded', 'replicated'])
def test_sharded_moments_of_replicated_parameters(axis_type, gradients_are):
  params, gradients = _params(), _gradients(5)
  expected = _run_on_one_device(params, gradients)
  mesh, optimizer = _mesh(axis_type), _optimizer()
  moment_shardings = _shardings(mesh)
  state_shardings = _state_shardings(optimizer, params, moment_shardings, mesh)
  replicated = jax.tree.map(lambda _: NamedSharding(mesh, P()), params)
  on = {'sharded': moment_shardings, 'replicated': replicated}[gradients_are]
  with jax.set_mesh(mesh):
    params = jax.device_put(params, replicated)
    gradients = [jax.device_put(gradient, on) for gradient in gradients]
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
    step = jax.jit(
      _step_function(optimizer), out_shardings=(replicated, state_shardings)
    )
    actual = list(_run(step, params, state, gradients))
  for tree in actual:
    _assert_sharded_as(tree, (replicated, state_shardings))
  _assert_same_bits(actual, expected)


def _loss(params, inputs, targets):
  outputs = jnp.tanh(inputs @ params['kernel'] + params['bias'])
  return jnp.mean((outputs - targets) ** 2)


@_AXIS_TYPES
def test_gradients_may_come_out_of_shard_map(axis_type):
  mesh = jax.make_mesh((8,), ('data',), axis_types=(axis_type,))
  params = {
    'kernel': jnp.asarray(_normal(0, (6, 3)), jnp.float32) / 2,
    'bias': jnp.zeros(3),
  }
  inputs = jnp.asarray(_normal(1, (64, 6)), jnp.float32)
  targets = jnp.tanh(inputs @ jnp.asarray(_normal(2, (6, 3)), jnp.float32))

  def gradient_of_shard(params, inputs, targets):
    # Marked as varying, or the gradient would be summed a second time.
    local = jax.lax.pcast(params, 'data', to='varying')
    value, gradient = jax.value_and_grad(_loss)(local, inputs, targets)
    total = jax.lax.psum((value, gradient), 'data')
    return jax.tree.map(lambda x: x / jax.lax.axis_size('data'), total)

  optimizer = merit_optax.merit(0.05)
  with jax.set_mesh(mesh):
    value_and_grad = jax.shard_map(
      gradient_of_shard, in_specs=(P(), P('data'), P('data')), out_specs=P()
    )

    @jax.jit
    def step(params, state, inputs, targets):
      value, gradient = value_and_grad(params, inputs, targets)
      params, state = _step_function(optimizer)(params, state, gradient)
      return params, state, gradient, value

    sharded = NamedSharding(mesh, P('data'))
    batch = jax.device_put((inputs, targets), sharded)
    here = jax.device_put(params, NamedSharding(mesh, P()))
    state = optimizer.init(here)
    alone, state_alone = params, optimizer.init(params)
    step_alone = jax.jit(_step_function(optimizer))
    losses = []
    for _ in range(30):
      chex.assert_trees_all_close(
        jax.jit(jax.grad(_loss))(alone, inputs, targets),
        jax.device_get(value_and_grad(here, *batch)[1]),
        atol=1e-6,
      )
      here, state, gradient, value = step(here, state, *batch)
      alone, state_alone = step_alone(
        alone, state_alone, jax.tree.map(jnp.asarray, jax.device_get(gradient))
      )
      _assert_same_bits((here, state), (alone, state_alone))
      losses.append(float(value))
  assert losses[-1] < losses[0] / 4


def _collectives(text):
  """Returns the collectives of an HLO text: their names and their numbers."""
  names = 'all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter'
  found = re.findall(rf'= (.*?) ({names}|ragged-\S+)(?:-start)?\(', text)
  return [
    (
      name,
      sum(
        math.prod(int(size) for size in shape.split(',') if size)
        for shape in re.findall(r'\w\[([\d,]*)\]', types)
      ),
    )
    for types, name in found
  ]


def _compile_step(params, shardings, mesh, **options):
  """Returns the compiled HLO of update and application."""
  optimizer = merit_optax.merit(0.1, weight_decay=0.1, **options)
  state = jax.eval_shape(optimizer.init, params)
  state_shardings = _state_shardings(optimizer, params, shardings, mesh)
  with jax.set_mesh(mesh):
    arguments = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      (params, state, params),
      (shardings, state_shardings, shardings),
    )
    step = jax.jit(
      _step_function(optimizer), out_shardings=(shardings, state_shardings)
    )
    return step.lower(*arguments).compile().as_text()


def _most_numbers(shape, spec):
  """Returns the bound: the norms of weights and updates, each of them once."""
  if spec is None:
    return 2
  rows, columns = (
    math.prod(shape[axis] for axis in np.atleast_1d(axes).astype(int))
    for axes in (spec.reduction_axis, spec.output_axis)
  )
  if np.size(spec.reduction_axis) == 0:
    return 2 * math.prod(shape) // columns
  matrices = math.prod(shape) // (rows * columns)
  return matrices * (2 * (rows + columns) + 2)


@_AXIS_TYPES
@pytest.mark.parametrize('name', _LAYOUTS)
def test_only_norms_travel(name, axis_type):
  shape, spec, dimension_numbers = _LAYOUTS[name]
  mesh = _mesh(axis_type)
  text = _compile_step(
    {name: jnp.zeros(shape)},
    {name: NamedSharding(mesh, spec)},
    mesh,
    weight_dimension_numbers={name: dimension_numbers},
  )
  found = _collectives(text)
  assert {kind for kind, _ in found} <= {'all-reduce'}
  numbers = sum(size for _, size in found)
  assert numbers <= _most_numbers(shape, dimension_numbers)
  # A weight whose matrices lie on one device each has nothing to send.
  alone = name in ('replicated', 'scalar', 'layers_twice')
  assert (numbers == 0) == alone


def test_collectives_that_move_a_parameter_are_seen():
  mesh = _mesh(AxisType.Auto)
  matrix = jax.ShapeDtypeStruct(
    (16, 24), jnp.float32, sharding=NamedSharding(mesh, P('fsdp'))
  )
  gather = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P()))
  text = gather.lower(matrix).compile().as_text()
  assert _collectives(text) == [('all-gather', 16 * 24)]


def _unrolled_model(num_layers, mesh):
  shapes = {
    'query': ((32, 32), P('fsdp', 'tensor')),
    'out': ((32, 32), P('tensor', 'fsdp')),
    'up': ((32, 64), P('fsdp', 'tensor')),
    'down': ((64, 32), P('tensor', 'fsdp')),
    'bias': ((64,), P('tensor')),
    'scale': ((32,), P()),
  }
  params, shardings = (
    {
      f'layer_{layer}': {name: make(value) for name, value in shapes.items()}
      for layer in range(num_layers)
    }
    for make in (
      lambda value: jnp.zeros(value[0]),
      lambda value: NamedSharding(mesh, value[1]),
    )
  )
  return params, shardings


@_AXIS_TYPES
def test_all_reduces_of_an_unrolled_model_are_combined(axis_type):
  mesh = _mesh(axis_type)
  counts = {}
  for num_layers in (1, 24):
    found = _collectives(
      _compile_step(*_unrolled_model(num_layers, mesh), mesh)
    )
    assert {kind for kind, _ in found} == {'all-reduce'}
    counts[num_layers] = len(found)
    numbers = num_layers * (2 * (2 * 64 + 2 * 96) + 2 * 4 + 2)
    assert sum(size for _, size in found) <= numbers
  assert counts[1] == counts[24]
