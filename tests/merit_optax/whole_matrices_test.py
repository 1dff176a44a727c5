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
from tests.merit_optax.arrays import make_mesh, normal

# As users compile.
pytestmark = pytest.mark.usefixtures('full_compilation')

_SPEC = optax.contrib.MuonDimensionNumbers(1, 2)


def _sent(mesh, name='fsdp', **settings):
  """Returns the kinds of collectives of an update of matrices, and its text."""
  transform = merit_optax.scale_by_muon(
    ns_steps=1, weight_dimension_numbers=_SPEC, **settings
  )
  sharding = NamedSharding(mesh, P(None, name))
  array = jax.ShapeDtypeStruct((8, 64, 128), jnp.float32, sharding=sharding)
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(transform.init, array),
    merit_optax.state_shardings(transform, array),
  )
  update = jax.jit(transform.update, out_shardings=(sharding, None))
  text = update.lower(array, state).compile().as_text()
  kinds = re.findall(r' (all-[\w-]+?|collective-permute)(?:-start)?\(', text)
  return sorted(set(kinds)), text


@pytest.mark.parametrize('name', ['fsdp', 'x'])
def test_whole_matrices_are_moved_instead_of_split_products(name):
  mesh = make_mesh(**{name: 8})
  kinds, text = _sent(mesh, name)
  assert kinds == ['all-to-all']
  # With all rows.
  assert re.search(r'f32\[1,64,128\]', text)
  left_to_the_compiler, _ = _sent(mesh, name, mesh_axes=None)
  assert left_to_the_compiler != kinds


def test_axes_of_copies_are_used_only_if_named():
  mesh = make_mesh(data=4, fsdp=2)
  _, text = _sent(mesh)
  assert re.search(r'f32\[4,64,128\]', text)
  _, text = _sent(mesh, mesh_axes=('fsdp', 'data'))
  assert re.search(r'f32\[1,64,128\]', text)


@pytest.mark.filterwarnings('error')
def test_a_mesh_of_copies_sends_nothing():
  kinds, _ = _sent(make_mesh(data=8, fsdp=1))
  assert not kinds


def test_unknown_axis_names_give_a_warning():
  mesh = make_mesh(data=4, model=2)
  with pytest.warns(
    UserWarning, match="'model': 2.*Name the axes by mesh_axes"
  ):
    kinds, _ = _sent(mesh, 'model')
  with warnings.catch_warnings(action='error'):
    assert _sent(mesh, 'model', mesh_axes='model')[0] != kinds


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
