"""Trust ratios on Muon's direction: which combinations fail, and how.

`python -m pytest -s -m '' tests/merit_optax/hybrids_test.py` prints the numbers
that the documentation cites.
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


# A small network whose matrices are between norms, and a teacher of its kind.

_WIDTH, _HIDDEN, _BLOCKS = 16, 32, 2


def _init(seed):
  keys = jax.random.split(jax.random.key(seed), 2 * _BLOCKS + 1)
  shapes = {f'up{i}': (_WIDTH, _HIDDEN) for i in range(_BLOCKS)}
  shapes |= {f'down{i}': (_HIDDEN, _WIDTH) for i in range(_BLOCKS)}
  shapes |= {'head': (_WIDTH, _WIDTH)}
  return {
    name: jax.random.normal(key, shape) / shape[0] ** 0.5
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def _logits(params, x):
  def rms_norm(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

  for i in range(_BLOCKS):
    hidden = jax.nn.relu(rms_norm(x) @ params[f'up{i}'])
    x = x + hidden @ params[f'down{i}']
  return rms_norm(x) @ params['head']


def _loss(params, key, batch=64):
  inputs, noise = (
    jax.random.normal(k, (batch, _WIDTH)) for k in jax.random.split(key)
  )
  labels = jnp.argmax(_logits(_init(99), inputs) + 0.3 * noise, axis=-1)
  return optax.losses.softmax_cross_entropy_with_integer_labels(
    _logits(params, inputs), labels
  ).mean()


@functools.partial(jax.jit, static_argnums=(0, 2))
def _train(name, seed, steps):
  """Returns the final parameters, and those and the gradients of each step."""
  optimizer = optax.chain(
    *_CHAINS[name],
    optax.scale_by_learning_rate(optax.linear_schedule(0.02, 0.0, steps)),
  )

  def step(carry, key):
    params, state = carry
    gradients = jax.grad(_loss)(params, key)
    updates, state = optimizer.update(gradients, state, params)
    return (optax.apply_updates(params, updates), state), (params, gradients)

  params = _init(seed)
  keys = jax.random.split(jax.random.key(100 + seed), steps)
  (params, _), history = jax.lax.scan(
    step, (params, optimizer.init(params)), keys
  )
  return params, history


def _quotients(name, above, below):
  """Returns quotients of norms of all matrices and steps, and prints them."""
  values = np.array([above[k] / below[k] for k in above])
  print(name, np.percentile(values, [5, 50, 95]), '(5, 50, 95 %)')
  return values


def test_what_orscale_divides_by():
  _, (params, gradients) = _train('OrScale', 0, 400)

  def outputs(transform):
    def step(state, gradient):
      output, state = transform.update(gradient, state)
      return state, output

    state = transform.init(_init(0))
    return jax.jit(jax.lax.scan, static_argnums=0)(step, state, gradients)[1]

  direction = outputs(_muon())
  with_decay = jax.tree.map(lambda q, w: q + _DECAY * w, direction, params)
  momentum = outputs(optax.trace(0.95, nesterov=True))
  weights, q, real, m = (
    {k: np.linalg.norm(x, axis=(1, 2)) for k, x in tree.items()}
    for tree in (params, direction, with_decay, momentum)
  )
  # The norm of Muon's direction is that of its shape.
  rank = {
    k: np.full_like(q[k], min(x.shape) ** 0.5) for k, x in _init(0).items()
  }
  shares = _quotients('|Q| / sqrt(rank)', q, rank)
  np.testing.assert_allclose(shares, 0.9, atol=0.15)
  # With its decay too: what OrScale divides by says little more.
  shares = _quotients('|Q + decay W| / |Q|', real, q)
  np.testing.assert_allclose(shares, 1, atol=0.1)
  # Ratios to the raw momentum are out of bounds.
  raw = _quotients('|W| / |M|', weights, m)
  ratio = _quotients('|W| / |Q + decay W|', weights, real)
  shares = [np.mean((x < 0.5) | (x > 1.5)) for x in (raw, ratio)]
  print('out of bounds: to the raw momentum, to the update', shares)
  assert shares[0] > 0.9 > shares[1]


@pytest.mark.slow
def test_with_bounds_decay_after_the_ratio_costs_little():
  losses = {}
  for name in _CHAINS:
    ends = [_train(name, seed, 1000)[0] for seed in range(3)]
    losses[name] = [
      float(_loss(params, jax.random.key(1000), 4096)) for params in ends
    ]
    growth = max(
      float(jnp.linalg.norm(params[k]) / jnp.linalg.norm(w))
      for seed, params in enumerate(ends)
      for k, w in _init(seed).items()
    )
    print(f'{name}: losses {losses[name]}, largest growth {growth}')
  for name in ('OrScale', 'OrScale-LM'):
    np.testing.assert_allclose(
      losses[f'{name}, decay after'], losses[name], atol=0.02
    )
