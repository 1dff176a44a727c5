from flax import nnx
import hypothesis
from hypothesis import strategies as st
import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from examples.gpt2.command import UsageError
from examples.gpt2.config import Config, ModelConfig, change, complete
from examples.gpt2.model import Transformer
from examples.gpt2.resolve import resolve
from examples.gpt2.sharding import (
  make_mesh,
  num_batch_shards,
  parameter_shardings,
  path_name,
)
from examples.gpt2.step import Trainer


@hypothesis.given(
  st.permutations(['data', 'fsdp', 'tensor']),
  st.lists(st.sampled_from([1, 2, 4, 8]), max_size=3),
)
def test_a_mesh_has_all_devices_or_says_why_not(axes, sizes):
  given = dict(zip(axes, sizes, strict=False))
  text = ', '.join(f'{k}={v}' for k, v in given.items())
  product = int(np.prod(sizes))
  if product != 8 if 'data' in given else 8 % product:
    with pytest.raises(UsageError, match=f'{product}, must be'):
      make_mesh(text)
    return
  mesh = make_mesh(text)
  rest = dict.fromkeys(('data', 'fsdp', 'tensor'), 1) | {'data': 8 // product}
  assert list(mesh.shape.items()) == list((rest | given).items())
  assert set(mesh.devices.flat) == set(jax.devices())
  assert num_batch_shards(mesh) == mesh.shape['data'] * mesh.shape['fsdp']


@pytest.mark.parametrize('text', ['model=2', 'fsdp=0', 'fsdp=2,fsdp=2'])
def test_a_wrong_mesh_is_explained(text: str):
  with pytest.raises(UsageError, match=f'--mesh {text}: expected axes'):
    make_mesh(text)


def test_every_matrix_is_split_over_all_devices():
  config = complete(
    ModelConfig(
      vocab_size=256,
      context_length=16,
      width=64,
      mlp_width=128,
      qk_norm=True,
      untied_head=True,
    )
  )
  params = nnx.as_pure(
    nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
  )
  shardings = parameter_shardings(make_mesh('fsdp=4,tensor=2'), params)
  for (path, param), sharding in zip(
    jax.tree.leaves_with_path(params), jax.tree.leaves(shardings), strict=True
  ):
    name = path_name(path)
    shard = sharding.shard_shape(param.shape)
    parts = param.size // int(np.prod(shard))
    if name == 'position_embedding.embedding':
      assert parts == 4
    elif name.endswith(('kernel', 'embedding')):
      assert parts == 8, name
    elif 'norm' in name:
      assert parts == 1, name
    if name.startswith('blocks.'):
      assert shard[0] == 3, 'layers stay whole'
    if name == 'blocks.attention.qkv.kernel':
      assert shard == (3, 16, 2, 3, 16), 'heads stay whole'


@pytest.mark.parametrize('optimizer', ['merit', 'merit-hidden', 'muon'])
def test_moments_lie_as_their_parameters(optimizer: str):
  mesh = make_mesh('fsdp=4,tensor=2')
  settings = change(
    Config(),
    optimizer=optimizer,
    num_layers=1,
    width=64,
    untied_head=True,
  )
  shapes = Trainer(resolve(settings), 512, mesh).shapes
  params = {
    path_name(path): x for path, x in jax.tree.leaves_with_path(shapes.params)
  }
  moments = 0
  for path, leaf in jax.tree.leaves_with_path(shapes.opt_state):
    name = path_name(path)
    owner = [param for param in params if name.endswith('.' + param)]
    if owner:
      moments += 1
      assert leaf.sharding == params[owner[0]].sharding, name
      assert leaf.shape == params[owner[0]].shape
    else:
      assert leaf.sharding.is_fully_replicated, name
  assert moments >= len(params)
  kernel = shapes.params['blocks']['mlp']['up']['kernel']
  assert kernel.sharding.spec == P(None, 'fsdp', 'tensor')
  assert kernel.sharding.shard_shape(kernel.shape) == (1, 16, 128)
