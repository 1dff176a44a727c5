"""Muon on meshes: what is sent, and where updates lie.

That several of its steps are those of one device is tested in `mesh_test`.
"""

import contextlib
import itertools
import math
import warnings

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import merit_optax
from merit_optax.matrices import whole_matrices
from merit_optax.matrices.shardings import names_by_axis
from tests.merit_optax.arrays import collectives, make_mesh, normal

# As users compile.
pytestmark = pytest.mark.usefixtures('full_compilation')

_SPEC = optax.contrib.MuonDimensionNumbers
_FUSED = merit_optax.FusedDimensionNumbers
_SIZES = ((8,), (2, 4), (4, 2), (1, 8), (2, 2, 2))
# Axes of an array, and the spec of its matrices.
_KINDS = {
  'matrix': (2, _SPEC(0, 1)),
  'layers': (3, _SPEC(1, 2)),
  'heads': (3, _SPEC(0, (1, 2))),
  'experts': (4, _SPEC(2, 3)),
  'fused': (2, _FUSED(0, 1, 2)),
  'transposed': (3, _SPEC(2, 0)),
}


@st.composite
def _meshes(draw):
  sizes = draw(st.sampled_from(_SIZES))
  names = draw(st.permutations(['data', 'fsdp', 'tensor']))[: len(sizes)]
  return dict(zip(names, sizes, strict=True))


@st.composite
def _specs(draw, mesh, ndim):
  """Draws which axes of an array the axes of a mesh split, in any order."""
  entries = [()] * ndim
  for name in draw(st.permutations(sorted(mesh))):
    axis = draw(st.integers(-1, ndim - 1))
    if axis >= 0:
      entries[axis] = (*entries[axis], name)
  return P(*[x or None for x in entries])


@st.composite
def _arrays(draw, mesh):
  """Draws the kind, shape and spec of an array."""
  kind = draw(st.sampled_from(sorted(_KINDS)))
  ndim, _ = _KINDS[kind]
  spec = draw(_specs(mesh, ndim))
  shape = []
  for names in names_by_axis(spec, ndim):
    count = math.prod(mesh[name] for name in names)
    shape.append(count * draw(st.sampled_from([2, 4])))
  return kind, tuple(shape), spec


@st.composite
def _cases(draw):
  mesh = draw(_meshes())
  arrays = draw(st.lists(_arrays(mesh), min_size=1, max_size=3))
  # Layers that are not stacked share their shape and spec.
  repeats = draw(st.integers(1, 3))
  return mesh, arrays * repeats


def _moved(kind, shape, spec, mesh):
  """Returns the matrices of an array, and the axes of the mesh that split."""
  ndim, numbers = _KINDS[kind]
  named = {
    int(axis) % ndim
    for axes in numbers[:2]
    for axis in np.atleast_1d(axes).tolist()
  }
  counts = [
    math.prod(mesh[name] for name in names)
    for names in names_by_axis(spec, ndim)
  ]
  moves = [counts[axis] for axis in sorted(named) if counts[axis] > 1]
  return moves, math.prod(shape) // math.prod(counts)


@given(
  _cases(), st.sampled_from([AxisType.Auto, AxisType.Explicit]), st.booleans()
)
def test_only_pieces_of_split_matrices_are_exchanged(case, axis_type, is_set):
  sizes, arrays = case
  mesh = make_mesh(axis_type, **sizes)
  numbers = [_KINDS[kind][1] for kind, _, _ in arrays]
  places = [NamedSharding(mesh, spec) for _, _, spec in arrays]
  gradients = [normal(i, shape) for i, (_, shape, _) in enumerate(arrays)]

  def transform(shardings):
    return merit_optax.scale_by_muon(
      ns_steps=2, weight_dimension_numbers=numbers, shardings=shardings
    )

  on_mesh, alone = transform(places), transform(None)
  state = alone.init(gradients)
  split = jax.device_put(gradients, places)
  split_state = jax.device_put(
    state, merit_optax.state_shardings(on_mesh, split)
  )
  with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
    compiled = jax.jit(on_mesh.update).lower(split, split_state).compile()
  updates, new_state = compiled(split, split_state)
  for tree in (updates, new_state.mu):
    for x, place in zip(tree, places, strict=True):
      assert x.sharding.is_equivalent_to(place, x.ndim)
  expected, _ = jax.jit(alone.update)(gradients, state)
  for x, y in zip(updates, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=2e-4)

  found = collectives(compiled.as_text())
  assert {kind for kind, _ in found} <= {'all-to-all'}
  most = 0
  for moves, size in (_moved(*array, sizes) for array in arrays):
    # There and back along each axis, padded to a matrix for each device.
    most += 2 * len(moves) * size * math.prod(moves)
  assert sum(sum(sizes) for _, sizes in found) <= most


def _compiled(mesh, spec, count, shape=(64, 256), **settings):
  """Returns the update of matrices and the transposed ones, compiled."""
  transform = merit_optax.scale_by_muon(**settings)
  place = NamedSharding(mesh, spec)
  arrays = [
    jax.ShapeDtypeStruct(x, jnp.float32, sharding=place)
    for x in (shape, shape[::-1])
  ] * count
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(transform.init, arrays),
    merit_optax.state_shardings(transform, arrays),
  )
  return jax.jit(transform.update).lower(arrays, state).compile()


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
  'sizes, spec, expected',
  [
    ({'data': 2, 'fsdp': 4}, P('fsdp'), 2 / 3),
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, P('fsdp', 'tensor'), 4 / 3),
    ({'replica': 2, 'fsdp': 4}, P(('replica', 'fsdp')), 2 / 3),
    ({'data': 8}, P(), 0),
  ],
  ids=str,
)
def test_three_layers_send_what_is_needed(sizes, spec, expected, axis_type):
  mesh = make_mesh(axis_type, **sizes)
  compiled = _compiled(mesh, spec, 3, shardings=spec)
  # An Auto mesh that is not set has to come with the shardings.
  compiled = _compiled(mesh, spec, 3, shardings=NamedSharding(mesh, spec))
  found = collectives(compiled.as_text())
  assert {kind for kind, _ in found} <= {'all-to-all'}
  full = 6 * 64 * 256
  assert sum(sum(x) for _, x in found) == pytest.approx(expected * full)
  share = compiled.memory_analysis().temp_size_in_bytes / (4 * full)
  assert share <= (1 if expected else 4.5)


def test_on_auto_axes_without_shardings_matrices_spread_over_usual_axes():
  mesh = make_mesh(data=2, fsdp=4)
  text = _compiled(mesh, P(None, 'fsdp'), 4).as_text()
  assert 'f32[2,64,256]' in text
  # The only axis of a mesh may hold copies.
  with jax.set_mesh(make_mesh(x=8)):
    found = collectives(_compiled(make_mesh(x=8), P(), 4).as_text())
  assert not found


def test_init_warns_of_parameters_that_auto_axes_split():
  mesh = make_mesh(fsdp=8)
  split = {
    'w': jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P('fsdp')))
  }
  with pytest.warns(UserWarning, match=r"'w' lies on.*shardings=jax.tree.map"):
    merit_optax.scale_by_muon().init(split)
  copied = jax.device_put(split, NamedSharding(mesh, P()))
  with warnings.catch_warnings(action='error'):
    merit_optax.scale_by_muon(shardings=P('fsdp')).init(split)
    merit_optax.scale_by_muon().init(copied)


@pytest.mark.parametrize(
  'shardings, words',
  [
    (
      P('data'),
      r"must name axes of the mesh \('fsdp',\), got .*'data'.* for 'w'",
    ),
    (P(None, None, 'fsdp'), "must divide.*for 'w'"),
    (P(None, 'fsdp'), r"must divide.*for 'w' of shape \(16, 12\)"),
    ({'v': P('fsdp')}, "must hold .* for 'w', got none"),
    ({'w': 'fsdp'}, "must hold .* for 'w', got 'fsdp'"),
    (lambda params: {'w': 3}, "must hold .* for 'w', got 3"),
  ],
)
def test_shardings_that_do_not_fit_are_named(shardings, words):
  transform = merit_optax.scale_by_muon(shardings=shardings)
  params = {'w': jnp.ones((16, 12))}
  with (
    jax.set_mesh(make_mesh(fsdp=8)),
    pytest.raises(ValueError, match=f'^shardings {words}'),
  ):
    jax.jit(transform.update)(params, transform.init(params))


@pytest.mark.parametrize('shardings', [{'v': P()}, lambda _: {'v': P()}])
def test_incomplete_shardings_are_refused_before_a_step(shardings):
  params = dict.fromkeys('vw', jnp.eye(8))
  optimizer = merit_optax.muon(0.1, hidden='v|w', shardings=shardings)
  with pytest.raises(ValueError, match="^shardings must hold .* for 'w'"):
    optimizer.init(params)
  table = merit_optax.describe(params, optimizer)
  assert '\ninit raises: shardings must hold ' in table


def test_specs_need_a_mesh():
  params = {'w': jnp.ones((16, 8))}
  transform = merit_optax.scale_by_muon(shardings=P('fsdp'))
  with pytest.raises(ValueError, match=r'^shardings name axes .*jax.set_mesh'):
    transform.update(params, transform.init(params))
  copied = merit_optax.scale_by_muon(shardings=P())
  copied.update(params, copied.init(params))


def _updates(transform, gradients):
  return jax.jit(transform.update)(gradients, transform.init(gradients))[0]


def test_arrays_beside_those_on_an_explicit_mesh():
  mesh = make_mesh(AxisType.Explicit, fsdp=8)
  gradients = {'alone': normal(0, (8, 8)), 'split': normal(1, (16, 8))}
  split = jax.device_put(gradients['split'], NamedSharding(mesh, P('fsdp')))
  transform = merit_optax.scale_by_muon(ns_steps=1)
  found = _updates(transform, gradients | {'split': split})
  expected = _updates(transform, gradients)
  for name, x in expected.items():
    np.testing.assert_allclose(found[name], x, atol=1e-5)


@pytest.mark.parametrize(
  'axis_type, shardings',
  [
    (AxisType.Auto, P('fsdp')),
    (AxisType.Auto, P(('data', 'fsdp'))),
    (AxisType.Auto, None),
    (AxisType.Explicit, None),
  ],
)
def test_within_a_shard_map_over_some_axes(axis_type, shardings):
  mesh = make_mesh(axis_type, data=2, fsdp=4)
  transform = merit_optax.scale_by_muon(ns_steps=1, shardings=shardings)
  gradients = normal(0, (16, 24))
  within = jax.shard_map(
    lambda g: transform.update(g, transform.init(g))[0],
    mesh=mesh, in_specs=P(), out_specs=P(), axis_names={'data'},
    check_vma=False,
  )  # fmt: skip
  found = jax.jit(within)(jax.device_put(gradients, NamedSharding(mesh, P())))
  expected = _updates(merit_optax.scale_by_muon(ns_steps=1), gradients)
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize('names', [None, 'data'])
def test_under_vmap(names):
  mesh = make_mesh(data=2, fsdp=4)
  transform = merit_optax.scale_by_muon(ns_steps=1, shardings=P('fsdp'))
  gradients = normal(0, (4, 16, 24))
  with jax.set_mesh(mesh):
    found = jax.jit(
      jax.vmap(lambda g: _updates(transform, g), spmd_axis_name=names)
    )(jax.device_put(gradients, NamedSharding(mesh, P(names, 'fsdp'))))
  alone = merit_optax.scale_by_muon(ns_steps=1)
  expected = jax.vmap(lambda g: _updates(alone, g))(gradients)
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize('ndim', [2, 3])
def test_empty_arrays_stay(ndim):
  mesh = make_mesh(fsdp=8)
  transform = merit_optax.scale_by_muon(
    shardings=P(), weight_dimension_numbers=_SPEC(-2, -1)
  )
  gradients = [jnp.zeros((0, 4, 4)[-ndim:]), jnp.ones((8, 8))]
  with jax.set_mesh(mesh):
    found = _updates(transform, gradients)
  assert [x.shape for x in found] == [x.shape for x in gradients]


def test_steps_do_not_depend_on_the_order_of_axes():
  gradients = normal(0, (64, 32))
  expected = _updates(merit_optax.scale_by_muon(), gradients)
  for names in itertools.permutations(('data', 'fsdp', 'tensor')):
    mesh = make_mesh(**dict.fromkeys(names, 2))
    place = NamedSharding(mesh, P(('tensor', 'data'), 'fsdp'))
    transform = merit_optax.scale_by_muon(shardings=place)
    found = _updates(transform, jax.device_put(gradients, place))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_many_matrices_are_computed_a_few_at_a_time(monkeypatch):
  gradients = {'stack': normal(0, (6, 8, 8)), 'tall': normal(1, (5, 12, 8))}
  transform = merit_optax.scale_by_muon(weight_dimension_numbers=_SPEC(-2, -1))
  expected = _updates(transform, gradients)
  monkeypatch.setattr(whole_matrices, '_MOST_AT_ONCE', 200)
  transform = merit_optax.scale_by_muon(weight_dimension_numbers=_SPEC(-2, -1))
  found = _updates(transform, gradients)
  state = transform.init(gradients)
  program = str(jax.make_jaxpr(transform.update)(gradients, state))
  # Pieces of 3 x 64 elements, and of 96.
  assert 'f32[2,3,8,8]' in program and 'f32[5,1,8,12]' in program
  for name, x in expected.items():
    np.testing.assert_allclose(found[name], x, atol=1e-5)
