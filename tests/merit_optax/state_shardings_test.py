"""The state of any optimizer lies on a mesh as its parameters do."""

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import make_mesh, normal, step_function

# No two have one shape, and none is that of another's rows or columns, so that
# the shape of a moment tells its parameter.
_LAYOUTS = {
  'mlp/up/kernel': ((16, 48), P('fsdp', 'tensor')),
  'mlp/up/table': ((3, 56), P(None, 'tensor')),
  'mlp/down/kernel': ((64, 24), P(('tensor', 'fsdp'))),
  'layers/kernel': ((8, 32, 40), P(None, 'fsdp', 'tensor')),
  'scale': ((72,), P()),
}
_SPEC = optax.contrib.MuonDimensionNumbers(-2, -1)
_OPTIMIZERS = {
  'adafactor': optax.adafactor(0.1, min_dim_size_to_factor=8, momentum=0.9),
  'adafactor, not factored': optax.adafactor(0.1, factored=False),
  'galore': optax.contrib.galore(0.1, rank=4),
  'sm3': optax.sm3(0.1),
  'lbfgs': optax.scale_by_lbfgs(3),
  'several steps': optax.MultiSteps(optax.adam(0.1), 2),
  'merit': merit_optax.merit(0.1, weight_dimension_numbers=_SPEC),
  'muon': merit_optax.muon(0.1, hidden='mlp/.*/kernel'),
  'hyperball': merit_optax.muon_hyperball(0.1, hidden='mlp/.*/kernel'),
}


def _params(mesh):
  flat = {
    path: jax.device_put(normal(0, shape), NamedSharding(mesh, spec))
    for path, (shape, spec) in _LAYOUTS.items()
  }
  return traverse_util.unflatten_dict(flat, sep='/')


@pytest.mark.parametrize('name', _OPTIMIZERS)
def test_moments_lie_as_parameters_and_all_else_is_copied(name):
  optimizer, mesh = _OPTIMIZERS[name], make_mesh(fsdp=4, tensor=2)
  params = _params(mesh)
  shardings = merit_optax.state_shardings(optimizer, params)
  state = jax.jit(optimizer.init, out_shardings=shardings)(params)
  places = jax.tree.map(lambda x: x.sharding, params), shardings
  step = jax.jit(step_function(optimizer), out_shardings=places)
  _, state = step(params, state, params)
  specs = dict(_LAYOUTS.values())
  for x in jax.tree.leaves(state):
    expected = NamedSharding(mesh, specs.get(x.shape, P()))
    assert x.sharding.is_equivalent_to(expected, x.ndim), (x.shape, x.sharding)


@pytest.mark.parametrize(
  'specs',
  [
    {'up': P('x'), 'down': P(None, 'x')},
    # The path of one ends with the path of another.
    {'kernel': P('x'), 'head': {'kernel': P(None, 'x')}},
    P('x'),
    [],
  ],
  ids=str,
)
def test_paths_tell_parameters_of_one_shape_apart(specs):
  mesh = make_mesh(x=8)
  params = jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(
      (8, 8), jnp.float32, sharding=NamedSharding(mesh, spec)
    ),
    specs,
  )
  if not jax.tree.leaves(params):
    with pytest.raises(ValueError, match='^params must hold an array'):
      merit_optax.state_shardings(optax.adam(0.1), params)
    return
  found = merit_optax.state_shardings(optax.adam(0.1), params)[0].mu
  assert jax.tree.map(lambda x: x.spec, found) == specs


def test_parameters_on_no_mesh_are_named():
  with pytest.raises(ValueError, match="^params must lie on a mesh.*'a/b'"):
    merit_optax.state_shardings(optax.adam(0.1), {'a': {'b': jnp.ones(3)}})
