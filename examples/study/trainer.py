"""Runs a trial, with the model and the batches of ``examples/pretrain.py``."""

from collections.abc import Iterator
import dataclasses
import functools
import hashlib
import itertools
import math
import time
from typing import Any
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import optax
import tqdm

from examples import pretrain
from examples.study.rules import Moments, make_optimizer
from examples.study.settings import Settings, Trial
import merit_optax

_TAIL = 0.2
"""Share of the steps at the end whose weights are averaged."""
_POINTS = 100
"""At most so many losses and logits of a trial are recorded."""


def model_config(settings: Settings) -> pretrain.Config:
  """Returns the settings of the largest batch for ``examples/pretrain.py``."""
  fields = {x.name for x in dataclasses.fields(pretrain.Config)}
  shared = {k: v for k, v in vars(settings).items() if k in fields}
  length = settings.context_length
  return pretrain.Config(
    **shared,
    init_std=0.02 * math.sqrt(768 / settings.width),
    batch_size=max(settings.batches) // length,
    micro_batch_size=settings.micro_batch // length,
    eval_sequences=settings.eval_tokens // length,
  )


@functools.partial(jax.jit, static_argnames='config')
def init_params(config: pretrain.Config) -> Any:
  """Returns the first parameters, placed on the mesh."""
  return jax.tree.map_with_path(pretrain.pin, pretrain.init_params(config))


_STATIC = ('rule', 'steps', 'warmup', 'moments')


@functools.partial(jax.jit, static_argnames=_STATIC)
def init_optimizer(
  params: Any, rule: str, steps: int, warmup: float, moments: Moments
) -> Any:
  """Returns the first state of the optimizer, placed like the parameters."""
  state = make_optimizer(rule, 0.0, steps, warmup, moments).init(params)
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
  jax.jit, static_argnames=_STATIC, donate_argnames=('params', 'opt_state')
)
def update(
  params: Any,
  opt_state: Any,
  total: Any,
  count: jax.typing.ArrayLike,
  rate: jax.typing.ArrayLike,
  rule: str,
  steps: int,
  warmup: float,
  moments: Moments,
) -> Any:
  """Returns parameters and optimizer state after a step, and its mean loss."""
  loss, grads = jax.tree.map(lambda x: x / count, total)
  optimizer = make_optimizer(rule, rate, steps, warmup, moments)
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
    query, key, _ = block.attention.query_key_value(block.attention_norm(x_BTD))
    logits_H = merit_optax.attention_statistics(query, key).max_logit
    return block(x_BTD), logits_H.max()

  return jax.lax.scan(apply, model.embed(tokens_BT[:, :-1]), arrays)[1]


def code_digest(settings: Settings, rule: str) -> str:
  """Returns digits of a digest of the programs that decide a rule's losses.

  Only what they compute counts, not how the code is written; but another
  version of jax may write the same program differently.
  """
  plain = dataclasses.replace(
    settings, micro_batch=settings.context_length,
    batches=(settings.context_length,), remat='none', unroll=1, mesh='',
  )  # fmt: skip
  config = model_config(plain)
  moments = Moments(settings.b1, settings.eps, settings.dtype)
  optimizer = rule, 100, settings.warmup, moments
  one_device = jax.make_mesh(
    (1, 1, 1), pretrain.AXES, axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[:1],
  )  # fmt: skip
  with jax.set_mesh(one_device):
    params = jax.eval_shape(lambda: init_params(config))
    state = jax.eval_shape(lambda x: init_optimizer(x, *optimizer), params)
    tokens_BT = jax.ShapeDtypeStruct((1, config.context_length + 1), jnp.int32)
    lowered = (
      init_params.lower(config),
      loss_and_gradients.lower(params, tokens_BT, config),
      update.lower(params, state, (0.0, params), 1.0, 0.1, *optimizer),
    )
  text = ''.join(x.as_text() for x in lowered)
  return hashlib.sha256(text.encode()).hexdigest()[:8]


class Trainer:
  """Runs trials, and keeps what they share: the tokens, and what is compiled.

  Attributes:
    data: Digits of hashes of the tokens, and of a batch.
    corpus_tokens: Number of tokens to train on.
  """

  def __init__(self, settings: Settings):
    self.settings = settings
    self._config = model_config(settings)
    self._tokens, val_tokens = pretrain.load_tokens(self._config)
    some = dataclasses.replace(self._config, batch_size=64)
    batch_ABT = pretrain.make_batch(self._tokens, some, step=1)
    text = pretrain.digest([self._tokens, val_tokens], settings.context_length)
    self.data = f'{text}-{zlib.crc32(np.asarray(batch_ABT).tobytes()):08x}'
    self.corpus_tokens = int(self._tokens.sizes.sum())
    # Of step 0 are the sequences to validate on, and a few of these, as far
    # apart, are those whose logits are measured.
    self._val_ABT = pretrain.make_batch(val_tokens, self._config, step=0)
    few = dataclasses.replace(
      self._config,
      eval_sequences=settings.logit_sequences,
      micro_batch_size=settings.logit_sequences,
    )
    self._logits_BT = pretrain.make_batch(val_tokens, few, step=0)[0]

  def run(self, trial: Trial) -> dict[str, Any]:
    """Returns what a trial measured.

    Args:
      trial: Rule, rate, seed and batch.

    Returns:
      The final loss on held-out tokens in nats per token, ``None`` if a loss
      was not finite, which ends the run; and that of the mean of the weights
      of the last fifth of the steps. Attention logits of each layer: the
      largest of every second step, and those at the end. Means of training
      losses and maxima of logits in up to 100 spans of steps. Seconds.
    """
    start = time.perf_counter()
    steps = self.settings.steps_at(trial.batch_tokens)
    losses: list[jax.Array] = []
    logits: list[jax.Array] = []
    tail, count = None, 0
    name = f'{trial.rule} {trial.rate(self.settings):g}, seed {trial.seed}'
    progress = tqdm.tqdm(
      self._train(trial), name, steps, leave=False, disable=None
    )
    for step, (params, loss) in enumerate(progress, 1):
      losses.append(loss)
      if step % 2 == 0 or step == steps:
        logits.append(max_logits(params, self._logits_BT, self._config))
      # The loss of the step before, so that the device need not wait.
      if not np.isfinite(losses[max(0, step - 2)]):
        break
      if step > (1 - _TAIL) * steps:
        tail = add(tail, params) if tail else jax.tree.map(jnp.copy, params)
        count += 1
    measured = np.array(losses)
    logits_SL = np.array(logits).reshape(-1, self.settings.num_layers)
    final = average = math.nan
    if len(losses) == steps and np.isfinite(measured).all():
      final = float(pretrain.eval_step(params, self._val_ABT, self._config))
      mean = jax.tree.map(lambda x: x / count, tail)
      average = float(pretrain.eval_step(mean, self._val_ABT, self._config))
    return {
      'loss': round(final, 4) if math.isfinite(final) else None,
      'average_loss': round(average, 4) if math.isfinite(average) else None,
      'peak_logits': _rounded(logits_SL.max(0, initial=-np.inf)),
      'final_logits': _rounded(logits_SL[-1]) if logits else [],
      'train_losses': _rounded([x.mean() for x in _spans(measured)], 4),
      'logits': _rounded([x.max() for x in _spans(logits_SL)]),
      'seconds': round(time.perf_counter() - start, 2),
    }

  def _train(self, trial: Trial) -> Iterator[tuple[Any, jax.Array]]:
    """Yields the parameters after each step, and its loss."""
    settings, rate = self.settings, trial.rate(self.settings)
    seeded = dataclasses.replace(self._config, seed=trial.seed)
    batches = dataclasses.replace(
      seeded, batch_size=trial.batch_tokens // settings.context_length
    )
    params = init_params(seeded)
    steps = settings.steps_at(trial.batch_tokens)
    moments = Moments(settings.b1, settings.eps, settings.dtype)
    optimizer = trial.rule, steps, settings.warmup, moments
    opt_state = init_optimizer(params, *optimizer)
    for step in range(1, steps + 1):
      batch_ABT = pretrain.make_batch(self._tokens, batches, step)
      total = loss_and_gradients(params, batch_ABT[0], self._config)
      for micro_BT in batch_ABT[1:]:
        total = add(total, loss_and_gradients(params, micro_BT, self._config))
      params, opt_state, loss = update(
        params, opt_state, total, len(batch_ABT), rate, *optimizer
      )
      yield params, loss

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


def _spans(values: np.ndarray) -> list[np.ndarray]:
  """Returns the values of up to 100 spans of steps."""
  return (
    np.array_split(values, min(_POINTS, len(values))) if len(values) else []
  )


def _rounded(values: Any, digits: int = 2) -> list[float]:
  return [round(float(x), digits) for x in values]
