import contextlib
import functools
import math
from unittest import mock

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh
import numpy as np
import pytest

from examples.gpt2.config import ModelConfig, complete
from examples.gpt2.model import attention, splash
from examples.gpt2.model.attention import causal_attention
from examples.gpt2.model.transformer import as_module, shapes
from examples.gpt2.sharding import AXES, make_mesh


def _normal(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@hypothesis.given(length=st.integers(1, 40), groups=st.sampled_from([1, 2, 4]))
@hypothesis.settings(max_examples=4)
def test_attention_on_cpu_equals_that_of_jax(length: int, groups: int):
  q, (k, v) = _normal(0, 2, length, 4, 8), _normal(1, 2, 2, length, groups, 8)

  def measure(attend):
    loss = lambda *qkv: jnp.sin(attend(*qkv)).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

  expected = measure(
    functools.partial(jax.nn.dot_product_attention, is_causal=True)
  )
  found = measure(lambda *qkv: causal_attention(*qkv)[0])
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('mesh', 'heads'), [('', 4), ('tensor=2', 4)])
def test_the_kernel_for_tpu_attends_as_softmax_does(mesh, heads, monkeypatch):
  inputs = _normal(0, 4, 256, heads, 8), *_normal(1, 2, 4, 256, 2, 8)
  # Several blocks of queries and keys, one of which is masked as a whole.
  monkeypatch.setattr(splash, '_MOST_IN_BLOCK', 128)

  def measure(platform: str):
    monkeypatch.setattr(attention, '_platform', lambda: platform)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array):
      y, _ = causal_attention(q, k, v)
      return jnp.sin(y).sum(), y

    return jax.jit(jax.value_and_grad(attend, (0, 1, 2), has_aux=True))

  expected = measure('cpu')(*inputs)
  interpreted = mock.Mock(
    side_effect=functools.partial(splash.splash_attention, interpret=True)
  )
  monkeypatch.setattr(splash, 'splash_attention', interpreted)
  with jax.set_mesh(make_mesh(mesh)) if mesh else contextlib.nullcontext():
    found = measure('tpu')(*inputs)
  interpreted.assert_called_once()
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('qk_norm', [False, True])
def test_qk_norm_bounds_the_logits(qk_norm: bool):
  config = complete(
    ModelConfig(
      vocab_size=64,
      context_length=16,
      num_layers=1,
      num_heads=2,
      width=16,
      mlp_width=32,
      architecture='llama',
      qk_norm=qk_norm,
    )
  )
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
