from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from examples.gpt2.config import PRESETS
from examples.gpt2.hugging_face import from_hugging_face
from examples.gpt2.model import (
  GPT2,
  GPT2Config,
  logits_and_max_attention_logits,
)
from examples.gpt2.sharding import path_name

_GOLDEN = Path(__file__).parents[1] / 'data' / 'gpt2_golden.safetensors'
_CONFIG = GPT2Config(
  vocab_size=65, context_length=16, num_layers=2, num_heads=4, width=32
)


def _golden_model() -> tuple[GPT2, dict[str, np.ndarray]]:
  arrays = safetensors.numpy.load_file(_GOLDEN)
  weights = {k: v for k, v in arrays.items() if k not in ('tokens', 'logits')}
  params = from_hugging_face(weights, _CONFIG)
  model = GPT2(_CONFIG, rngs=nnx.Rngs(0))
  graphdef, state = nnx.split(model)
  loaded = jax.tree.map_with_path(
    lambda path, old: _checked(old, params.pop(path_name(path))),
    nnx.as_pure(state),
  )
  assert not params
  return nnx.merge(graphdef, loaded), arrays


def _checked(old: jax.Array, new: np.ndarray) -> np.ndarray:
  assert old.shape == new.shape
  return new


def test_logits_equal_those_of_hugging_face():
  model, golden = _golden_model()
  logits = model(golden['tokens'])
  np.testing.assert_allclose(logits, golden['logits'], atol=5e-5)


def test_key_bias_keeps_its_place():
  # A key bias shifts all logits of a query alike, so no logit shows it.
  model, golden = _golden_model()
  bias = model.blocks[0].attention.qkv.bias.get_value().reshape(4, 3, 8)
  theirs = golden['transformer.h.0.attn.c_attn.bias'].reshape(3, 4, 8)
  np.testing.assert_array_equal(bias[:, 1], theirs[1])


def test_a_token_does_not_see_later_ones():
  model, golden = _golden_model()
  tokens = golden['tokens']
  changed = tokens.copy()
  changed[:, 9:] = (changed[:, 9:] + 1) % _CONFIG.vocab_size
  before, after = model(tokens), model(changed)
  np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-5)
  assert np.abs(before[:, 9:] - after[:, 9:]).min(axis=-1).max() > 1e-3


def test_captured_logits_are_those_of_each_layer():
  model, golden = _golden_model()
  logits, largest = logits_and_max_attention_logits(model, golden['tokens'])
  np.testing.assert_array_equal(logits, model(golden['tokens']))
  assert largest.shape == (2,)
  x = model.token_embedding(golden['tokens']) + model.position_embedding(
    jnp.arange(16)
  )
  qkv = model.blocks[0].attention.qkv(model.blocks[0].attention_norm(x))
  q, k, _ = np.moveaxis(np.asarray(qkv).reshape(3, 16, 4, 3, 8), 3, 0)
  seen = [
    q[b, t, h] @ k[b, s, h] / np.sqrt(8)
    for b in range(3)
    for h in range(4)
    for t in range(16)
    for s in range(t + 1)
  ]
  np.testing.assert_allclose(largest[0], max(seen), rtol=1e-5)


@pytest.mark.parametrize(
  ('preset', 'millions'),
  [('small', 124.4), ('medium', 354.8), ('large', 774.0), ('xl', 1557.6)],
)
def test_presets_have_the_sizes_of_gpt2(preset: str, millions: float):
  sizes = PRESETS[preset]
  config = GPT2Config(
    vocab_size=50257,
    **{
      name: sizes[name]
      for name in ('context_length', 'num_layers', 'num_heads', 'width')
    },
  )
  model = nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0)))
  count = sum(x.size for x in jax.tree.leaves(nnx.as_pure(nnx.state(model))))
  assert round(count / 1e6, 1) == millions


def test_initialisation_is_gpt2s():
  config = GPT2Config(256, 64, num_layers=8, num_heads=4, width=128)
  block = GPT2(config, rngs=nnx.Rngs(0)).blocks[3]

  def std(linear: nnx.Linear) -> float:
    return float(jnp.std(linear.kernel.get_value()))

  assert std(block.attention.qkv) == pytest.approx(0.02, rel=0.05)
  assert std(block.attention.out) == pytest.approx(0.02 / 4, rel=0.05)
  assert std(block.mlp.down) == pytest.approx(0.02 / 4, rel=0.05)
  assert not block.mlp.up.bias.get_value().any()
