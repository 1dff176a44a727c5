import dataclasses
import itertools
import math

from flax import nnx
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.config import Config
from examples.gpt2.devices.sharding import path_name
from examples.gpt2.model import layers
from examples.gpt2.model.layers import ModelConfig, causal_attention, rotate
from examples.gpt2.model.loss import mean_cross_entropy
from examples.gpt2.model.transformer import Transformer
from examples.gpt2.presets import resolve
from examples.gpt2.run.step import make_model_config

_CONFIG = ModelConfig(
  vocab_size=64,
  context_length=16,
  num_layers=2,
  num_heads=2,
  width=16,
  mlp_width=32,
)
_ARCHITECTURES = pytest.mark.parametrize('architecture', ['gpt2', 'llama'])
_TOKENS = np.random.default_rng(0).integers(64, size=(4, 17)).astype(np.int32)


def _config(architecture: str = 'gpt2', **settings) -> ModelConfig:
  untied = architecture == 'llama'
  return dataclasses.replace(
    _CONFIG, architecture=architecture, untied_head=untied, **settings
  )


def _shapes(config: ModelConfig):
  model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return nnx.as_pure(nnx.state(model))


def _params(config: ModelConfig):
  """Returns random parameters, no bias zero and no scale 1."""
  generator = np.random.default_rng(0)

  def make(path, x) -> np.ndarray:
    offset = 1.0 if path_name(path).endswith('scale') else 0.0
    values = offset + 0.2 * generator.normal(size=x.shape)
    return values.astype(np.float32)

  return jax.tree.map_with_path(make, _shapes(config))


def _merge(config: ModelConfig, params) -> Transformer:
  model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return nnx.merge(nnx.graphdef(model), params)


def _value_and_grad(config: ModelConfig):
  """Returns a compiled function from parameters and tokens."""

  def loss(params, tokens):
    model = _merge(config, params)
    features, _ = model.features(tokens[:, :-1])
    return mean_cross_entropy(features, model.head_VD, tokens[:, 1:])

  return jax.jit(jax.value_and_grad(loss))


def _normal(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@hypothesis.given(
  shift=st.integers(0, 1000),
  half=st.sampled_from([1, 2, 16]),
  seed=st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=10)
def test_rotary_products_depend_on_the_distance_only(
  shift: int, half: int, seed: int
):
  q, k = _normal(seed, 2, 1, 1, 1, 2 * half)
  positions = jnp.arange(5)

  def products(first: int):
    rows = [
      rotate(jnp.tile(x, (1, 5, 1, 1)), first + positions) for x in (q, k)
    ]
    return jnp.einsum('BTHK,BSHK->TS', *rows)

  found = products(0)
  np.testing.assert_allclose(products(shift), found, atol=2e-3)
  # Pairs of a diagonal have the same distance.
  np.testing.assert_allclose(found[1:, 1:], found[:-1, :-1], atol=1e-4)
  np.testing.assert_allclose(found[0, 0], (q * k).sum(), rtol=1e-4, atol=1e-5)


def test_rotary_positions_keep_norms_and_leave_the_first_token():
  x = _normal(0, 2, 7, 3, 8)
  turned = rotate(jnp.asarray(x), jnp.arange(7))
  np.testing.assert_array_equal(turned[:, 0], x[:, 0])
  np.testing.assert_allclose(
    np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5
  )
  assert np.abs(turned[:, 1:] - x[:, 1:]).max() > 0.1


def test_rotary_angles_are_those_of_roformer():
  x = _normal(0, 1, 4, 1, 6)
  pairs = x[..., :3] + 1j * x[..., 3:]
  for position in range(4):
    angles = position / 10000 ** (np.arange(3) / 3)
    expected = pairs[0, position, 0] * np.exp(1j * angles)
    found = rotate(jnp.asarray(x), jnp.arange(4))[0, position, 0]
    np.testing.assert_allclose(found[:3], expected.real, atol=1e-5)
    np.testing.assert_allclose(found[3:], expected.imag, atol=1e-5)


def test_attention_is_a_causal_softmax():
  q, k, v = _normal(0, 3, 2, 5, 3, 4)
  found, seen = causal_attention(*map(jnp.asarray, (q, k, v)))
  assert seen is None
  for b, h, t in np.ndindex(2, 3, 5):
    logits = k[b, : t + 1, h] @ q[b, t, h] / 2
    p = np.exp(logits - logits.max())
    np.testing.assert_allclose(
      found[b, t, h], p / p.sum() @ v[b, : t + 1, h], rtol=1e-4, atol=1e-5
    )


@_ARCHITECTURES
@pytest.mark.parametrize('qk_norm', [False, True])
def test_qk_norm_bounds_the_logits(architecture: str, qk_norm: bool):
  config = _config(architecture, qk_norm=qk_norm)
  attention = layers.Attention(config, nnx.Rngs(0))
  attention.qkv.kernel.set_value(1000 * attention.qkv.kernel.get_value())
  q, k, _ = attention.project(_normal(1, 2, 9, 16), jnp.arange(9))
  logits = jnp.einsum('BTHK,BSHK->BHTS', q, k) / math.sqrt(config.head_width)
  bound = math.sqrt(config.head_width) * 1.001
  assert (float(jnp.abs(logits).max()) <= bound) == qk_norm


@pytest.mark.parametrize(
  ('architecture', 'remats'),
  [
    ('gpt2', ('dots', 'none')),
    pytest.param('gpt2', ('full', 'dots'), marks=pytest.mark.slow),
    pytest.param('llama', ('full', 'dots', 'none'), marks=pytest.mark.slow),
  ],
)
def test_remat_saves_memory_and_changes_no_numbers(
  architecture: str, remats: tuple[str, ...]
):
  config = _config(architecture, qk_norm=True, num_layers=6)
  params, tokens = _params(config), np.tile(_TOKENS, (4, 1))
  compiled = {
    remat: _value_and_grad(dataclasses.replace(config, remat=remat))
    .lower(params, tokens)
    .compile()
    for remat in remats
  }
  found = {k: run(params, tokens) for k, run in compiled.items()}
  for remat in remats[:-1]:
    for one, other in zip(
      jax.tree.leaves(found[remat]),
      jax.tree.leaves(found[remats[-1]]),
      strict=True,
    ):
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
  sizes = [
    run.memory_analysis().temp_size_in_bytes for run in compiled.values()
  ]
  for less, more in itertools.pairwise(sizes):
    assert less < 0.8 * more


@_ARCHITECTURES
def test_unrolled_layers_compute_the_same(architecture: str):
  config = _config(architecture)
  params, tokens = _params(config), _TOKENS[:, :16]
  rolled, unrolled = (
    jax.jit(_merge(dataclasses.replace(config, unroll=n), params))
    for n in (1, 2)
  )
  np.testing.assert_allclose(
    unrolled(tokens), rolled(tokens), rtol=1e-5, atol=1e-5
  )
  assert 'while' in rolled.lower(tokens).as_text()
  assert 'while' not in unrolled.lower(tokens).as_text()


@_ARCHITECTURES
def test_bfloat16_is_close_to_float32(architecture: str):
  config = _config(architecture)
  half = dataclasses.replace(config, dtype='bfloat16')
  params = _params(config)
  tokens = _TOKENS[:, :16]
  expected, found = (jax.jit(_merge(c, params))(tokens) for c in (config, half))
  assert found.dtype == expected.dtype == 'float32'
  largest = np.abs(expected).max()
  np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * largest)
  assert np.abs(found - expected).max() > 1e-4 * largest
  features = jax.eval_shape(lambda: _merge(half, params).features(tokens)[0])
  assert features.dtype == 'bfloat16'
  value, gradients = jax.eval_shape(_value_and_grad(half), params, _TOKENS)
  assert value.dtype == 'float32'
  assert {x.dtype for x in jax.tree.leaves(gradients)} == {np.dtype('float32')}


@pytest.mark.parametrize('settings', [{}, {'qk_norm': True}])
def test_llama_has_no_biases_and_no_learned_positions(settings: dict):
  def names(architecture: str) -> list[str]:
    params = _shapes(_config(architecture, **settings))
    return [path_name(path) for path, _ in jax.tree.leaves_with_path(params)]

  assert not any(
    'bias' in name or 'position' in name for name in names('llama')
  )
  found = ' '.join(names('gpt2'))
  for name in ('qkv', 'out', 'up', 'down', 'attention_norm', 'mlp_norm'):
    assert f'{name}.bias' in found
  assert 'position_embedding' in found


@pytest.mark.parametrize(
  ('preset', 'millions'),
  [('llama-130m', 134.1), ('llama-350m', 368.0), ('llama-7b', 6738.4)],
)
def test_presets_have_the_sizes_of_llama(preset: str, millions: float):
  config = make_model_config(resolve(Config(preset=preset)), 32000)
  shapes = _shapes(config)
  count = sum(x.size for x in jax.tree.leaves(shapes))
  assert round(count / 1e6, 1) == millions


@_ARCHITECTURES
@pytest.mark.parametrize('qk_norm', [False, True])
def test_a_token_does_not_see_later_ones(architecture: str, qk_norm: bool):
  config = _config(architecture, qk_norm=qk_norm)
  model = jax.jit(_merge(config, _params(config)))
  before = model(_TOKENS[:, :16])
  for t in (1, 9, 15):
    changed = _TOKENS[:, :16].copy()
    changed[:, t:] = (changed[:, t:] + 1) % 64
    after = model(changed)
    np.testing.assert_array_equal(after[:, :t], before[:, :t])
    assert np.abs(after[:, t:] - before[:, t:]).max(-1).min() > 1e-3


@_ARCHITECTURES
def test_the_order_of_earlier_tokens_counts(architecture: str):
  config = _config(architecture, num_layers=1)
  model = jax.jit(_merge(config, _params(config)))
  swapped = _TOKENS[:, [1, 0, *range(2, 16)]]
  difference = model(_TOKENS[:, :16]) - model(swapped)
  assert np.abs(difference[:, -1]).max() > 1e-3


def test_layers_start_as_gpt2s():
  config = dataclasses.replace(_config(), num_layers=8, width=128, num_heads=4)
  blocks = jax.jit(
    lambda: nnx.as_pure(nnx.state(Transformer(config, rngs=nnx.Rngs(0))))
  )()['blocks']
  for module, name, std in (
    ('attention', 'qkv', 0.02),
    ('attention', 'out', 0.02 / 4),
    ('mlp', 'up', 0.02),
    ('mlp', 'down', 0.02 / 4),
  ):
    kernel = blocks[module][name]['kernel']
    assert kernel.std() == pytest.approx(std, rel=0.05)
    # Layers start with weights of their own.
    assert jnp.abs(kernel[0] - kernel[1]).max() > std
    assert not blocks[module][name]['bias'].any()
