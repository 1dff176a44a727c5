import dataclasses
import math

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
from examples.study.chains import PARTS, Chain
from examples.study.optimizers import HYPERBALL
from examples.study.scales import SCALES


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


def test_the_parts_of_merit_make_merit():
  config, (params, gradients) = _config(), _model()
  chain = Chain(('adam', 'decay', 'merit', 'clip'))
  chex.assert_trees_all_close(
    _update(chain.make(config), params, gradients),
    _update(optimizers.make_optimizer(config), params, gradients),
    rtol=1e-5,
    atol=1e-7,
  )


def test_what_is_recommended_is_the_chain_up_to_two_settings():
  params, gradients = _model()
  config = _config('muon-hyperball', 0.05, init_scale=2.0, weight_decay=0.0)
  assert (config.b1, config.weight_decay) == (0.9, 0.0)
  config = dataclasses.replace(config, adam_rate=0.33)
  chex.assert_trees_all_close(
    _update(HYPERBALL.chain.make(config), params, gradients),
    _update(optimizers.make_optimizer(config), params, gradients),
    rtol=1e-5,
    atol=1e-6,
  )
  default = resolve(dataclasses.replace(config, init_std=None))
  assert config.init_std == default.init_std


_QUICK = {'keep l2': 'lmo row', 'row': 'adam corrected'}


@pytest.mark.parametrize(
  ('part', 'others'),
  [
    pytest.param(
      part,
      _QUICK.get(part, 'adam'),
      marks=() if part in _QUICK else pytest.mark.slow,
    )
    for part in PARTS
  ],
)
def test_every_part_updates_everything(part: str, others: str):
  is_direction = part.startswith(('adam', 'muon'))
  names = (part,) if is_direction else ('muon', part)
  config, (params, gradients) = _config('muon', 0.05), _model()
  updates = _update(Chain(names, others).make(config), params, gradients)
  for name, x in jax.tree.leaves_with_path(updates):
    assert np.isfinite(x).all(), name
    assert np.abs(x).max() > 0, name
  new = optax.apply_updates(params, updates)
  old_LIO, new_LIO = (x['blocks']['mlp']['up']['kernel'] for x in (params, new))
  if part == 'keep l2':
    kept = [[float(jnp.linalg.norm(x)) for x in y] for y in (new_LIO, old_LIO)]
    np.testing.assert_allclose(*kept, rtol=1e-5)


def test_balanced_updates_have_one_size_for_each_output():
  config, (params, gradients) = _config('muon', 0.05), _model()

  def sizes(part: str, axes: int | None) -> np.ndarray:
    optimizer = Chain(('muon', part), 'adam').make(config)
    updates_LIO = _update(optimizer, params, gradients)['blocks']['mlp']['up']
    return np.sqrt(np.mean(updates_LIO['kernel'] ** 2, axis=axes))

  found_LO = sizes('balance', 1)
  np.testing.assert_allclose(found_LO, found_LO[0, 0], rtol=1e-5)
  assert np.ptp(sizes('rms', 1)) > 0.1 * found_LO[0, 0]
  np.testing.assert_allclose(found_LO[0, 0], sizes('rms', None), rtol=0.2)


def test_groups_of_parameters_have_rates_of_their_own():
  config, (params, gradients) = _config('muon', 0.05), _model()

  def updates(**fields):
    chain = Chain(('muon', 'l2'), 'adam', **fields)
    return _update(chain.make(config), params, gradients)

  usual, quarter = updates(), updates(others_rate=0.25)
  own = updates(rates=(('embeddings', 0.25), ('vectors', 0.5)))
  for found, group, factor in (
    (quarter, 'token_embedding', 4), (own, 'token_embedding', 4),
    (own, 'final_norm', 2),
  ):  # fmt: skip
    scaled = optax.tree.scale(factor, found[group])
    chex.assert_trees_all_close(scaled, usual[group], rtol=1e-5)
  for found in (quarter, own):
    ours, theirs = (x['blocks']['mlp']['up']['kernel'] for x in (found, usual))
    np.testing.assert_array_equal(ours, theirs)


def test_the_momentum_of_lars_is_that_of_steps():
  config = _config('lamb', 0.5, b1=0.9, weight_decay=0.01)
  params, gradients = _model()
  schedule = optimizers.make_schedule(config)
  found = Chain(('decay', 'l2', 'trace')).make(config)
  expected = optax.chain(
    optax.clip_by_global_norm(config.max_gradient_norm),
    optax.lars(schedule, 0.01, True, 1.0, momentum=0.9),
  )
  # Layers are stacked, and Optax has one ratio for all of them.
  params, gradients = (
    {k: x[k] for k in ('token_embedding', 'final_norm')}
    for x in (params, gradients)
  )
  states = [x.init(params) for x in (found, expected)]
  for factor in (1.0, -0.3):
    updates = optax.tree.scale(factor, gradients)
    (ours, ours_state), (theirs, theirs_state) = (
      x.update(updates, state, params)
      for x, state in zip((found, expected), states, strict=True)
    )
    states = [ours_state, theirs_state]
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_scion_decays_all_groups_at_the_rate_of_hidden_matrices():
  params, gradients = _model()
  parts, rates = ('muon momentum', 'spectral', 'shrink'), (('embeddings', 0.1),)
  plain, shrinking = (
    _update(
      Chain(parts, 'lmo row', rates=rates).make(
        _config('muon', 0.5, weight_decay=x)
      ),
      params,
      gradients,
    )
    for x in (0.0, 1.0)
  )
  rate = float(optimizers.make_schedule(_config('muon', 0.5))(0))
  chex.assert_trees_all_close(
    optax.tree.sub(plain, shrinking),
    optax.tree.scale(rate, params),
    rtol=1e-3,
    atol=1e-6,
  )
  # Each row of embeddings has an RMS of its rate, each matrix its columns'.
  (rows,) = jax.tree.leaves(plain['token_embedding'])
  rms = jnp.sqrt(jnp.mean(rows**2, 1))
  np.testing.assert_allclose(rms, 0.1 * rate, rtol=1e-5)
  up = plain['blocks']['mlp']['up']['kernel']
  np.testing.assert_allclose(
    jnp.linalg.norm(up, 2, (1, 2)), math.sqrt(2) * rate, rtol=0.3
  )


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'parts': ('adamw', 'l2')}, 'parts .*: adamw; accepted are adam,'),
    ({'others': 'sgd'}, 'others .*: sgd; accepted are .*adam'),
    ({'rates': (('tail', 1.0),)}, 'rates .*: tail; accepted are embeddings'),
  ],
)
def test_unknown_names_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Chain(**{'parts': ('muon',)} | fields)


def test_qk_clip_follows_a_chain():
  chain, config = Chain(('muon', 'l2'), 'adam'), _config()
  params, gradients = _model()
  bounded = _config(qk_clip=1.0)
  optimizer = chain.make(bounded)
  heads = params['blocks']['attention']['qkv']['kernel'].shape[2]
  updates, _ = jax.jit(optimizer.update)(
    gradients,
    optimizer.init(params),
    params,
    max_logits=jnp.full((2, heads), 4.0),
  )
  plain = _update(chain.make(config), params, gradients)
  clipped_LDHXK, free_LDHXK = (
    optax.apply_updates(params, x)['blocks']['attention']['qkv']['kernel']
    for x in (updates, plain)
  )
  # Queries and keys by the root of the excess, values not at all.
  scales_X1 = jnp.array([0.5, 0.5, 1.0])[:, None]
  chex.assert_trees_all_close(clipped_LDHXK, scales_X1 * free_LDHXK, rtol=1e-5)
