import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.transformer import shapes
from examples.gpt2.optim import optimizers
from examples.gpt2.presets import resolve
from examples.study.arms import make_optimizer
from examples.study.experiments.compositions import COMPOSITIONS
from examples.study.scales import SCALES


def _by_hand(z, w):
  """Returns a matrix scaled by the largest ratio of l2 norms."""
  norm = np.linalg.norm
  scaled = np.empty_like(z)
  for i in range(z.shape[0]):
    for j in range(z.shape[1]):
      ratios = [
        norm(w) / norm(z),
        norm(w[i]) / norm(z[i]),
        norm(w[:, j]) / norm(z[:, j]),
      ]
      scaled[i, j] = max(ratios) * z[i, j]
  return scaled


def _random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _config(optimizer='merit', rate=0.1, **changes):
  return SCALES['nano'].run(optimizer, 128, rate, **changes).config


def _model():
  """Returns parameters of a small GPT-2, and gradients."""
  config = ModelConfig(
    vocab_size=64, context_length=8, num_layers=2, num_heads=2, width=8,
    mlp_width=16,
  )  # fmt: skip
  params = jax.tree.map(
    lambda x: jnp.asarray(_random(*x.shape, seed=x.size)), shapes(config)
  )
  return params, jax.tree.map(
    lambda x: jnp.asarray(_random(*x.shape, seed=x.size + 1)), params
  )


def _update(optimizer, params, gradients):
  state = optimizer.init(params)
  return jax.jit(optimizer.update)(gradients, state, params)[0]


def test_l2_ratios_are_those_of_matrix_row_and_column():
  config = _config()
  g, w = _random(3, 5), _random(3, 5, seed=1) / 10
  params = {'final_norm': {'scale': jnp.ones(4)}, 'head': {'kernel': w}}
  gradients = jax.tree.map(jnp.zeros_like, params)
  gradients['head']['kernel'] = jnp.asarray(g)
  optimizer = make_optimizer('adam > decay > l2 merit > clip', config)
  updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  # The norm is clipped before, and the first step of Adam takes the sign.
  z = 0.1 / 0.05**0.5 * np.sign(g) + config.weight_decay * w
  rate = 0.1 / round(config.warmup_share * config.steps)
  np.testing.assert_allclose(
    updates['head']['kernel'], -rate * _by_hand(z, w), rtol=1e-3
  )


def test_the_parts_of_merit_make_merit():
  config, (params, gradients) = _config(), _model()
  chex.assert_trees_all_close(
    _update(
      make_optimizer('adam > decay > merit > clip', config), params, gradients
    ),
    _update(optimizers.make_optimizer(config), params, gradients),
    rtol=1e-5,
    atol=1e-7,
  )


def test_the_trainers_muon_hyperball_is_the_arm():
  config, (params, gradients) = _config('muon-hyperball', 0.05), _model()
  config = dataclasses.replace(config, weight_decay=0.0, adam_rate=0.33)
  chex.assert_trees_all_close(
    _update(
      make_optimizer('muon > l2 > keep l2; adam 0.33', config),
      params,
      gradients,
    ),
    _update(optimizers.make_optimizer(config), params, gradients),
    rtol=1e-5,
    atol=1e-6,
  )
  proportion = _config().init_std
  assert resolve(
    dataclasses.replace(config, init_std=None)
  ).init_std == pytest.approx(2 * proportion, rel=5e-3)


def test_decay_after_the_clip_is_not_scaled():
  config = _config()
  params = {'final_norm': {'scale': jnp.ones(4)}}
  gradients = jax.tree.map(lambda x: 0.1 * x, params)
  optimizer = make_optimizer('adam > merit > clip > decay', config)
  updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  # All elements are alike, so that every norm leads to the same ratio.
  rate = 0.1 / round(config.warmup_share * config.steps)
  expected = jax.tree.map(
    lambda x: -rate * (1 + config.weight_decay) * x, params
  )
  chex.assert_trees_all_close(updates, expected, rtol=1e-5)


# With each part at least once.
_QUICK = {
  'muon > merit > l2 > keep l2; merit 0.33',
  'adam > max > keep max; adam 0.33',
  'muon > decay > row; adam 0.33',
}
_ARMS = sorted({x.arm for x in COMPOSITIONS.values() if x.arm})


@pytest.mark.parametrize(
  'arm',
  [
    pytest.param(arm, marks=() if arm in _QUICK else pytest.mark.slow)
    for arm in _ARMS
  ],
)
def test_each_composition_updates_everything(arm: str):
  config, (params, gradients) = _config('muon', 0.05), _model()
  updates = _update(make_optimizer(arm, config), params, gradients)
  for name, x in jax.tree.leaves_with_path(updates):
    assert np.isfinite(x).all(), name
    assert np.abs(x).max() > 0, name
  if 'keep' not in arm:
    return
  new = optax.apply_updates(params, updates)
  for layer in range(2):
    for name in ('up', 'down'):
      old_w, new_w = (
        np.asarray(tree['blocks']['mlp'][name]['kernel'][layer])
        for tree in (params, new)
      )
      norm = np.linalg.norm if 'keep l2' in arm else lambda x: np.abs(x).max()
      assert norm(new_w) == pytest.approx(float(norm(old_w)), rel=1e-5)
      assert not np.allclose(new_w, old_w)


def test_other_parameters_have_a_rate_of_their_own():
  config, (params, gradients) = _config('muon', 0.05), _model()
  updates = {
    rate: _update(
      make_optimizer(f'muon > l2; adam {rate}', config), params, gradients
    )
    for rate in ('1', '0.25')
  }
  chex.assert_trees_all_close(
    jax.tree.map(lambda x: 4 * x, updates['0.25']['token_embedding']),
    updates['1']['token_embedding'],
    rtol=1e-5,
  )
  chex.assert_trees_all_equal(
    updates['0.25']['blocks']['mlp']['up']['kernel'],
    updates['1']['blocks']['mlp']['up']['kernel'],
  )


def test_unknown_parts_are_refused():
  with pytest.raises(ValueError, match=re.escape('adamw; accepted are adam,')):
    make_optimizer('adamw > l2', _config())


def test_qk_clip_follows_an_arm():
  arm, config, (params, gradients) = 'muon > l2; adam 1', _config(), _model()
  bounded = _config(qk_clip=1.0)
  optimizer = make_optimizer(arm, bounded)
  heads = params['blocks']['attention']['qkv']['kernel'].shape[2]
  updates, _ = jax.jit(optimizer.update)(
    gradients,
    optimizer.init(params),
    params,
    max_logits=jnp.full((2, heads), 4.0),
  )
  plain = _update(make_optimizer(arm, config), params, gradients)
  clipped_LDHXK, free_LDHXK = (
    optax.apply_updates(params, x)['blocks']['attention']['qkv']['kernel']
    for x in (updates, plain)
  )
  # Queries and keys by the root of the excess, values not at all.
  scales_X1 = jnp.array([0.5, 0.5, 1.0])[:, None]
  chex.assert_trees_all_close(clipped_LDHXK, scales_X1 * free_LDHXK, rtol=1e-5)
