import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers
import pytest

from examples.study.arms import make_optimizer, scale_by_l2_trust_ratio
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


def _scale(spec, z, w):
  transform = scale_by_l2_trust_ratio(lambda params: {'w': spec})
  updates, _ = transform.update({'w': z}, transform.init({'w': w}), {'w': w})
  return updates['w']


def test_l2_ratios_are_those_of_matrix_row_and_column():
  z, w = _random(3, 5), _random(3, 5, seed=1)
  scaled = _scale(MuonDimensionNumbers(0, 1), z, w)
  np.testing.assert_allclose(scaled, _by_hand(z, w), rtol=1e-5)


def test_layers_have_l2_ratios_of_their_own():
  z, w = _random(2, 3, 5), _random(2, 3, 5, seed=1)
  scaled = _scale(MuonDimensionNumbers((1,), (2,)), z, w)
  expected = np.stack([_by_hand(*pair) for pair in zip(z, w, strict=True)])
  np.testing.assert_allclose(scaled, expected, rtol=1e-5)


@pytest.mark.parametrize('spec', [None, MuonDimensionNumbers((), (0,))])
def test_vectors_have_the_weight_wise_l2_ratio(spec):
  z, w = _random(7), _random(7, seed=1)
  ratio = np.linalg.norm(w) / np.linalg.norm(z)
  np.testing.assert_allclose(_scale(spec, z, w), ratio * z, rtol=1e-5)


def test_a_zero_norm_makes_the_l2_ratio_one():
  z, w = _random(3, 5), _random(3, 5, seed=1)
  w[1] = 0
  scaled = _scale(MuonDimensionNumbers(0, 1), z, w)
  np.testing.assert_array_equal(scaled[1], z[1])


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
