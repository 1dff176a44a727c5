"""Muon and Hyperball on meshes: as on one device, and little that is sent."""

import functools
import itertools
import math
import re
import warnings

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import (
  make_mesh,
  normal,
  state_shardings,
  step_function,
)

# As users compile.
pytestmark = pytest.mark.usefixtures('full_compilation')

_Spec = optax.contrib.MuonDimensionNumbers
# Stacked and unstacked layers, heads, more and fewer matrices than devices.
_PARAMETERS = {
  'embedding': ((64, 32), P(('tensor', 'fsdp')), None),
  'qkv': ((6, 32, 4, 3, 24), P(None, 'fsdp', 'tensor'), _Spec(1, (2, 4))),
  'down': ((6, 96, 32), P(None, 'tensor', 'fsdp'), _Spec(1, 2)),
  'layer_0': ((32, 96), P('fsdp', 'tensor'), _Spec()),
  'layer_1': ((32, 96), P('fsdp', 'tensor'), _Spec()),
  'bias': ((96,), P('tensor'), None),
}
_AXES = ('data', 'fsdp', 'tensor')
_SIZES = ((1, 8, 1), (8, 1, 1), (4, 2, 1), (1, 2, 4), (2, 2, 2))
# dtype of products, the norm that is kept, and the largest difference allowed,
# as a fraction of the largest number. A rounding error of the norm may change
# how numbers are rounded to 16 bits. (Found: 1e-6, 3e-3 and 1e-3.)
_SETTINGS = (
  ('float32', 'initial', 1e-5),
  ('float32', None, 1e-5),  # Muon.
  ('bfloat16', 'current', 2e-2),
  ('float16', 'current', 1e-2),
)
_QUICK = [(x, (2, 2, 2), AxisType.Auto) for x in _SETTINGS[:2]]
_CASES = [
  pytest.param(*case, marks=() if case in _QUICK else pytest.mark.slow)
  for case in itertools.product(
    _SETTINGS, _SIZES, (AxisType.Auto, AxisType.Explicit)
  )
]


def _optimizer(ns_dtype, radius):
  settings = dict(
    hidden=lambda p: {k: _PARAMETERS[k][2] is not None for k in p},
    weight_dimension_numbers={k: x for k, (*_, x) in _PARAMETERS.items()},
    ns_dtype=ns_dtype,
  )
  schedule = optax.linear_schedule(0.1, 0.01, 20)
  if radius is None:
    optimizer = merit_optax.muon(schedule, weight_decay=0.1, **settings)
  else:
    optimizer = merit_optax.muon_hyperball(schedule, radius=radius, **settings)
  return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def _arrays(seed):
  return {
    name: normal([seed, i], shape)
    for i, (name, (shape, *_)) in enumerate(_PARAMETERS.items())
  }


def _shardings(mesh, optimizer, params):
  """Returns shardings of parameters and state, where dimensions allow."""

  def spec(shape, wanted):
    names = [(x,) if isinstance(x, str) else x or () for x in wanted]
    parts = [math.prod(mesh.shape[x] for x in each) for each in names]
    fits = [n % part == 0 for n, part in zip(shape, parts, strict=False)]
    return P(*(a if fit else None for a, fit in zip(wanted, fits, strict=True)))

  shardings = {
    name: NamedSharding(mesh, spec(shape, wanted))
    for name, (shape, wanted, _) in _PARAMETERS.items()
  }
  return shardings, state_shardings(optimizer, params, shardings, mesh)


def _run(step, params, state):
  for seed in range(1, 21):
    params, state = step(params, state, _arrays(seed))
  return params, state


@functools.cache
def _run_on_one_device(*settings):
  optimizer, params = _optimizer(*settings), _arrays(0)
  return _run(jax.jit(step_function(optimizer)), params, optimizer.init(params))


@pytest.mark.parametrize('settings, sizes, axis_type', _CASES)
def test_twenty_steps_are_those_of_one_device(settings, sizes, axis_type):
  *settings, bound = settings
  optimizer, params = _optimizer(*settings), _arrays(0)
  mesh = make_mesh(axis_type, **dict(zip(_AXES, sizes, strict=True)))
  places = _shardings(mesh, optimizer, params)
  step = jax.jit(
    step_function(optimizer),
    out_shardings=places if axis_type == AxisType.Auto else None,
  )
  found = _run(
    lambda p, s, g: step(p, s, jax.device_put(g, places[0])),
    *jax.device_put((params, optimizer.init(params)), places),
  )
  expected = jax.tree.leaves(_run_on_one_device(*settings))
  for x, y in zip(jax.tree.leaves(found), expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=bound * np.abs(y).max())


def _sent(mesh, name='fsdp', **settings):
  """Returns the kinds of collectives of an update of matrices, and its text."""
  transform = merit_optax.scale_by_muon(
    weight_dimension_numbers=_Spec(1, 2), **settings
  )
  sharding = NamedSharding(mesh, P(None, name))
  array = jax.ShapeDtypeStruct((8, 64, 128), jnp.float32, sharding=sharding)
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(transform.init, array),
    state_shardings(transform, array, sharding, mesh),
  )
  update = jax.jit(transform.update, out_shardings=(sharding, None))
  text = update.lower(array, state).compile().as_text()
  kinds = re.findall(r' (all-[\w-]+?|collective-permute)(?:-start)?\(', text)
  return sorted(set(kinds)), text


@pytest.mark.parametrize('name', ['fsdp', 'x'])
def test_matrices_are_moved_and_products_are_not_split(name):
  mesh = make_mesh(**{name: 8})
  kinds, text = _sent(mesh, name)
  assert kinds == ['all-to-all']
  # Whole ones: with all rows.
  assert re.search(r'f32\[1,64,128\]', text)
  left, _ = _sent(mesh, name, mesh_axes=None)
  assert left != kinds


def test_axes_of_copies_are_not_used_by_default():
  mesh = make_mesh(data=4, fsdp=2)
  _, text = _sent(mesh)
  assert re.search(r'f32\[4,64,128\]', text)
  _, text = _sent(mesh, mesh_axes=('fsdp', 'data'))
  assert re.search(r'f32\[1,64,128\]', text)


@pytest.mark.filterwarnings('error')
def test_a_mesh_of_copies_needs_no_axes():
  mesh = make_mesh(data=8, fsdp=1)
  kinds, _ = _sent(mesh)
  assert not kinds


def test_a_mesh_that_does_not_tell_its_axes_is_warned_of():
  mesh = make_mesh(data=4, model=2)
  with pytest.warns(
    UserWarning, match="'model': 2.*Name the axes by mesh_axes"
  ):
    kinds, _ = _sent(mesh, 'model')
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert _sent(mesh, 'model', mesh_axes=None)[0] == kinds
    assert _sent(mesh, 'model', mesh_axes='model')[0] != kinds


def test_an_axis_that_the_mesh_lacks_is_named():
  mesh = make_mesh(x=8)
  transform = merit_optax.scale_by_muon(mesh_axes='fsdp')
  alone = jnp.ones((8, 8))
  transform.update(alone, transform.init(alone))  # Not without a mesh.
  array = jax.device_put(alone, NamedSharding(mesh, P('x')))
  with pytest.raises(ValueError, match=r"^mesh_axes must name axes .*'fsdp'"):
    jax.jit(transform.update)(array, transform.init(array))


def _updates_alone(transform, gradients):
  return jax.jit(transform.update)(gradients, transform.init(gradients))[0]


def test_arrays_beside_those_on_an_explicit_mesh():
  mesh = make_mesh(AxisType.Explicit, fsdp=8)
  gradients = {'alone': normal(0, (8, 8)), 'split': normal(1, (16, 8))}
  split = jax.device_put(gradients['split'], NamedSharding(mesh, P('fsdp')))
  transform = merit_optax.scale_by_muon()
  found = _updates_alone(transform, gradients | {'split': split})
  expected = _updates_alone(transform, gradients)
  chex.assert_trees_all_close(*jax.device_get((found, expected)), atol=1e-5)


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('mesh_axes', ['auto', None])
def test_within_a_shard_map_over_some_axes(axis_type, mesh_axes):
  mesh = make_mesh(axis_type, data=2, fsdp=4)
  transform = merit_optax.scale_by_muon(mesh_axes=mesh_axes)
  gradients = normal(0, (16, 24))
  within = jax.shard_map(
    lambda g: transform.update(g, transform.init(g))[0],
    mesh=mesh, in_specs=P(), out_specs=P(), axis_names={'data'},
    check_vma=False,
  )  # fmt: skip
  found = jax.jit(within)(jax.device_put(gradients, NamedSharding(mesh, P())))
  expected = _updates_alone(transform, gradients)
  np.testing.assert_allclose(found, expected, atol=1e-5)
