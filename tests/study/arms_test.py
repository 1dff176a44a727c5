import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.study.arms import make_optimizer
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


def test_l2_ratios_are_those_of_matrix_row_and_column():
  config = SCALES['nano'].run('merit', 128, 0.1, arm='l2').config
  g, w = _random(3, 5), _random(3, 5, seed=1) / 10
  params = {'final_norm': {'scale': jnp.ones(4)}, 'head': {'kernel': w}}
  gradients = jax.tree.map(jnp.zeros_like, params)
  gradients['head']['kernel'] = jnp.asarray(g)
  optimizer = make_optimizer('l2', config)
  updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  # The norm is clipped before, and the first step of Adam takes the sign.
  z = 0.1 / 0.05**0.5 * np.sign(g) + config.weight_decay * w
  rate = 0.1 / round(config.warmup_share * config.steps)
  np.testing.assert_allclose(
    updates['head']['kernel'], -rate * _by_hand(z, w), rtol=1e-3
  )


@pytest.mark.parametrize('arm', ['l2', 'decay_outside'])
def test_arms_differ_from_merit_only_in_what_they_say(arm):
  config = SCALES['nano'].run('merit', 128, 0.1, arm=arm).config
  params = {'final_norm': {'scale': jnp.ones(4)}}
  gradients = jax.tree.map(lambda x: 0.1 * x, params)
  optimizer = make_optimizer(arm, config)
  updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  # All elements are alike, so that every norm leads to the same ratio.
  decay = config.weight_decay if arm == 'decay_outside' else 0.0
  rate = 0.1 / round(config.warmup_share * config.steps)
  expected = jax.tree.map(lambda x: -rate * (1 + decay) * x, params)
  chex.assert_trees_all_close(updates, expected, rtol=1e-5)
  assert optax.tree.get(optimizer.init(params), 'ScaleByAdamState') is not None
