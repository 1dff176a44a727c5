import dataclasses

import chex
import jax
import numpy as np
import pytest

from examples.gpt2.config import Config
from examples.gpt2.presets import resolve
from examples.gpt2.sharding import make_mesh
from examples.gpt2.training import (
  Trainer,
  make_optimizer,
  make_schedule,
  sequence_losses,
)


def _train(config: Config, steps: int) -> tuple[list[float], dict]:
  """Trains on random tokens and returns losses and an evaluation."""
  devices = jax.devices() if config.mesh else jax.devices()[:1]
  mesh = make_mesh(config.mesh, devices)
  generator = np.random.default_rng(0)
  with jax.set_mesh(mesh):
    trainer = Trainer(config, 64, mesh)
    state, losses = trainer.init(), []
    for _ in range(steps):
      sequences = generator.integers(64, size=(config.batch_size, 17)) // 2
      batch = trainer.put_micro_batches(sequences.astype(np.int32))
      state, loss = trainer.step(state, batch)
      losses.append(float(loss))
    evaluation = trainer.evaluate(state.params, sequences[:5])
  return losses, evaluation


@pytest.fixture
def config() -> Config:
  return resolve(
    Config(
      num_layers=2,
      num_heads=2,
      width=16,
      context_length=16,
      batch_size=16,
      micro_batch_size=16,
      steps=30,
    )
  )


def test_loss_and_gradients_do_not_depend_on_micro_batches(config: Config):
  sequences = np.random.default_rng(0).integers(64, size=(16, 17))

  def gradients(size: int):
    trainer = Trainer(
      dataclasses.replace(config, micro_batch_size=size),
      64,
      make_mesh('', jax.devices()[:1]),
    )
    tokens = trainer.put_micro_batches(sequences.astype(np.int32))
    return jax.jit(trainer.loss_and_gradients)(trainer.init().params, tokens)

  whole = gradients(16)
  for size in (1, 4):
    chex.assert_trees_all_close(gradients(size), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
  ('optimizer', 'mesh'),
  [
    ('merit', 'fsdp=4,tensor=2'),
    ('adamw', 'data=2,fsdp=2,tensor=2'),
    ('lamb', 'data=8'),
  ],
)
def test_a_mesh_gives_the_losses_of_one_device(
  config: Config, optimizer: str, mesh: str
):
  config = dataclasses.replace(config, optimizer=optimizer)
  expected, evaluation = _train(config, 20)
  losses, sharded_evaluation = _train(
    dataclasses.replace(config, mesh=mesh), 20
  )
  np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)
  assert expected[-1] < expected[0] - 0.1
  np.testing.assert_allclose(
    sharded_evaluation['val_loss'], evaluation['val_loss'], rtol=0, atol=1e-4
  )


def test_evaluation_counts_each_sequence_once(config: Config):
  mesh = make_mesh('', jax.devices()[:1])
  trainer = Trainer(config, 64, mesh)
  params = trainer.init().params
  sequences = np.random.default_rng(1).integers(64, size=(21, 17))
  losses = sequence_losses(trainer.logits(params, sequences[:, :-1]), sequences)
  evaluation = trainer.evaluate(params, sequences.astype(np.int32))
  assert evaluation['val_loss'] == pytest.approx(float(losses.mean()), abs=1e-5)


def test_losses_are_negative_log_likelihoods():
  logits = np.log(np.array([[[0.25, 0.75], [0.5, 0.5]]], np.float32))
  tokens = np.array([[0, 1, 0]])
  expected = -(np.log(0.75) + np.log(0.5)) / 2
  np.testing.assert_allclose(sequence_losses(logits, tokens), [expected], 1e-6)


@pytest.mark.parametrize('steps', [1, 5, 100])
def test_schedule_warms_up_and_ends_near_zero(steps: int):
  schedule = make_schedule(resolve(Config(steps=steps, learning_rate=1.0)))
  rates = np.array([schedule(step) for step in range(steps)])
  assert (rates > 0).all()
  assert rates.max() == pytest.approx(1.0)
  if steps == 100:
    assert rates.argmax() == 10
    assert rates[-1] < 0.001
    assert (np.diff(rates[:10]) > 0).all()


@pytest.mark.parametrize('optimizer', ['merit', 'adamw', 'lamb'])
def test_settings_reach_the_optimizer(optimizer: str):
  params = {'w': jax.numpy.linspace(-1.0, 2.0, 12).reshape(4, 3)}
  gradient = {'w': 0.1 * jax.numpy.cos(params['w'])}

  def update(**settings):
    config = resolve(Config(optimizer=optimizer, steps=10, **settings))
    transform = make_optimizer(config)
    updates, _ = transform.update(gradient, transform.init(params), params)
    return updates['w']

  base = update(learning_rate=0.01, weight_decay=0.0)
  faster = update(learning_rate=0.02, weight_decay=0.0)
  np.testing.assert_allclose(faster, 2 * base, rtol=1e-5)
  decayed = update(learning_rate=0.01, weight_decay=0.5)
  assert np.abs(decayed - base).max() > 1e-5
