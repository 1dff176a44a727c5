import contextlib
import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.model import attention, splash
from examples.gpt2.model.attention import causal_attention, measured_attention
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.transformer import as_module, shapes


def _normal(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# On TPU and GPU the logits are computed beside the kernel that attends.
@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
@pytest.mark.parametrize(('length', 'groups'), [(5, 4), (200, 4), (5, 2)])
def test_measured_attention_finds_the_largest_visible_logit(
  platform: str, length: int, groups: int, monkeypatch: pytest.MonkeyPatch
):
  q, (k, v) = _normal(0, 2, length, 4, 4), _normal(1, 2, 2, length, groups, 4)
  k[:, -1] *= 100  # Only the last query sees it.
  keys = k.repeat(4 // groups, axis=2)
  logits = np.einsum('BTHK,BSHK->BHTS', q, keys) / 2
  hidden = np.triu(np.ones((length, length), bool), 1)
  expected = np.where(hidden, -np.inf, logits).max((2, 3))
  monkeypatch.setattr(attention, '_platform', lambda: platform)

  def attend(q: jax.Array, is_due: bool) -> tuple[jax.Array, jax.Array]:
    y, largest = measured_attention(q, k, v, is_due=is_due)
    return (y**2).sum(), largest

  measure = jax.jit(jax.value_and_grad(attend, has_aux=True))
  (_, found), gradient = measure(q, True)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  (_, missing), same_gradient = measure(q, False)
  assert np.isnan(missing).all()
  np.testing.assert_array_equal(gradient, same_gradient)
  expected_gradient = jax.jit(
    jax.grad(lambda q: (causal_attention(q, k, v)[0] ** 2).sum())
  )(q)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ('mesh', 'heads'), [('', 2), ('data=2,fsdp=2,tensor=2', 2), ('tensor=2', 4)]
)
def test_the_kernel_for_tpu_attends_as_softmax_does(mesh, heads, monkeypatch):
  inputs = _normal(0, 4, 256, heads, 8), *_normal(1, 2, 4, 256, 2, 8)
  # Several blocks of queries and keys, one of which is masked as a whole.
  monkeypatch.setattr(splash, '_MOST_IN_BLOCK', 128)

  def measure(platform: str):
    monkeypatch.setattr(attention, '_platform', lambda: platform)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array):
      y, largest = measured_attention(q, k, v)
      return jnp.sin(y).sum(), (y, largest)

    return jax.jit(jax.value_and_grad(attend, (0, 1, 2), has_aux=True))

  expected = measure('cpu')(*inputs)
  interpreted = mock.Mock(
    side_effect=functools.partial(splash.splash_attention, interpret=True)
  )
  monkeypatch.setattr(splash, 'splash_attention', interpreted)
  with jax.set_mesh(make_mesh(mesh)) if mesh else contextlib.nullcontext():
    found = measure('tpu')(*inputs)
  interpreted.assert_called_once()
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('architecture', ['gpt2', 'llama'])
@pytest.mark.parametrize('qk_norm', [False, True])
def test_qk_norm_bounds_the_logits(architecture: str, qk_norm: bool):
  config = ModelConfig(64, 16, 1, 2, 16, 32, architecture, qk_norm=qk_norm)
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
