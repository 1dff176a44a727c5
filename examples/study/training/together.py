"""Trains trials that differ in learning rate and seed alone, as one program.

So several small models share an accelerator, and compile once. A group that is
killed starts again.

Letters at the end of a name give the axes of an array: R trials; A
micro-batches, B sequences and T tokens of each.
"""

from collections.abc import Sequence
import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.gpt2.config import FittedConfig, digest
from examples.gpt2.data import batches
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.run import memory
from examples.gpt2.run.step import Trainer, TrainState
from examples.study.training.train import make_record, make_trainer, set_up
from examples.study.trial import Trial

_VARIED = ('learning_rate', 'seed')


def group(trials: Sequence[Trial], most: int) -> list[list[Trial]]:
  """Groups trials that can be trained together, at most so many at once."""
  groups: dict[str, list[Trial]] = {}
  for trial in trials:
    groups.setdefault(_shared(trial), []).append(trial)
  return [
    found[i : i + most]
    for found in groups.values()
    for i in range(0, len(found), most)
  ]


def _shared(trial: Trial) -> str:
  """Returns what trials share that can be trained together."""
  if trial.with_diagnostics:
    return trial.key
  return digest({k: v for k, v in trial.identity.items() if k not in _VARIED})


def train(trials: Sequence[Trial]) -> list[dict[str, Any]]:
  """Trains trials that differ in learning rate and seed alone, to their end.

  Args:
    trials: Trials of one group.

  Returns:
    Their records, as :func:`examples.study.training.train.train` makes them;
    losses differ by rounding from those of trials that are trained alone.

  Raises:
    OutOfMemoryError: If a device has too little memory.
  """
  start = time.perf_counter()
  config, tokens, trainer = set_up(trials[0])
  configs = [
    dataclasses.replace(
      config, seed=x.config.seed, learning_rate=x.config.learning_rate
    )
    for x in trials
  ]
  with memory.advice(config, trainer), jax.set_mesh(trainer.mesh):
    params, steps_done = _train(trials[0], configs, tokens, trainer)
    losses = _evaluate(config, tokens, trainer, params)
  # Programs of these trials, which no others have.
  jax.clear_caches()
  seconds = time.perf_counter() - start
  count = sum(steps_done) * config.batch_size * config.context_length
  records = []
  for trial, loss, done in zip(trials, losses, steps_done, strict=True):
    has_ended = done == config.steps and math.isfinite(loss)
    found = {
      'loss': round(float(loss), 5) if has_ended else None,
      'corpus_sha256': tokens.sha256,
      'parameters': trainer.num_params,
      'steps_done': done,
      'diagnostics': {},
      'tokens_per_second': round(count / seconds),
      'together': len(trials),
    }
    records.append(make_record(trial, found, seconds / len(trials)))
  return records


def _train(
  trial: Trial,
  configs: Sequence[FittedConfig],
  tokens: Tokens,
  trainer: Trainer,
) -> tuple[Any, list[int]]:
  """Returns the final parameters, and the steps that each trial took."""

  def with_rate(rate: Any, seed: Any) -> Trainer:
    changed = dataclasses.replace(configs[0], learning_rate=rate, seed=seed)
    return make_trainer(trial, changed, tokens, trainer.mesh)

  @jax.jit
  @jax.vmap
  def init(rate: jax.Array, seed: jax.Array) -> TrainState:
    return with_rate(rate, seed).init()

  @jax.vmap
  def step(
    rate: jax.Array, seed: jax.Array, state: TrainState, tokens_ABT: jax.Array
  ) -> tuple[TrainState, jax.Array]:
    state, metrics = with_rate(rate, seed).step(state, tokens_ABT)
    is_loss_finite = jnp.isfinite(metrics['train_loss'])
    return state, is_loss_finite & jnp.isfinite(metrics['gradient_norm'])

  step = jax.jit(step, donate_argnums=2)
  rates_R = jnp.array([x.learning_rate for x in configs])
  seeds_R = jnp.array([x.seed for x in configs], jnp.uint32)
  state = init(rates_R, seeds_R)
  finite = []
  for number in range(1, configs[0].steps + 1):
    batch = _make_batch(configs, tokens, number, trainer)
    state, finite_R = step(rates_R, seeds_R, state, batch)
    finite.append(finite_R)
  # The steps of a trial that stops at its first loss that is not finite.
  is_running_SR = np.logical_and.accumulate(jax.device_get(finite))
  return state.params, is_running_SR.sum(0).tolist()


def _make_batch(
  configs: Sequence[FittedConfig], tokens: Tokens, step: int, trainer: Trainer
) -> np.ndarray:
  """Returns the batch of each trial, (R, A, B, T + 1)."""
  by_seed = {
    x.seed: np.asarray(
      batches.training_batch(tokens.train, x, step, trainer.mesh)
    )
    for x in configs
  }
  return np.stack([by_seed[x.seed] for x in configs])


def _evaluate(
  config: FittedConfig, tokens: Tokens, trainer: Trainer, params: Any
) -> np.ndarray:
  """Returns the mean validation loss of each trial, nats a token, (R,)."""
  held_out, count = batches.validation_batch(
    tokens.validation, config, trainer.mesh
  )
  measure = jax.vmap(trainer.sequence_losses, in_axes=(0, None))
  losses = np.asarray(jax.jit(measure)(params, held_out), dtype=float)
  return losses.reshape(len(losses), -1)[:, :count].mean(-1)
