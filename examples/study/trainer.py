"""Runs a trial, with the model and the batches of ``examples/pretrain.py``."""

from collections.abc import Iterator
import dataclasses
import functools
import hashlib
import itertools
import math
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

from examples import pretrain
from examples.study.rules import make_optimizer
from examples.study.settings import Settings, Trial
import merit_optax


def model_config(settings: Settings) -> pretrain.Config:
  """Returns the settings of a micro-batch for ``examples/pretrain.py``."""
  names = (
    'num_layers', 'num_heads', 'width', 'context_length', 'vocab_size',
    'qk_norm', 'dtype',
  )  # fmt: skip
  rows = settings.micro_batch // settings.context_length
  return pretrain.Config(
    **{name: getattr(settings, name) for name in names},
    data=str(settings.data or 'stdlib'),
    architecture='llama' if settings.llama else 'gpt2',
    init_std=0.02 * math.sqrt(768 / settings.width),
    remat='full' if settings.remat else 'none',
    unroll=settings.num_layers if settings.unroll else 1,
    mesh=f'fsdp={settings.fsdp}',
    batch_size=rows,
    micro_batch_size=max(1, rows // jax.device_count()),
    eval_sequences=settings.eval_tokens // settings.context_length,
  )


@functools.partial(jax.jit, static_argnames='config')
def init_params(config: pretrain.Config) -> Any:
  """Returns the first parameters, placed on the mesh."""
  return jax.tree.map_with_path(pretrain.pin, pretrain.init_params(config))


@functools.partial(jax.jit, static_argnames=('rule', 'steps', 'dtype'))
def init_optimizer(params: Any, rule: str, steps: int, dtype: str) -> Any:
  """Returns the first state of the optimizer, placed like the parameters."""
  state = make_optimizer(rule, 0.0, steps, dtype).init(params)
  return jax.tree.map_with_path(pretrain.pin, state)


@functools.partial(jax.jit, static_argnames='config')
def loss_and_gradients(
  params: Any, tokens_BT: jax.Array, config: pretrain.Config
) -> Any:
  """Returns the mean loss of a micro-batch, and its gradients."""
  loss, grads = jax.value_and_grad(pretrain.loss_fn)(params, tokens_BT, config)
  return loss, jax.tree.map_with_path(pretrain.pin, grads)


@functools.partial(jax.jit, donate_argnames='total')
def add(total: Any, other: Any) -> Any:
  """Returns the sum of two trees."""
  return jax.tree.map(jnp.add, total, other)


# One program for each rule serves all rates, and batches of as many steps.
@functools.partial(
  jax.jit,
  static_argnames=('rule', 'steps', 'dtype'),
  donate_argnames=('params', 'opt_state'),
)
def update(
  params: Any,
  opt_state: Any,
  total: Any,
  count: jax.typing.ArrayLike,
  rate: jax.typing.ArrayLike,
  rule: str,
  steps: int,
  dtype: str,
) -> Any:
  """Returns parameters and optimizer state after a step, and its mean loss."""
  loss, grads = jax.tree.map(lambda x: x / count, total)
  optimizer = make_optimizer(rule, rate, steps, dtype)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  state = jax.tree.map_with_path(pretrain.pin, (params, opt_state))
  return *state, loss


@functools.partial(jax.jit, static_argnames='config')
def max_logits(
  params: Any, tokens_BT: jax.Array, config: pretrain.Config
) -> jax.Array:
  """Returns the largest attention logit of each layer."""
  model = pretrain.make_model(params, config)
  structure, arrays = nnx.split(model.blocks)

  def apply(x_BTD: jax.Array, arrays: Any) -> tuple[jax.Array, jax.Array]:
    block = nnx.merge(structure, arrays)
    y_BTD = block.attention_norm(x_BTD)
    query, key, _ = block.attention.query_key_value(y_BTD)
    logits_H = merit_optax.attention_statistics(query, key).max_logit
    return block(x_BTD), logits_H.max()

  return jax.lax.scan(apply, model.embed(tokens_BT[:, :-1]), arrays)[1]


class Trainer:
  """Runs trials, and keeps what they share: the tokens, and what is compiled.

  Attributes:
    data: First digits of a digest of all tokens.
    corpus_tokens: Number of tokens to train on.
  """

  def __init__(self, settings: Settings):
    self.settings = settings
    self._config = model_config(settings)
    self._tokens, self._val_tokens = pretrain.load_tokens(self._config)
    digest = hashlib.sha256()
    for tokens in (self._tokens, self._val_tokens):
      for path, _ in tokens.shards:
        digest.update(tokens.system.cat_file(path))
    self.data = digest.hexdigest()[:12]
    self.corpus_tokens = int(self._tokens.sizes.sum())
    self._val_ABT = pretrain.make_batch(self._val_tokens, self._config, step=0)

  def _batch_config(self, tokens: int, seed: int = 0) -> pretrain.Config:
    """Returns the settings of batches of so many tokens."""
    return dataclasses.replace(
      self._config,
      seed=seed,
      batch_size=tokens // self.settings.context_length,
    )

  def run(self, trial: Trial) -> dict[str, Any]:
    """Returns what a trial measured.

    Args:
      trial: Rule, rate, seed and batch.

    Returns:
      Losses of all steps and of evaluations, in nats per token, attention
      logits and seconds. A loss that is not finite ends the run.
    """
    start = time.perf_counter()
    steps = self.settings.steps_at(trial.batch_tokens)
    # Seed 0 chooses learning rates.
    every = math.ceil(steps / (12 if trial.seed else 2))
    losses: list[jax.Array] = []
    evaluations: list[dict[str, Any]] = []
    name = f'{trial.rule} {trial.rate(self.settings):g}, seed {trial.seed}'
    progress = tqdm.tqdm(
      self._train(trial), name, steps, leave=False, disable=None
    )
    for step, (params, loss) in enumerate(progress, 1):
      losses.append(loss)
      # The loss of the step before, so that the device need not wait.
      if not np.isfinite(losses[max(0, step - 2)]):
        break
      if step % every == 0 or step == steps:
        found = self._evaluate(params)
        evaluations.append({'step': step} | found)
        progress.write(
          f'{name}: step {step}, loss {found["loss"]:.4f}, largest attention '
          f'logit {max(found["max_logits"]):.1f}'
        )
    train_losses = np.array(losses).round(4).tolist()
    final = evaluations[-1]['loss'] if len(losses) == steps else math.nan
    return {
      'loss': final if np.isfinite([final, *train_losses]).all() else None,
      'evaluations': evaluations,
      'train_losses': train_losses,
      'seconds': round(time.perf_counter() - start, 2),
    }

  def _train(self, trial: Trial) -> Iterator[tuple[Any, jax.Array]]:
    """Yields the parameters after each step, and its loss."""
    settings, rate = self.settings, trial.rate(self.settings)
    config = self._batch_config(trial.batch_tokens, trial.seed)
    params = init_params(dataclasses.replace(self._config, seed=trial.seed))
    steps = settings.steps_at(trial.batch_tokens)
    optimizer = trial.rule, steps, settings.dtype
    opt_state = init_optimizer(params, *optimizer)
    for step in range(1, steps + 1):
      batch_ABT = pretrain.make_batch(self._tokens, config, step)
      total = loss_and_gradients(params, batch_ABT[0], self._config)
      for micro_BT in batch_ABT[1:]:
        total = add(total, loss_and_gradients(params, micro_BT, self._config))
      params, opt_state, loss = update(
        params, opt_state, total, len(batch_ABT), rate, *optimizer
      )
      yield params, loss

  def _evaluate(self, params: Any) -> dict[str, Any]:
    """Returns the loss and the attention logits of 64 sequences."""
    loss = pretrain.eval_step(params, self._val_ABT, self._config)
    tokens_BT = self._val_ABT.reshape(-1, self._val_ABT.shape[-1])[:64]
    logits_L = max_logits(params, tokens_BT, self._config)
    return {
      'loss': round(float(loss), 4),
      'max_logits': [round(x, 2) for x in logits_L.tolist()],
    }

  def tokens_per_second(self) -> float:
    """Returns the speed of training, after compilation."""
    rule, batch_tokens = self.settings.rules[0], self.settings.micro_batch * 2
    trial = Trial(rule, 0, 0, batch_tokens)

    def train(steps: int) -> float:
      start = time.perf_counter()
      for _, loss in itertools.islice(self._train(trial), steps):
        last = loss
      last.block_until_ready()
      return time.perf_counter() - start

    train(1)
    return 10 * batch_tokens / train(10)
