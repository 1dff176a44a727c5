import contextlib
import dataclasses
import functools
import itertools
import math
from pathlib import Path
from unittest import mock

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh
import numpy as np
import pytest

from examples.gpt2 import model
from examples.gpt2.config import ModelConfig, complete
from examples.gpt2.convert import from_arrays, to_arrays
from examples.gpt2.loss import mean_cross_entropy
from examples.gpt2.model import (
  Transformer,
  as_module,
  causal_attention,
  shapes,
)
from examples.gpt2.model_files import open_arrays
from examples.gpt2.presets import PRESETS
from examples.gpt2.resolve import resolve
from examples.gpt2.sharding import AXES, by_path, make_mesh

_DATA = Path(__file__).parents[1] / 'data'
_CONFIG = complete(ModelConfig(
  vocab_size=64, context_length=16, num_layers=2, num_heads=2, width=16,
  mlp_width=32,
))  # fmt: skip
_KINDS = {
  'gpt2': {},
  'llama': dict(architecture='llama', untied_head=True, mlp_width=48),
  'gpt2-qk': dict(qk_norm=True),
  'llama-qk': dict(architecture='llama', qk_norm=True),
}
_GOLDEN = {
  'gpt2': complete(ModelConfig(
    vocab_size=65, context_length=16, num_layers=2, num_heads=4, width=32,
    mlp_width=128,
  )),
  'llama': complete(ModelConfig(
    vocab_size=65, context_length=64, num_layers=2, num_heads=4, width=32,
    mlp_width=40, architecture='llama', num_kv_heads=2, head_width=12,
    norm_epsilon=1e-5, rope_theta=100.0, rope_scaling=(8.0, 1.0, 4.0, 40.0),
    untied_head=True,
  )),
}  # fmt: skip
# Presets with RMSNorm's own epsilon; others have GPT-2's.
_RMS = ('llama-130m', 'llama-350m', 'llama-7b')
_TOKENS = np.random.default_rng(0).integers(64, size=(4, 17)).astype(np.int32)


def _config(kind: str, **settings: object) -> ModelConfig:
  return dataclasses.replace(_CONFIG, **_KINDS[kind] | settings)


def _params(config: ModelConfig) -> dict:
  """Returns random parameters, no bias zero and no scale 1."""
  generator = np.random.default_rng(0)
  return jax.tree.map_with_path(
    lambda path, x: np.float32(
      ('scale' in str(path)) + 0.2 * generator.normal(size=x.shape)
    ),
    shapes(config),
  )


def _normal(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _value_and_grad(config: ModelConfig):
  """Returns a compiled function from parameters and tokens."""

  def loss(params, tokens):
    model = as_module(config, params)
    features, _ = model.features(tokens[:, :-1])
    return mean_cross_entropy(features, model.head_VD, tokens[:, 1:])

  return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize('architecture', ['gpt2', 'llama'])
def test_logits_equal_those_of_hugging_face(architecture: str):
  arrays = open_arrays(_DATA / f'{architecture}_golden.safetensors')
  tokens, expected = (arrays.pop(name)[:] for name in ('tokens', 'logits'))
  config, rows = _GOLDEN[architecture], expected.shape[-1]
  params = from_arrays(config, rows, arrays)
  logits = as_module(config, params)(tokens)[..., :rows]
  np.testing.assert_allclose(logits, expected, atol=1e-4)
  # As they came; constants of old versions are not among them.
  found = to_arrays(config, rows, params)
  assert found.keys() <= arrays.keys()
  for name, x in found.items():
    np.testing.assert_array_equal(x, arrays[name][:])


@pytest.mark.parametrize(
  ('kind', 'remats'),
  [
    ('gpt2-qk', ('dots', 'none')),
    pytest.param('llama-qk', ('full', 'dots', 'none'), marks=pytest.mark.slow),
  ],
)
def test_remat_saves_memory_and_changes_no_numbers(kind, remats):
  config, tokens = _config(kind, num_layers=6), np.tile(_TOKENS, (4, 1))
  params = _params(config)
  compiled = {
    remat: _value_and_grad(dataclasses.replace(config, remat=remat))
    .lower(params, tokens)
    .compile()
    for remat in remats
  }
  found = {k: run(params, tokens) for k, run in compiled.items()}
  for remat in remats[:-1]:
    pair = found[remat], found[remats[-1]]
    chex.assert_trees_all_close(*pair, rtol=1e-4, atol=1e-5)
  sizes = [x.memory_analysis().temp_size_in_bytes for x in compiled.values()]
  for less, more in itertools.pairwise(sizes):
    assert less < 0.8 * more


@pytest.mark.parametrize('mesh', ['', 'tensor=2'])
def test_the_kernel_for_tpu_attends_as_softmax_does(mesh, monkeypatch):
  inputs = _normal(0, 4, 256, 4, 8), *_normal(1, 2, 4, 256, 2, 8)
  # Several blocks of queries and keys, one of which is masked as a whole.
  monkeypatch.setattr(model, '_MOST_IN_BLOCK', 128)

  def measure(platform: str):
    monkeypatch.setattr(model, '_platform', lambda: platform)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array):
      y, _ = causal_attention(q, k, v)
      return jnp.sin(y).sum(), y

    return jax.jit(jax.value_and_grad(attend, (0, 1, 2), has_aux=True))

  expected = measure('cpu')(*inputs)
  interpreted = mock.Mock(
    side_effect=functools.partial(model.splash_attention, interpret=True)
  )
  monkeypatch.setattr(model, 'splash_attention', interpreted)
  with jax.set_mesh(make_mesh(mesh)) if mesh else contextlib.nullcontext():
    found = measure('tpu')(*inputs)
  interpreted.assert_called_once()
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('qk_norm', [False, True])
def test_qk_norm_bounds_the_logits(qk_norm: bool):
  config = _config('llama', qk_norm=qk_norm)
  params = jax.tree.map(lambda x: _normal(x.size, *x.shape), shapes(config))
  attention = params['blocks']['attention']
  attention['qkv']['kernel'] *= 1000
  if qk_norm:
    for name in ('query_norm', 'key_norm'):
      attention[name]['scale'] = np.ones_like(attention[name]['scale'])

  def attend(q: jax.Array, k: jax.Array, v: jax.Array):
    logits = jnp.einsum('BTHK,BSHK->BHTS', q, k) / math.sqrt(8)
    return causal_attention(q, k, v)[0], jnp.abs(logits).max()

  tokens = np.arange(32).reshape(2, 16)
  _, largest = as_module(config, params).features(tokens, attend)
  assert (float(largest[0]) <= math.sqrt(8) * 1.001) == qk_norm


@pytest.mark.parametrize('platform', ['tpu', None])
def test_attention_is_that_of_the_mesh(platform: str | None):
  device = platform and AbstractDevice(
    device_kind='chip', num_cores=None, platform=platform
  )
  mesh = AbstractMesh((1,) * 3, AXES, abstract_device=device)
  query = jax.ShapeDtypeStruct((1, 128, 1, 64), 'float32')
  with jax.sharding.use_abstract_mesh(mesh):
    program = jax.make_jaxpr(causal_attention)(query, query, query)
  assert ('pallas_call' in str(program)) == (platform == 'tpu')


def test_unrolled_layers_compute_the_same():
  tokens = _TOKENS[:, :16]
  configs = [_config('llama-qk', unroll=n) for n in (1, 2)]
  rolled, unrolled = (jax.jit(as_module(x, _params(x))) for x in configs)
  np.testing.assert_allclose(
    unrolled(tokens), rolled(tokens), rtol=1e-5, atol=1e-5
  )
  assert 'while' in rolled.lower(tokens).as_text()
  assert 'while' not in unrolled.lower(tokens).as_text()


def test_a_common_token_has_the_whole_sum_of_its_gradients():
  # In bfloat16, 256 + 1 is 256.
  embed = model.Embedding(3, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  tokens = jnp.full([4096], 1)
  assert embed(tokens).dtype == 'bfloat16'
  gradient = nnx.grad(lambda embed: embed(tokens).astype('float32').sum())
  found = nnx.as_pure(gradient(embed))['embedding']
  assert found.dtype == 'float32'
  np.testing.assert_array_equal(found, np.outer([0, 4096, 0], np.ones(16)))


@pytest.mark.parametrize(
  ('preset', 'millions'),
  [
    ('small', 124.4),
    ('xl', 1557.6),
    ('llama-130m', 134.1),
    ('llama-7b', 6738.4),
    ('llama-3-8b', 8030.3),
    ('tinyllama-1.1b', 1100.0),
    ('smollm2-135m', 134.5),
  ],
)
def test_presets_have_the_published_sizes(preset: str, millions: float):
  config = resolve(PRESETS[preset]).model
  assert config.norm_epsilon == (1e-6 if preset in _RMS else 1e-5)
  count = sum(x.size for x in jax.tree.leaves(shapes(config)))
  assert round(count / 1e6, 1) == millions


def test_initialization_is_gpt2s():
  sizes = dict(num_layers=8, width=64, head_width=None, mlp_width=256)
  config, expected = complete(_config('gpt2', init_std=0.1, **sizes)), 0.1
  params = jax.jit(
    lambda: nnx.as_pure(nnx.state(Transformer(config, rngs=nnx.Rngs(0))))
  )()
  for name, x in by_path(params).items():
    if name.endswith(('bias', 'scale')):
      np.testing.assert_array_equal(x, float(name.endswith('scale')))
      continue
    # What ends a residual branch starts smaller.
    is_last = name.endswith(('out.kernel', 'down.kernel'))
    std = expected / 4 if is_last else expected
    parts = x if name.startswith('blocks.') else x[None]
    np.testing.assert_allclose(
      jnp.std(parts.reshape(len(parts), -1), axis=1), std, rtol=0.05
    )
    # Layers start with weights of their own.
    assert len(np.unique(parts.reshape(len(parts), -1)[:, 0])) == len(parts)
