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
from examples.gpt2.model.attention import (
  causal_attention,
  measured_attention,
  rotary_frequencies,
  rotate,
)
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.transformer import as_module, shapes


def _config(**settings: object) -> ModelConfig:
  sizes = dict(vocab_size=64, context_length=16, num_layers=1, mlp_width=32)
  return ModelConfig(**sizes | {'architecture': 'llama'} | settings)


def _normal(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize('theta', [10_000.0, 500_000.0])
def test_rotary_angles_are_those_of_roformer(theta: float):
  x = _normal(0, 1, 4, 1, 6)
  config = _config(num_heads=1, width=6, rope_theta=theta)
  frequencies = rotary_frequencies(config)
  pairs = x[..., :3] + 1j * x[..., 3:]
  for position in range(4):
    angles = position / theta ** (np.arange(3) / 3)
    expected = pairs[0, position, 0] * np.exp(1j * angles)
    found = rotate(jnp.asarray(x), jnp.arange(4), frequencies)[0, position, 0]
    np.testing.assert_allclose(found[:3], expected.real, atol=1e-5)
    np.testing.assert_allclose(found[3:], expected.imag, atol=1e-5)


@pytest.mark.parametrize('groups', [6, 3, 1])
def test_attention_is_a_causal_softmax(groups: int):
  q, (k, v) = _normal(0, 2, 5, 6, 4), _normal(1, 2, 2, 5, groups, 4)
  found, seen = causal_attention(*map(jnp.asarray, (q, k, v)))
  assert seen is None
  for b, h, t in np.ndindex(2, 6, 5):
    group = h * groups // 6
    logits = k[b, : t + 1, group] @ q[b, t, h] / 2
    p = np.exp(logits - logits.max())
    expected = p / p.sum() @ v[b, : t + 1, group]
    np.testing.assert_allclose(found[b, t, h], expected, rtol=1e-4, atol=1e-5)


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
  config = _config(
    num_heads=2, width=16, architecture=architecture, qk_norm=qk_norm
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
