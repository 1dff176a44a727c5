"""Muon on meshes: what is sent, and which axes matrices are spread over.

That its steps are those of one device is tested in `mesh_test`.
"""

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
from merit_optax._internal import sharding
from tests.merit_optax.arrays import collectives, make_mesh, normal

# As users compile.
pytestmark = pytest.mark.usefixtures('full_compilation')

_SPEC = optax.contrib.MuonDimensionNumbers(-2, -1)


def _sent(mesh, *specs, shape=(8, 64, 128), **settings):
  """Returns the collectives of an update of such arrays, and its program.

  Nothing but the arguments tells where updates belong.
  """
  transform = merit_optax.scale_by_muon(
    ns_steps=1, weight_dimension_numbers=_SPEC, **settings
  )
  arrays = [
    jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    for spec in specs
  ]
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(transform.init, arrays),
    merit_optax.state_shardings(transform, arrays),
  )
  compiled = jax.jit(transform.update).lower(arrays, state).compile()
  for x, found in zip(arrays, compiled.output_shardings[0], strict=True):
    assert found.is_equivalent_to(x.sharding, x.ndim), (x.sharding, found)
  return collectives(compiled.as_text()), compiled.as_text()


def _kinds(found):
  return {kind for kind, _ in found}


@pytest.mark.parametrize('name', ['fsdp', 'x'])
def test_whole_matrices_are_moved_instead_of_split_products(name):
  mesh = make_mesh(**{name: 8})
  found, text = _sent(mesh, P(None, name))
  assert _kinds(found) == {'all-to-all'}
  # With all rows.
  assert re.search(r'f32\[1,64,128\]', text)
  left_to_the_compiler, _ = _sent(mesh, P(None, name), mesh_axes=None)
  assert _kinds(left_to_the_compiler) != {'all-to-all'}


# Of what a device holds of a matrix, two moves bring it to whole matrices and
# two back. Where two axes stand in the order of the mesh neither in one axis
# nor in two, devices swap their shards as well.
_PLACES = {
  (None, 'fsdp', 'tensor'): 4,
  (None, 'tensor', 'fsdp'): 6,
  (None, ('fsdp', 'tensor')): 2,
  (None, ('tensor', 'fsdp')): 4,
  (None, None, ('fsdp', 'tensor')): 4,
  (None, None, ('tensor', 'fsdp')): 6,
}
_NO_GATHER = {'all-to-all', 'collective-permute'}
_needs_shard_alike = pytest.mark.skipif(
  sharding.shard_alike is None,
  reason='of jax below 0.12; without it some orders of axes gather',
)


@pytest.mark.parametrize(
  'axis_type',
  [pytest.param(AxisType.Auto, marks=_needs_shard_alike), AxisType.Explicit],
)
@pytest.mark.parametrize('place', _PLACES, ids=str)
def test_no_order_of_two_axes_gathers_matrices(place, axis_type):
  mesh = make_mesh(axis_type, fsdp=4, tensor=2)
  found, _ = _sent(mesh, P(*place))
  assert _kinds(found) <= _NO_GATHER
  shard = 8 * 64 * 128 // 8
  assert sum(sum(sizes) for _, sizes in found) <= _PLACES[place] * shard
  # Matrices of one shape are one stack, though they lie in other ways.
  specs = P(*place[1:]), P(*reversed((place + (None,))[1:3]))
  found, _ = _sent(mesh, *specs * 4, shape=(64, 64))
  assert _kinds(found) <= _NO_GATHER


@_needs_shard_alike
@pytest.mark.parametrize(
  'place, order, moves',
  [
    # Layers or experts are where they belong.
    (('fsdp', 'tensor'), ('fsdp', 'tensor'), 2),
    (('tensor', None, 'fsdp'), ('tensor', 'fsdp'), 2),
    # The minor axis first.
    ((None, ('fsdp', 'tensor')), ('tensor', 'fsdp'), 4),
    ((None, None, ('tensor', 'fsdp')), ('fsdp', 'tensor'), 4),
    ((None, 'fsdp', 'tensor'), ('tensor', 'fsdp'), 4),
  ],
  ids=str,
)
def test_matrices_move_over_named_axes_in_their_order(place, order, moves):
  mesh = make_mesh(fsdp=4, tensor=2)
  found, _ = _sent(mesh, P(*place), mesh_axes=order)
  assert _kinds(found) == {'all-to-all'}
  shard = 8 * 64 * 128 // 8
  assert sum(sum(sizes) for _, sizes in found) == moves * shard


def test_axes_of_copies_are_used_only_if_named():
  mesh = make_mesh(data=4, fsdp=2)
  _, text = _sent(mesh, P(None, 'fsdp'))
  assert re.search(r'f32\[4,64,128\]', text)
  _, text = _sent(mesh, P(None, 'fsdp'), mesh_axes=('fsdp', 'data'))
  assert re.search(r'f32\[1,64,128\]', text)


@pytest.mark.filterwarnings('error')
def test_a_mesh_of_copies_sends_nothing():
  found, _ = _sent(make_mesh(data=8, fsdp=1), P(None, 'fsdp'))
  assert not found


def test_unknown_axis_names_give_a_warning():
  mesh = make_mesh(data=4, model=2)
  with pytest.warns(
    UserWarning, match="'model': 2.*Name the axes by mesh_axes"
  ):
    found, _ = _sent(mesh, P(None, 'model'))
  with warnings.catch_warnings(action='error'):
    named, _ = _sent(mesh, P(None, 'model'), mesh_axes='model')
  assert _kinds(named) != _kinds(found)


def test_an_axis_that_the_mesh_lacks_is_named():
  transform = merit_optax.scale_by_muon(mesh_axes='fsdp', ns_steps=1)
  alone = jnp.ones((8, 8))
  transform.update(alone, transform.init(alone))  # Not without a mesh.
  array = jax.device_put(alone, NamedSharding(make_mesh(x=8), P('x')))
  with pytest.raises(ValueError, match=r"^mesh_axes must name axes .*'fsdp'"):
    jax.jit(transform.update)(array, transform.init(array))


def _updates(transform, gradients):
  return jax.jit(transform.update)(gradients, transform.init(gradients))[0]


def test_arrays_beside_those_on_an_explicit_mesh():
  mesh = make_mesh(AxisType.Explicit, fsdp=8)
  gradients = {'alone': normal(0, (8, 8)), 'split': normal(1, (16, 8))}
  split = jax.device_put(gradients['split'], NamedSharding(mesh, P('fsdp')))
  transform = merit_optax.scale_by_muon(ns_steps=1)
  found = _updates(transform, gradients | {'split': split})
  expected = _updates(transform, gradients)
  chex.assert_trees_all_close(*jax.device_get((found, expected)), atol=1e-5)


@pytest.mark.skipif(
  jax.__version_info__ < (0, 8), reason='jax 0.7 has no constraints there'
)
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_within_a_shard_map_over_some_axes(axis_type):
  mesh = make_mesh(axis_type, data=2, fsdp=4)
  transform = merit_optax.scale_by_muon(ns_steps=1)
  gradients = normal(0, (16, 24))
  within = jax.shard_map(
    lambda g: transform.update(g, transform.init(g))[0],
    mesh=mesh, in_specs=P(), out_specs=P(), axis_names={'data'},
    check_vma=False,
  )  # fmt: skip
  found = jax.jit(within)(jax.device_put(gradients, NamedSharding(mesh, P())))
  expected = _updates(transform, gradients)
  np.testing.assert_allclose(found, expected, atol=1e-5)
