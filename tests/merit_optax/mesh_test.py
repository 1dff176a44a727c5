"""On a mesh: the steps of one device, and little communication.

Both sides get the same gradients. Gradients are sums, whose last bits depend on
the sharding; the maxima that MERIT takes do not.
"""

import contextlib
import functools
import itertools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import (
  assert_same_bits,
  collectives,
  make_mesh,
  normal,
  step_function,
)

# XLA may leave out a rounding to bfloat16 between two operations, and does so
# in some programs and not in others.
_ROUND_AS_WRITTEN = {'xla_allow_excess_precision': False}
_SPEC = optax.contrib.MuonDimensionNumbers
_FUSED = merit_optax.FusedDimensionNumbers
# Shape, sharding and dimension numbers of parameters that a model may hold.
# Each device gets 12 elements or more of the last axis: with fewer, XLA on CPU
# may fuse a product with a sum in one program and not in the other since jax
# 0.12, for AdamW too.
_LAYOUTS = {
  'replicated': ((16, 96), P(), _SPEC()),
  'rows_columns': ((16, 96), P('fsdp', 'tensor'), _SPEC()),
  'rows_twice': ((16, 96), P(('fsdp', 'tensor')), _SPEC()),
  'columns_twice': ((16, 96), P(None, ('tensor', 'fsdp')), _SPEC()),
  'layers': ((8, 6, 24), P('fsdp', None, 'tensor'), _SPEC(1, 2)),
  'layers_twice': ((8, 6, 12), P(('fsdp', 'tensor')), _SPEC(1, 2)),
  'heads': ((16, 4, 24), P('fsdp', 'tensor'), _SPEC(0, (1, 2))),
  'down': ((8, 96, 16), P(None, 'tensor', 'fsdp'), _SPEC(1, 2)),
  'fused': ((16, 288), P('fsdp', 'tensor'), _FUSED(0, 1, 3)),
  'bias': ((96,), P('tensor'), None),
  'biases_of_layers': ((8, 96), P('fsdp', 'tensor'), _SPEC((), 1)),
  'scalar': ((), P(), None),
}
# Their matrices lie on one device each: there is nothing to send.
_WHOLE = ('replicated', 'scalar', 'layers_twice')
# Of fused matrices, parts that begin within a shard are moved.
_SPLIT = tuple(x for x in _LAYOUTS if x not in (*_WHOLE, 'fused', 'down'))
_SOME = ('rows_columns', 'layers', 'bias')
# Matrices of one size, which Muon computes together.
_OF_ONE_SIZE = ('rows_columns', 'down', 'fused', 'bias')


def _specs(params):
  """Returns dimension numbers, also of placeholders of `map_params`."""
  return {name: _LAYOUTS[name][2] for name in params}


_WITH_SPECS = {'weight_dimension_numbers': _specs}
_SCHEDULE = optax.linear_schedule(0.1, 0.02, 8)


class _Rule(NamedTuple):
  """An optimizer, and the difference that is allowed.

  It is a fraction of the largest number; zero compares bits.
  """

  optimizer: optax.GradientTransformation
  bound: float


def _of_hidden_matrices(build, **settings):
  """Returns Muon or Hyperball; others take what is no matrix."""

  def hidden(params):
    return {name: np.size(_LAYOUTS[name][0]) > 1 for name in params}

  def places(params):
    return {name: _LAYOUTS[name][1] for name in params}

  optimizer = build(
    _SCHEDULE, hidden=hidden, shardings=places, **_WITH_SPECS, **settings
  )
  return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


# Rounding errors of a norm may change how numbers are rounded to 16 bits.
# (Found: 1e-6 in float32, 3e-3 in bfloat16 and 1e-3 in float16.)
_RULES = {
  'merit': _Rule(
    merit_optax.merit(_SCHEDULE, weight_decay=0.1, **_WITH_SPECS),
    0,
  ),
  # The kit: of maxima alone, and with sums of squares.
  'max': _Rule(
    optax.chain(
      optax.scale_by_lion(),
      merit_optax.scale_by_max_norm_trust_ratio(**_WITH_SPECS),
      optax.scale_by_learning_rate(0.125),
      merit_optax.keep_matrix_norms('max', **_WITH_SPECS),
    ),
    0,
  ),
  'l2': _Rule(
    optax.chain(
      merit_optax.scale_by_adam(),
      merit_optax.scale_by_lmo('row', **_WITH_SPECS),
      merit_optax.scale_by_shape(lambda m, n: (m * n) ** 0.25, **_WITH_SPECS),
      optax.add_decayed_weights(0.1),
      merit_optax.scale_by_l2_norm_trust_ratio(
        min_ratio=0.1, max_ratio=5.0, calibrate=True, **_WITH_SPECS
      ),
      optax.scale_by_learning_rate(0.02),
      merit_optax.keep_matrix_norms('l2', **_WITH_SPECS),
    ),
    1e-5,
  ),
  'muon': _Rule(_of_hidden_matrices(merit_optax.muon, weight_decay=0.1), 1e-5),
  'hyperball': _Rule(_of_hidden_matrices(merit_optax.muon_hyperball), 1e-5),
  'hyperball-bfloat16': _Rule(
    _of_hidden_matrices(merit_optax.muon_hyperball, ns_dtype='bfloat16'),
    2e-2,
  ),
  'hyperball-float16': _Rule(
    _of_hidden_matrices(merit_optax.muon_hyperball, ns_dtype='float16'),
    1e-2,
  ),
}


def _shardings(mesh, names):
  return {name: NamedSharding(mesh, _LAYOUTS[name][1]) for name in names}


def _arrays(names, seed):
  order = list(_LAYOUTS)
  return {
    name: np.array(normal([seed, order.index(name)], _LAYOUTS[name][0]))
    for name in names
  }


def _params_and_gradients(names, dtype):
  """Returns arrays on one device.

  Some parameters are beyond the clip, some have vanished; a column has no
  gradients.
  """
  params, *gradients = (_arrays(names, seed) for seed in range(5))
  for i, name in enumerate(params):
    params[name] *= (1 / 3, 1, 3)[i % 3]
  params['rows_columns'][3] = 0
  if 'biases_of_layers' in names:
    params['biases_of_layers'][:] = 0
  for gradient in gradients:
    gradient['rows_columns'][:, 5] = 0
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, gradients))


def _run(step, params, state, gradients):
  for gradient in gradients:
    params, state = step(params, state, gradient)
  return params, state


@functools.cache
def _run_on_one_device(rule, names, dtype):
  optimizer, _ = _RULES[rule]
  params, gradients = _params_and_gradients(names, dtype)
  step = jax.jit(step_function(optimizer), compiler_options=_ROUND_AS_WRITTEN)
  state = optimizer.init(params)
  # Specs name axes, of whatever size.
  with jax.set_mesh(make_mesh(**dict.fromkeys(_MESHES[0], 1))):
    return _run(step, params, state, gradients)


def _assert_sharded_as(tree, shardings):
  def check(path, x, sharding):
    assert x.sharding.is_equivalent_to(sharding, x.ndim), (path, x.sharding)

  jax.tree.map_with_path(check, tree, shardings)


_MESH = {'fsdp': 4, 'tensor': 2}
_AUTO, _EXPLICIT = AxisType.Auto, AxisType.Explicit
_SIZES = ((1, 8, 1), (8, 1, 1), (4, 2, 1), (1, 2, 4), (2, 2, 2))
_MESHES = [
  dict(zip(('data', 'fsdp', 'tensor'), sizes, strict=True)) for sizes in _SIZES
]
_SLOW = [
  *itertools.product(('muon',), _MESHES, (_AUTO, _EXPLICIT)),
  *itertools.product(
    ('hyperball', 'hyperball-bfloat16', 'hyperball-float16'),
    _MESHES[3:4],
    (_AUTO, _EXPLICIT),
  ),
]


@pytest.mark.parametrize(
  'rule, names, sizes, axis_type, dtype, are_params_sharded',
  [
    ('merit', _SPLIT, _MESH, _AUTO, 'float32', True),
    ('merit', _SOME, _MESH, _EXPLICIT, 'float32', True),
    ('merit', _SOME, _MESH, _AUTO, 'bfloat16', True),
    # Only the moments, as in ZeRO-1.
    ('merit', _SOME, _MESH, _AUTO, 'float32', False),
    ('max', _SOME, _MESH, _EXPLICIT, 'float32', True),
    ('l2', _SOME, _MESH, _AUTO, 'float32', True),
    ('hyperball', _OF_ONE_SIZE, _MESHES[-1], _AUTO, 'float32', True),
    *(
      pytest.param(
        rule,
        _OF_ONE_SIZE,
        *(sizes, axis_type, 'float32', True),
        marks=pytest.mark.slow,
      )
      for rule, sizes, axis_type in _SLOW
    ),
  ],
)
def test_steps_are_those_of_one_device(
  rule, names, sizes, axis_type, dtype, are_params_sharded, request
):
  optimizer, bound = _RULES[rule]
  if not bound:  # Which bits come out depends on how XLA fuses operations.
    request.getfixturevalue('full_compilation')
  params, gradients = _params_and_gradients(names, dtype)
  mesh = make_mesh(axis_type, **sizes)
  shardings = _shardings(mesh, names)
  whole = dict.fromkeys(names, NamedSharding(mesh, P()))
  places = shardings if are_params_sharded else whole
  split = jax.device_put(params, shardings)
  places = places, merit_optax.state_shardings(optimizer, split)
  # On Auto axes jit would leave the zeros of a new state replicated. On
  # Explicit ones the types of the arguments say it all.
  outputs = places if axis_type == _AUTO else (None, None)
  params = jax.device_put(params, places[0])
  gradients = jax.device_put(gradients, [places[0]] * len(gradients))
  step = jax.jit(
    step_function(optimizer),
    out_shardings=outputs,
    compiler_options=_ROUND_AS_WRITTEN,
  )
  # MERIT needs no mesh besides the mesh of the arrays.
  is_set = axis_type == _EXPLICIT or 'merit' not in rule
  with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
    state = jax.jit(optimizer.init, out_shardings=outputs[1])(params)
    actual = _run(step, params, state, gradients)
  _assert_sharded_as((state, *actual), (places[1], *places))
  expected = _run_on_one_device(rule, names, dtype)
  if not bound:
    assert_same_bits(actual, expected)
  pairs = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
  for x, y in pairs:
    np.testing.assert_allclose(x, y, rtol=0, atol=bound * np.abs(y).max())


# Functions that are no optimizers.


def _clip_heads(axis):
  """Returns QK-clip, of kernels whose heads have an axis or share one."""
  heads = merit_optax.AttentionHeads(axis)
  transform = merit_optax.qk_clip(
    20.0, query={'query': heads}, key={'key': heads}
  )

  def clip(updates, params, logits):
    return transform.update(
      updates, transform.init(params), params, max_logits=logits
    )[0]

  return clip


def _qk(seed, shape):
  return {name: normal([seed, i], shape) for i, name in enumerate(_QK)}


_QK = ('query', 'key')
_KERNELS = dict.fromkeys(_QK, P('y', 'x'))
_LOGITS = jnp.array([5.0, 80.0, 20.0, 90.0])
_CLIPPED = (_qk(0, (8, 4, 6)), _qk(1, (8, 4, 6)), _LOGITS)
_CLIPPED_FLAT = (_qk(0, (8, 24)), _qk(1, (8, 24)), _LOGITS)
_MATRICES = (_qk(0, (8, 12)), _qk(1, (8, 12)))
_ATTENTION = (normal(0, (2, 20, 4, 8)), normal(1, (2, 20, 2, 8)))


def _merit_statistics(gradients, params):
  state = merit_optax.merit(0.1).init(params)
  return merit_optax.merit_statistics(0.1)(gradients, state, params)


@pytest.mark.parametrize(
  'function, arguments, axis_type, specs, bound',
  [
    (_clip_heads(-2), _CLIPPED, _AUTO, (_KERNELS, _KERNELS, P('y')), 0),
    (_clip_heads(-2), _CLIPPED, _EXPLICIT, (_KERNELS, _KERNELS, P('y')), 0),
    # Heads and their features in one axis.
    (_clip_heads(-1), _CLIPPED_FLAT, _EXPLICIT, (_KERNELS, _KERNELS, P()), 0),
    *(
      (function, _MATRICES, _EXPLICIT, (_KERNELS, _KERNELS), 1e-5)
      for function in (_merit_statistics, merit_optax.update_statistics)
    ),
    *(
      (merit_optax.attention_statistics, _ATTENTION, _EXPLICIT, specs, 1e-5)
      for specs in ((P('y', None, None, 'x'),) * 2, (P(None, 'x', 'y'),) * 2)
    ),
  ],
)
def test_functions_return_what_one_device_returns(
  function, arguments, axis_type, specs, bound
):
  function = jax.jit(function)
  mesh = make_mesh(axis_type, x=4, y=2)
  places = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
  actual = function(*jax.device_put(arguments, places))
  chex.assert_trees_all_close(
    *jax.device_get((actual, function(*arguments))), rtol=bound
  )


# Communication.


def _compile_step(params, shardings, mesh, **options):
  """Returns the collectives of update and application."""
  optimizer = merit_optax.merit(0.1, weight_decay=0.1, **options)
  params = jax.device_put(params, shardings)
  places = shardings, merit_optax.state_shardings(optimizer, params)
  with jax.set_mesh(mesh):
    arguments = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      (params, jax.eval_shape(optimizer.init, params), params),
      (*places, shardings),
    )
    step = jax.jit(step_function(optimizer), out_shardings=places)
    return collectives(step.lower(*arguments).compile().as_text())


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


@pytest.mark.parametrize(
  'names, axis_type',
  [(_SPLIT, _AUTO), (_SOME, _EXPLICIT), (_WHOLE, _AUTO)],
)
@pytest.mark.usefixtures('full_compilation')
def test_merit_sends_only_norms(names, axis_type):
  mesh = make_mesh(axis_type, **_MESH)
  found = _compile_step(
    {name: jnp.zeros(_LAYOUTS[name][0]) for name in names},
    _shardings(mesh, names),
    mesh,
    **_WITH_SPECS,
  )
  if names == _WHOLE:
    assert found == []
    return
  assert {kind for kind, _ in found} == {'all-reduce'}
  sizes = [size for _, sizes in found for size in sizes]
  most = {name: _most_numbers(*_LAYOUTS[name][::2]) for name in names}
  assert sum(sizes) <= sum(most.values())
  # The norms of all columns; a shard of a matrix has twice as many numbers.
  assert max(sizes) <= 96


@pytest.mark.usefixtures('full_compilation')
def test_all_reduces_of_an_unrolled_model_are_combined():
  mesh = make_mesh(**_MESH)
  layer = {
    'up': ((32, 64), P('fsdp', 'tensor')),
    'down': ((64, 32), P('tensor', 'fsdp')),
    'bias': ((64,), P('tensor')),
  }
  params = {name: jnp.zeros(shape) for name, (shape, _) in layer.items()}
  shardings = {k: NamedSharding(mesh, spec) for k, (_, spec) in layer.items()}
  found = {
    num_layers: _compile_step(
      {str(i): params for i in range(num_layers)},
      {str(i): shardings for i in range(num_layers)},
      mesh,
    )
    for num_layers in (1, 6)
  }
  # Three norms of weight and update for a matrix, one for a bias.
  assert sum(len(sizes) for _, sizes in found[6]) >= 6 * (2 * 6 + 2)
  assert len(found[6]) <= len(found[1])
