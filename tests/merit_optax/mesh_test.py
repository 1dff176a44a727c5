"""On a mesh: the step of one device, bit for bit, and little communication.

Both sides get the same gradients. Gradients are sums, whose last bits depend on
the sharding; the maxima that MERIT takes do not.
"""

from collections.abc import Iterator
import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax
from merit_optax.matrices.norms import max_norm
from tests.merit_optax.arrays import (
  assert_same_bits,
  make_mesh,
  normal,
  state_shardings,
  step_function,
)

# Which bits come out depends on how XLA fuses operations.
pytestmark = pytest.mark.usefixtures('full_compilation')

_AXIS_TYPES = pytest.mark.parametrize(
  'axis_type', [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name
)
_STEPS = 4
# XLA may leave out a rounding to bfloat16 between two operations, and does so
# in some programs and not in others.
_ROUND_AS_WRITTEN = {'xla_allow_excess_precision': False}
_SPEC = optax.contrib.MuonDimensionNumbers
# Shape, sharding and dimension numbers of parameters that a model may hold.
# Each device gets 12 elements or more of the last axis: with fewer, XLA on CPU
# may fuse a product with a sum in one program and not in the other since jax
# 0.12, for AdamW too.
_LAYOUTS = {
  'replicated': ((16, 96), P(), _SPEC()),
  'rows': ((16, 96), P('fsdp'), _SPEC()),
  'columns': ((16, 96), P(None, 'tensor'), _SPEC()),
  'rows_columns': ((16, 96), P('fsdp', 'tensor'), _SPEC()),
  'rows_twice': ((16, 96), P(('fsdp', 'tensor')), _SPEC()),
  'columns_twice': ((16, 96), P(None, ('tensor', 'fsdp')), _SPEC()),
  'layers': ((4, 6, 24), P('fsdp', None, 'tensor'), _SPEC(1, 2)),
  'layers_twice': ((8, 6, 12), P(('fsdp', 'tensor')), _SPEC(1, 2)),
  'heads': ((16, 4, 24), P('fsdp', 'tensor'), _SPEC(0, (1, 2))),
  'bias': ((96,), P('tensor'), None),
  'bias_twice': ((96,), P(('fsdp', 'tensor')), None),
  'biases_of_layers': ((4, 96), P('fsdp', 'tensor'), _SPEC((), 1)),
  'scalar': ((), P(), None),
}


# A placeholder stands for the parameters in `optax.tree.map_params`.
_WITH_SPECS = {
  'weight_dimension_numbers': lambda params: {k: _LAYOUTS[k][2] for k in params}
}
# The kit: of maxima alone, and with sums of squares.
_CHAINS = {
  'max': (
    optax.scale_by_lion(),
    merit_optax.scale_by_max_norm_trust_ratio(**_WITH_SPECS),
    optax.scale_by_learning_rate(0.125),
    merit_optax.keep_matrix_norms('max', **_WITH_SPECS),
  ),
  'l2': (
    merit_optax.add_acceleration(0.9),
    merit_optax.scale_by_lmo('row', **_WITH_SPECS),
    merit_optax.scale_by_shape(lambda m, n: (m * n) ** 0.25, **_WITH_SPECS),
    optax.add_decayed_weights(0.1),
    merit_optax.scale_by_l2_norm_trust_ratio(
      min_ratio=0.1, max_ratio=5.0, calibrate=True, **_WITH_SPECS
    ),
    optax.scale_by_learning_rate(0.02),
    merit_optax.keep_matrix_norms('l2', **_WITH_SPECS),
  ),
}


def _optimizer():
  schedule = optax.linear_schedule(0.1, 0.02, 8)
  return merit_optax.merit(schedule, weight_decay=0.1, **_WITH_SPECS)


def _shardings(mesh):
  return {
    name: NamedSharding(mesh, spec) for name, (_, spec, _) in _LAYOUTS.items()
  }


def _arrays(seed, dtype=jnp.float32):
  return {
    name: normal([seed, i], shape, dtype)
    for i, (name, (shape, *_)) in enumerate(_LAYOUTS.items())
  }


def _params(dtype=jnp.float32):
  """Returns parameters on one device, some beyond the clip, some vanished."""
  params = _arrays(0, dtype)
  for i, (name, x) in enumerate(params.items()):
    params[name] = x * (1 / 3, 1, 3)[i % 3]
  params['rows_columns'] = params['rows_columns'].at[3].set(0)
  params['biases_of_layers'] = 0 * params['biases_of_layers']
  return params


def _gradients(steps, dtype=jnp.float32):
  """Returns gradients on one device, of which one loses a column."""
  gradients = [_arrays(1 + step, dtype) for step in range(steps)]
  for gradient in gradients:
    gradient['rows_columns'] = gradient['rows_columns'].at[:, 5].set(0)
  return gradients


def _run(step, params, state, gradients):
  """Yields parameters and state after each step."""
  for gradient in gradients:
    params, state = step(params, state, gradient)
    yield params, state


@functools.cache
def _run_on_one_device(dtype=jnp.float32):
  optimizer, params = _optimizer(), _params(dtype)
  step = jax.jit(step_function(optimizer), compiler_options=_ROUND_AS_WRITTEN)
  state = optimizer.init(params)
  return list(_run(step, params, state, _gradients(_STEPS, dtype)))


def _assert_sharded_as(tree, shardings):
  def check(path, x, sharding):
    assert x.sharding.is_equivalent_to(sharding, x.ndim), (path, x.sharding)

  jax.tree.map_with_path(check, tree, shardings)


@_AXIS_TYPES
@pytest.mark.parametrize(
  'dtype, are_params_sharded',
  [(jnp.float32, True), (jnp.bfloat16, True), (jnp.float32, False)],
  ids=['float32', 'bfloat16', 'moments alone'],
)
def test_sharded_steps_are_those_of_one_device_bit_by_bit(
  axis_type, dtype, are_params_sharded
):
  params, gradients = _params(dtype), _gradients(_STEPS, dtype)
  mesh, optimizer = make_mesh(axis_type, fsdp=4, tensor=2), _optimizer()
  shardings = _shardings(mesh)
  whole = dict.fromkeys(shardings, NamedSharding(mesh, P()))
  places = shardings if are_params_sharded else whole
  places = places, state_shardings(optimizer, params, shardings, mesh)
  is_explicit = axis_type == AxisType.Explicit
  # On Auto axes jit would leave the zeros of a new state replicated. On
  # Explicit ones the types of the arguments say it all, if they agree.
  is_told = not (is_explicit and are_params_sharded)
  outputs = places if is_told else (None, None)

  def step(params, state, gradient):
    if is_explicit and not are_params_sharded:
      # Or (1 - b1) * gradient would be replicated and rounded by itself, where
      # one device fuses the product with the sum.
      gradient = jax.tree.map(jax.sharding.reshard, gradient, shardings)
    return step_function(optimizer)(params, state, gradient)

  with jax.set_mesh(mesh):
    params = jax.device_put(params, places[0])
    gradients = jax.device_put(gradients, [places[0]] * _STEPS)
    state = jax.jit(optimizer.init, out_shardings=outputs[1])(params)
    _assert_sharded_as(state, places[1])
    step = jax.jit(
      step, out_shardings=outputs, compiler_options=_ROUND_AS_WRITTEN
    )
    actual = list(_run(step, params, state, gradients))
  for tree in actual:
    _assert_sharded_as(tree, places)
  assert_same_bits(actual, _run_on_one_device(dtype))


@_AXIS_TYPES
@pytest.mark.parametrize('norm', _CHAINS)
def test_chains_of_the_kit_take_the_steps_of_one_device(norm, axis_type):
  params, *gradients = (
    {name: tree[name] for name in ('rows_columns', 'layers', 'heads', 'bias')}
    for tree in (_params(), *_gradients(2))
  )
  mesh = make_mesh(axis_type, fsdp=4, tensor=2)
  optimizer = optax.chain(*_CHAINS[norm])
  step = jax.jit(step_function(optimizer))
  *_, expected = _run(step, params, optimizer.init(params), gradients)
  shardings = {name: _shardings(mesh)[name] for name in params}
  # The mesh is that of the arrays: none has to be set.
  placed = jax.device_put(params, shardings)
  state = optimizer.init(placed)
  gradients = jax.device_put(gradients, [shardings] * 2)
  *_, actual = _run(step, placed, state, gradients)
  _assert_sharded_as(actual[0], shardings)
  if norm == 'max':
    assert_same_bits(actual, expected)
  else:
    pairs = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    for x, y in pairs:
      atol = 1e-5 * np.abs(y).max()
      np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def _collectives(text):
  """Returns the collectives of an HLO text: name, and sizes of their arrays."""
  names = 'all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter'
  found = re.findall(rf'= (.*?) ({names}|ragged-\S+)(?:-start)?\(', text)
  return [
    (
      name,
      [
        math.prod(int(size) for size in shape.split(',') if size)
        for shape in re.findall(r'\w\[([\d,]*)\]', types)
      ],
    )
    for types, name in found
  ]


def _compile_step(params, shardings, mesh, **options):
  """Returns the compiled HLO of update and application."""
  optimizer = merit_optax.merit(0.1, weight_decay=0.1, **options)
  places = shardings, state_shardings(optimizer, params, shardings, mesh)
  with jax.set_mesh(mesh):
    arguments = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      (params, jax.eval_shape(optimizer.init, params), params),
      (*places, shardings),
    )
    step = jax.jit(step_function(optimizer), out_shardings=places)
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


@pytest.fixture
def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Takes norms as accelerators do; on CPU three times as many travel."""
  monkeypatch.setattr(
    jax.lax, 'platform_dependent', lambda *x, default, cpu: default(*x)
  )
  max_norm.clear_cache()
  yield
  max_norm.clear_cache()


@pytest.mark.parametrize(
  'name, axis_type',
  [
    *((name, AxisType.Auto) for name in _LAYOUTS),
    ('rows_columns', AxisType.Explicit),
    ('layers', AxisType.Explicit),
  ],
)
@pytest.mark.usefixtures('as_on_accelerators')
def test_only_norms_travel(name, axis_type):
  shape, spec, dimension_numbers = _LAYOUTS[name]
  mesh = make_mesh(axis_type, fsdp=4, tensor=2)
  text = _compile_step(
    {name: jnp.zeros(shape)},
    {name: NamedSharding(mesh, spec)},
    mesh,
    weight_dimension_numbers={name: dimension_numbers},
  )
  found = _collectives(text)
  assert {kind for kind, _ in found} <= {'all-reduce'}
  numbers = sum(sum(sizes) for _, sizes in found)
  assert numbers <= _most_numbers(shape, dimension_numbers)
  # A weight whose matrices lie on one device each has nothing to send.
  alone = name in ('replicated', 'scalar', 'layers_twice')
  assert (numbers == 0) == alone


def test_collectives_that_move_a_parameter_are_seen():
  mesh = make_mesh(AxisType.Auto, fsdp=4, tensor=2)
  matrix = jax.ShapeDtypeStruct(
    (16, 24), jnp.float32, sharding=NamedSharding(mesh, P('fsdp'))
  )
  gather = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P()))
  text = gather.lower(matrix).compile().as_text()
  assert _collectives(text) == [('all-gather', [16 * 24])]


def _unrolled_model(num_layers, mesh):
  """Returns a model's parameters and shardings, one array for each weight."""
  layer = {
    'up': ((32, 64), P('fsdp', 'tensor')),
    'down': ((64, 32), P('tensor', 'fsdp')),
    'bias': ((64,), P('tensor')),
  }
  params = {name: jnp.zeros(shape) for name, (shape, _) in layer.items()}
  shardings = {k: NamedSharding(mesh, spec) for k, (_, spec) in layer.items()}
  names = [f'layer_{i}' for i in range(num_layers)]
  return dict.fromkeys(names, params), dict.fromkeys(names, shardings)


@pytest.mark.usefixtures('as_on_accelerators')
def test_all_reduces_of_an_unrolled_model_are_combined():
  mesh = make_mesh(AxisType.Auto, fsdp=4, tensor=2)
  found = {
    num_layers: _collectives(
      _compile_step(*_unrolled_model(num_layers, mesh), mesh)
    )
    for num_layers in (1, 24)
  }
  for num_layers, collectives in found.items():
    assert {kind for kind, _ in collectives} == {'all-reduce'}
    numbers = sum(sum(sizes) for _, sizes in collectives)
    assert numbers <= num_layers * (2 * (2 * (32 + 64) + 2) + 2)
  # Three norms of weight and update for a matrix, one for a bias. XLA puts up
  # to 256 arrays into one all-reduce; beyond, they cannot but be split.
  arrays = sum(len(sizes) for _, sizes in found[24])
  assert arrays >= 24 * (2 * 6 + 2)
  assert len(found[24]) <= len(found[1]) + arrays // 256
