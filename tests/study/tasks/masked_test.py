import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.devices.sharding import make_mesh
from examples.study.scales import SCALES
from examples.study.tasks import masked

_LENGTH = 16


def _tokens(seed, count=6):
  generator = np.random.default_rng(seed)
  return jnp.asarray(
    generator.integers(257, size=(count, _LENGTH + 1)), jnp.int32
  )


@pytest.fixture(scope='module')
def trainer():
  config = SCALES['nano'].run('adamw', 8, 0.01).config
  config = dataclasses.replace(
    config, num_layers=1, num_heads=2, width=16, mlp_width=32, unroll=1,
    context_length=_LENGTH, micro_batch_size=8,
  )  # fmt: skip
  mesh = make_mesh('', jax.devices()[:1])
  return masked.MaskedTrainer(config, 257, mesh)


def test_positions_are_random_but_a_function_of_the_sequence():
  tokens_BT = _tokens(0, 600)
  positions = jax.jit(masked.masked_positions)
  positions_BM = np.asarray(positions(tokens_BT))
  count = round(masked.SHARE * (_LENGTH + 1))
  assert positions_BM.shape == (600, count)
  assert all(len(set(row)) == count for row in positions_BM)
  shares = np.bincount(positions_BM.ravel(), minlength=_LENGTH + 1) / 600
  # Six standard deviations.
  np.testing.assert_allclose(shares, count / (_LENGTH + 1), atol=0.09)
  np.testing.assert_array_equal(positions(tokens_BT[::-1])[::-1], positions_BM)


def test_a_masked_token_is_predicted_and_not_seen(trainer, monkeypatch):
  monkeypatch.setattr(
    masked, 'masked_positions', lambda x: jnp.full((len(x), 1), 5)
  )
  params = trainer.init().params
  # Every token that there is, the mask and those that fill up too.
  targets = jnp.arange(trainer.model_config.vocab_size)
  tokens_BT = jnp.tile(_tokens(1, 1), (len(targets), 1)).at[:, 5].set(targets)
  measure = jax.jit(trainer._sequence_losses)
  losses = np.asarray(measure(params, tokens_BT[None])[0])
  assert np.exp(-losses).sum() == pytest.approx(1, rel=1e-4)

  def changed(position):
    others = tokens_BT.at[:, position].add(1)
    return np.abs(measure(params, others[None])[0] - losses).max()

  # From both sides; the token after the sequence is no part of it.
  assert changed(4) > 1e-5
  assert changed(6) > 1e-5
  assert changed(_LENGTH) == 0


def test_the_loss_is_the_mean_of_that_of_sequences(trainer):
  params, tokens_BT = trainer.init().params, _tokens(2)
  loss, _ = jax.jit(trainer.loss)(params, tokens_BT)
  each = trainer.sequence_losses(params, tokens_BT[None])
  assert loss == pytest.approx(float(each.mean()), rel=1e-5)
  assert loss == pytest.approx(np.log(trainer.model_config.vocab_size), abs=0.6)


def test_a_step_learns_what_is_masked(trainer):
  state, tokens_ABT = trainer.init(), jnp.tile(_tokens(3, 1), (1, 8, 1))
  first = None
  for _ in range(30):
    state, metrics = trainer.step(state, tokens_ABT)
    first = first or float(metrics['train_loss'])
  assert metrics['train_loss'] < first - 0.5
