import dataclasses
import functools
from pathlib import Path

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from examples.gpt2.model.files import as_module, as_tree, shapes
from examples.gpt2.model.hugging_face_layout import from_hugging_face
from examples.gpt2.model.layers import ModelConfig, causal_attention, rotate
from examples.gpt2.model.transformer import Transformer
from examples.gpt2.presets import PRESETS

_GOLDEN = Path(__file__).parents[2] / 'data' / 'gpt2_golden.safetensors'
_CONFIG = ModelConfig(
  vocab_size=65,
  context_length=16,
  num_layers=2,
  num_heads=4,
  width=32,
  mlp_width=128,
)
_KINDS = {
  'gpt2': {},
  'llama': dict(architecture='llama', untied_head=True, mlp_width=96),
  'qk_norm': dict(qk_norm=True),
}


def _golden_model() -> tuple[Transformer, dict[str, np.ndarray]]:
  arrays = safetensors.numpy.load_file(_GOLDEN)
  weights = {k: v for k, v in arrays.items() if k not in ('tokens', 'logits')}
  params = from_hugging_face(_CONFIG, weights)
  assert len(params) == len(jax.tree.leaves(shapes(_CONFIG)))
  return as_module(_CONFIG, as_tree(_CONFIG, params)), arrays


def _random_model(kind: str, **options: int) -> Transformer:
  """Returns a model in which each parameter counts."""
  config = dataclasses.replace(_CONFIG, **_KINDS[kind], **options)
  generator = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: generator.normal(0.1, 0.3, x.shape).astype(np.float32),
    shapes(config),
  )
  return as_module(config, params)


def _tokens(seed: int = 0) -> np.ndarray:
  generator = np.random.default_rng(seed)
  return generator.integers(65, size=(3, 16)).astype(np.int32)


def test_logits_equal_those_of_hugging_face():
  model, golden = _golden_model()
  logits = model(golden['tokens'])
  np.testing.assert_allclose(logits, golden['logits'], atol=5e-5)


def test_key_bias_keeps_its_place():
  # A key bias shifts all logits of a query alike, so no logit shows it.
  model, golden = _golden_model()
  bias_LHXK = model.blocks.attention.qkv.bias.get_value()
  theirs_XHK = golden['transformer.h.1.attn.c_attn.bias'].reshape(3, 4, 8)
  np.testing.assert_array_equal(bias_LHXK[1, :, 1], theirs_XHK[1])


@pytest.mark.parametrize('kind', _KINDS)
def test_a_token_does_not_see_later_ones(kind: str):
  model, tokens = _random_model(kind), _tokens()
  changed = tokens.copy()
  changed[:, 9:] = (changed[:, 9:] + 1) % _CONFIG.vocab_size
  before, after = model(tokens), model(changed)
  np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-5)
  assert np.abs(before[:, 9:] - after[:, 9:]).min(axis=-1).max() > 1e-3


@pytest.mark.parametrize('kind', _KINDS)
def test_the_order_of_earlier_tokens_counts(kind: str):
  # In a second layer, the mask alone would tell the order.
  model, tokens = _random_model(kind, num_layers=1), _tokens()
  swapped = tokens[:, [1, 0, *range(2, 16)]]
  assert np.abs(model(tokens) - model(swapped))[:, 2:].max() > 1e-2


def test_loops_and_recomputation_change_nothing():
  model, tokens = _random_model('llama'), _tokens()
  params = nnx.as_pure(nnx.state(model))

  @functools.partial(jax.jit, static_argnums=0)
  def gradient(config: ModelConfig):
    return jax.grad(lambda p: as_module(config, p)(tokens).std())(params)

  expected = gradient(model.config)
  for options in (dict(unroll=2), dict(remat='dots'), dict(remat='full')):
    got = gradient(dataclasses.replace(model.config, **options))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)


def test_attention_sees_queries_and_keys_of_each_layer():
  model, golden = _golden_model()
  tokens = golden['tokens']

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, number: jax.Array):
    return causal_attention(q, k, v)[0], (number, q, k)

  features, (numbers, queries, keys) = model.features(
    tokens, attend, by_layer=(jnp.arange(2),)
  )
  np.testing.assert_array_equal(numbers, [0, 1])
  np.testing.assert_array_equal(model.logits(features), model(tokens))
  x = model.token_embedding(tokens) + model.position_embedding(jnp.arange(16))
  weights = golden['transformer.h.0.attn.c_attn.weight']
  scale, shift = (
    golden[f'transformer.h.0.ln_1.{name}'] for name in ('weight', 'bias')
  )
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
  qkv = (x * scale + shift) @ weights
  qkv += golden['transformer.h.0.attn.c_attn.bias']
  expected_q, expected_k, _ = np.split(qkv.reshape(3, 16, 12, 8), 3, axis=2)
  np.testing.assert_allclose(queries[0], expected_q, atol=1e-4)
  np.testing.assert_allclose(keys[0], expected_k, atol=1e-4)


def test_positions_start_where_they_are_told():
  model, tokens = _random_model('gpt2'), _tokens()
  table = model.position_embedding.embedding
  moved = _random_model('gpt2')
  moved.position_embedding.embedding.set_value(
    jnp.roll(table.get_value(), -5, axis=0)
  )
  later, _ = model.features(tokens[:, :8], first_position=5)
  expected, _ = moved.features(tokens[:, :8])
  np.testing.assert_allclose(later, expected, atol=1e-6)


def test_rotary_logits_depend_on_the_distance_alone():
  generator = np.random.default_rng(0)
  query, key = generator.normal(size=(2, 1, 1, 2, 8)).astype(np.float32)

  def logit(query_position: int, key_position: int) -> np.ndarray:
    turned = rotate(query, jnp.array([query_position]))
    other = rotate(key, jnp.array([key_position]))
    return np.asarray((turned * other).sum(-1))

  np.testing.assert_allclose(logit(7, 3), logit(104, 100), atol=1e-4)
  assert np.abs(logit(7, 3) - logit(7, 4)).max() > 1e-2


def test_qk_norm_takes_the_size_of_queries_and_keys_away():
  config = dataclasses.replace(_CONFIG, qk_norm=True)
  model = Transformer(config, rngs=nnx.Rngs(0))

  def attend(q: jax.Array, k: jax.Array, v: jax.Array):
    return causal_attention(q, k, v)[0], (q, k, v)

  _, (*expected, values) = model.features(_tokens(), attend)
  kernel = model.blocks.attention.qkv.kernel
  kernel.set_value(10 * kernel.get_value())
  _, (*got, larger_values) = model.features(_tokens(), attend)
  first = jax.tree.map(lambda x: x[0], (got, expected))
  chex.assert_trees_all_close(*first, rtol=1e-2, atol=1e-2)
  np.testing.assert_allclose(larger_values[0], 10 * values[0], rtol=1e-4)


def test_half_precision_gives_about_the_same_logits():
  model, golden = _golden_model()
  config = dataclasses.replace(_CONFIG, dtype='bfloat16')
  params = nnx.as_pure(nnx.state(model))
  logits = as_module(config, params)(golden['tokens'])
  assert logits.dtype == jnp.float32
  error = np.abs(logits - golden['logits']).max()
  assert 1e-4 < error < 0.05 * np.abs(golden['logits']).max()


@pytest.mark.parametrize(
  ('preset', 'vocab_size', 'millions'),
  [
    ('small', 50257, 124.4),
    ('medium', 50257, 354.8),
    ('large', 50257, 774.0),
    ('xl', 50257, 1557.6),
    ('llama-130m', 32000, 134.1),
    ('llama-7b', 32000, 6738.4),
  ],
)
def test_presets_have_the_published_sizes(
  preset: str, vocab_size: int, millions: float
):
  names = {field.name for field in dataclasses.fields(ModelConfig)}
  sizes = {k: v for k, v in PRESETS[preset].items() if k in names}
  config = ModelConfig(**sizes | {'vocab_size': vocab_size})
  count = sum(x.size for x in jax.tree.leaves(shapes(config)))
  assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize('architecture', ['gpt2', 'llama'])
def test_initialisation_is_gpt2s(architecture: str):
  config = ModelConfig(
    vocab_size=256,
    context_length=16,
    num_layers=8,
    num_heads=4,
    width=128,
    mlp_width=512,
    architecture=architecture,
  )
  model = Transformer(config, rngs=nnx.Rngs(0))

  def std(kernel: nnx.Param) -> np.ndarray:
    layers = kernel.get_value().reshape(8, -1)
    assert len(np.unique(layers[:, 0])) == 8
    return jnp.std(layers, axis=1)

  block = model.blocks
  np.testing.assert_allclose(std(block.attention.qkv.kernel), 0.02, rtol=0.05)
  for layer in (block.attention.out, block.mlp.down):
    np.testing.assert_allclose(std(layer.kernel), 0.02 / 4, rtol=0.05)
  for path, x in jax.tree.leaves_with_path(nnx.as_pure(nnx.state(model))):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    if name.endswith(('bias', 'scale')):
      np.testing.assert_array_equal(x, float(name.endswith('scale')))
