import jax
from jax.sharding import PartitionSpec as P
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.presets import resolve
from examples.gpt2.sharding import (
  check_sizes,
  make_mesh,
  parameter_shardings,
)
from examples.gpt2.training import Trainer


@pytest.mark.parametrize(
  ('text', 'shape'),
  [
    ('', (8, 1, 1)),
    ('fsdp=4,tensor=2', (1, 4, 2)),
    ('tensor=2', (4, 1, 2)),
    ('data=2, fsdp=2, tensor=2', (2, 2, 2)),
    ('fsdp=8', (1, 8, 1)),
  ],
)
def test_mesh_shapes(text: str, shape: tuple[int, ...]):
  assert tuple(make_mesh(text).shape.values()) == shape


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('fsdp=3', ['fsdp=3', '3', '8', 'divide']),
    ('data=2,fsdp=2', ['product', '4', '8']),
    ('tensor=16', ['16', '8']),
    ('model=2', ['model=2', 'data', 'fsdp', 'tensor']),
    ('fsdp=0', ['fsdp=0', 'at least 1']),
    ('fsdp=two', ['fsdp=two']),
    ('fsdp', ["'fsdp'"]),
    ('fsdp=2,fsdp=2', ['once']),
  ],
)
def test_a_wrong_mesh_is_explained(text: str, words: list[str]):
  with pytest.raises(UsageError, match='--mesh') as error:
    make_mesh(text)
  for word in words:
    assert word in str(error.value)


def test_the_batch_must_fit_the_mesh():
  config = resolve(Config(batch_size=12, micro_batch_size=12))
  with pytest.raises(UsageError, match='8 of --mesh must divide.*size 12'):
    check_sizes(make_mesh(''), config)


def test_heads_must_fit_the_mesh():
  with pytest.raises(UsageError, match='tensor = 8 .*--num-heads 4'):
    check_sizes(make_mesh('tensor=8'), resolve(Config()))


def test_a_dimension_that_does_not_fit_is_named():
  params = {'mlp': {'up': {'kernel': jax.ShapeDtypeStruct((6, 24), 'float32')}}}
  with pytest.raises(UsageError, match=r'fsdp = 4.*6.*mlp\.up\.kernel'):
    parameter_shardings(make_mesh('fsdp=4,tensor=2'), params)


def test_moments_lie_as_their_parameters():
  mesh = make_mesh('fsdp=4,tensor=2')
  config = resolve(Config(num_layers=1, width=64, micro_batch_size=8))
  with jax.set_mesh(mesh):
    state = Trainer(config, 512, mesh).init()
  sharding = jax.tree.map(lambda x: x.sharding, state.params)
  moments = [
    moment
    for moment in jax.tree.leaves(state.opt_state, is_leaf=_is_adam)
    if _is_adam(moment)
  ]
  assert len(moments) == 1
  for moment in (moments[0].mu, moments[0].nu):
    assert jax.tree.map(lambda x: x.sharding, moment) == sharding
  kernel = state.params['blocks'][0]['mlp']['up']['kernel']
  assert kernel.sharding.spec == P('fsdp', 'tensor')
  assert kernel.addressable_shards[0].data.shape == (16, 128)


def _is_adam(x) -> bool:
  return hasattr(x, 'mu')
