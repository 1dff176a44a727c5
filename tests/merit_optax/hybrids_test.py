"""Weight decay and trust ratios on Muon's direction: which norms run away.

`python -m pytest -s tests/merit_optax/hybrids_test.py` prints the numbers that
the documentation cites.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax

_SPEC = optax.contrib.MuonDimensionNumbers(0, 1)
_RATE = 0.05
_DECAY = 0.1

_l2 = merit_optax.scale_by_l2_norm_trust_ratio
_max = merit_optax.scale_by_max_norm_trust_ratio
_clip = merit_optax.elementwise_clip
_decay = functools.partial(optax.add_decayed_weights, _DECAY)
_orscale_l2 = functools.partial(_l2, min_ratio=0.5, max_ratio=1.5)


def _muon():
  return merit_optax.scale_by_muon(
    weight_dimension_numbers=lambda p: jax.tree.map(lambda _: _SPEC, p)
  )


def _moonlight():
  return merit_optax.scale_by_shape(lambda m, n: 0.2 * max(m, n) ** 0.5)


def _lm_l2():
  return _l2(min_ratio=0.1, max_ratio=5.0, calibrate=True)


# All parts but the learning rate.
_CHAINS = {
  'Muon': (_muon(), _decay()),
  'Muon, l2 ratio, decay after': (_muon(), _l2(), _decay()),
  'Muon, l2 ratio, decay inside': (_muon(), _decay(), _l2()),
  'OrScale, decay after': (_muon(), _orscale_l2(), _decay()),
  'OrScale': (_muon(), _decay(), _orscale_l2()),
  'OrScale-LM, decay after': (_muon(), _moonlight(), _lm_l2(), _decay()),
  'OrScale-LM': (_muon(), _moonlight(), _decay(), _lm_l2()),
  'Muon, relative, decay after': (_muon(), _max(), _clip(), _decay()),
  'Muon, relative': (_muon(), _decay(), _max(), _clip()),
}
_STEPS = 900


@functools.cache
def _growth(name):
  """Returns norms of a matrix, relative to the first, under random gradients.

  Nothing but the rule decides on the norm then.
  """
  optimizer = optax.chain(*_CHAINS[name], optax.scale_by_learning_rate(_RATE))
  start = jax.random.normal(jax.random.key(0), (12, 24)) / 5

  @jax.jit
  def run():
    def step(carry, key):
      w, state = carry
      g = jax.random.normal(key, w.shape)
      updates, state = optimizer.update(g, state, w)
      w = optax.apply_updates(w, updates)
      return (w, state), jnp.linalg.norm(w)

    keys = jax.random.split(jax.random.key(1), _STEPS)
    return jax.lax.scan(step, (start, optimizer.init(start)), keys)[1]

  growth = np.asarray(run() / jnp.linalg.norm(start), np.float64)
  thirds = growth[_STEPS // 3 - 1 :: _STEPS // 3]
  print(f'{name}: growth of the norm in 300, 600, 900 steps', thirds)
  return thirds


def test_without_bounds_norms_run_away_under_decay_after_the_ratio():
  first, second, third = _growth('Muon, l2 ratio, decay after')
  # Exponentially: each step grows by a fraction of the norm, whatever that is.
  assert third > 100 * first
  np.testing.assert_allclose(third / second, second / first, rtol=0.5)


@pytest.mark.parametrize(
  'name', [name for name in _CHAINS if name != 'Muon, l2 ratio, decay after']
)
def test_with_bounds_or_decay_inside_norms_settle(name):
  _, second, third = _growth(name)
  np.testing.assert_allclose(third, second, rtol=0.15)
  inside = name.removesuffix(', decay after')
  if inside != name:  # At larger norms.
    assert third > 1.1 * _growth(inside)[-1]
