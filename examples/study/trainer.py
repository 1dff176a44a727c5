"""Runs a trial, with model, loss, mesh and token files of examples/gpt2."""

from collections.abc import Iterator
import functools
import itertools
import json
import math
import os
from pathlib import Path
import time
from typing import Any
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

from examples.gpt2.config import ModelConfig, complete, padded_vocab_size
from examples.gpt2.data import TokenSequences, fixed_batches
from examples.gpt2.loss import mean_cross_entropy
from examples.gpt2.model import Transformer, as_module, causal_attention
from examples.gpt2.sharding import num_batch_shards, parameter_shardings
from examples.gpt2.token_files import PARTS, open_part
from examples.study.rules import Moments, make_optimizer
from examples.study.settings import Settings, Trial
import merit_optax

_TAIL = 0.2
"""Share of the steps at the end whose weights are averaged."""
_POINTS = 100
"""At most so many losses and logits of a trial are recorded."""


def model_config(settings: Settings) -> ModelConfig:
  """Returns what the model is."""
  names = (
    'architecture', 'num_layers', 'num_heads', 'width', 'context_length',
    'qk_norm', 'dtype', 'remat', 'unroll',
  )  # fmt: skip
  model = ModelConfig(
    **{name: getattr(settings, name) for name in names},
    vocab_size=padded_vocab_size(settings.vocab_size),
    init_std=0.02 * math.sqrt(768 / settings.width),
    norm_epsilon=1e-5,
  )
  return complete(model)


def _with_shardings(params: Any) -> Any:
  """Returns the shapes of parameters, and how they lie on the current mesh."""
  shardings = parameter_shardings(jax.sharding.get_abstract_mesh(), params)
  return jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    params,
    shardings,
  )


def _place(params: Any) -> Any:
  shardings = jax.tree.map(lambda x: x.sharding, _with_shardings(params))
  return jax.lax.with_sharding_constraint(params, shardings)


def _place_state(
  optimizer: optax.GradientTransformation, state: Any, params: Any
) -> Any:
  shardings = merit_optax.state_shardings(optimizer, _with_shardings(params))
  return jax.lax.with_sharding_constraint(state, shardings)


@functools.partial(jax.jit, static_argnames='config')
def init_params(config: ModelConfig, seed: jax.typing.ArrayLike) -> Any:
  """Returns the first parameters, placed on the mesh."""
  model = Transformer(config, rngs=nnx.Rngs(jax.random.key(seed)))
  return _place(nnx.as_pure(nnx.state(model)))


_STATIC = ('rule', 'steps', 'warmup', 'moments')


@functools.partial(jax.jit, static_argnames=_STATIC)
def init_optimizer(
  params: Any, rule: str, steps: int, warmup: float, moments: Moments
) -> Any:
  """Returns the first state of the optimizer, placed like the parameters."""
  optimizer = make_optimizer(rule, 0.0, steps, warmup, moments)
  return _place_state(optimizer, optimizer.init(params), params)


@functools.partial(jax.jit, static_argnames='config')
def loss_fn(
  params: Any, tokens_1BT: jax.Array, config: ModelConfig
) -> jax.Array:
  """Returns the mean loss of a micro-batch, (1, B, T + 1), in nats a token."""
  model, (tokens_BT,) = as_module(config, params), tokens_1BT
  features_BTD, _ = model.features(tokens_BT[:, :-1])
  return mean_cross_entropy(features_BTD, model.head_VD, tokens_BT[:, 1:])


@functools.partial(jax.jit, static_argnames='config')
def loss_and_gradients(
  params: Any, tokens_1BT: jax.Array, config: ModelConfig
) -> Any:
  """Returns the mean loss of a micro-batch, and its gradients."""
  loss, grads = jax.value_and_grad(loss_fn)(params, tokens_1BT, config)
  return loss, _place(grads)


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
  return _place(params), _place_state(optimizer, opt_state, params), loss


@functools.partial(jax.jit, static_argnames='config')
def max_logits(
  params: Any, tokens_1BT: jax.Array, config: ModelConfig
) -> jax.Array:
  """Returns the largest attention logit of each layer."""

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    logits_H = merit_optax.attention_statistics(q, k).max_logit
    return causal_attention(q, k, v)[0], logits_H.max()

  model = as_module(config, params)
  return model.features(tokens_1BT[0, :, :-1], attend)[1]


def open_tokens(settings: Settings) -> list[list[Any]]:
  """Returns the files of tokens to train on, and of those to validate on."""
  if settings.data != 'stdlib':
    folder, size = Path(settings.data), settings.vocab_size
    return [open_part(folder, part, size) for part in PARTS]
  files = sorted(Path(os.__file__).parent.glob('*.py'))
  text = b''.join(file.read_bytes() for file in files)
  tokens = np.frombuffer(text, np.uint8)
  return [[x] for x in np.split(tokens, [len(tokens) * 95 // 100])]


class Trainer:
  """Runs trials, and keeps what they share: the tokens, and what is compiled.

  Attributes:
    data: Digits of hashes of the tokens, and of a batch.
    corpus_tokens: Number of tokens to train on.
  """

  def __init__(self, settings: Settings):
    self.settings = settings
    self._config = model_config(settings)
    files = open_tokens(settings)
    length, size = settings.context_length, settings.vocab_size
    # A sequence begins at any token.
    self._train_set, self._val_set = (
      TokenSequences(x, length, size, stride=1) for x in files
    )
    self.corpus_tokens = sum(map(len, files[0]))
    code = zlib.crc32(json.dumps([[len(x) for x in y] for y in files]).encode())
    for part in files:
      windows = TokenSequences(part, length - 1, size, stride=1)
      for i in _spread(windows, 64).tolist():
        code = zlib.crc32(windows[i].tobytes(), code)
    first = np.stack([self._train_set[i] for i in self._places(0, 1, 64)])
    self.data = f'{code:08x}-{zlib.crc32(first.tobytes()):08x}'
    # Sequences to validate on, and a few, as far apart, whose logits are
    # measured.
    sequences = settings.eval_tokens // length
    rows = self._rows(sequences)
    count = max(1, sequences // rows) * rows
    self._val_batches = [*self._batches(self._val_set, count, rows)]
    few = settings.logit_sequences
    (self._logits_1BT,) = self._batches(self._val_set, few, few)

  def _rows(self, sequences: int) -> int:
    """Returns the sequences of a micro-batch, on all devices together."""
    settings, mesh = self.settings, jax.sharding.get_mesh()
    most = settings.micro_batch // settings.context_length
    return min(most * num_batch_shards(mesh), sequences)

  def _batches(
    self, sequences: TokenSequences, count: int, rows: int
  ) -> Iterator[jax.Array]:
    """Yields micro-batches of sequences that are spread evenly."""
    places = _spread(sequences, count)
    return fixed_batches(sequences, places, rows, jax.sharding.get_mesh())

  def _places(self, seed: int, step: int, count: int) -> list[int]:
    """Returns which sequences a step takes."""
    rng = np.random.default_rng((seed, step))
    return rng.integers(len(self._train_set), size=count).tolist()

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
        logits.append(max_logits(params, self._logits_1BT, self._config))
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
      final = self._validate(params)
      mean = jax.tree.map(lambda x: x / count, tail)
      average = self._validate(mean)
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
    params = init_params(self._config, trial.seed)
    steps = settings.steps_at(trial.batch_tokens)
    moments = Moments(settings.b1, settings.eps, settings.dtype)
    optimizer = trial.rule, steps, settings.warmup, moments
    opt_state = init_optimizer(params, *optimizer)
    sequences = trial.batch_tokens // settings.context_length
    rows = self._rows(sequences)
    places = np.concatenate(
      [self._places(trial.seed, i + 1, sequences) for i in range(steps)]
    )
    micro_batches = fixed_batches(
      self._train_set, places, rows, jax.sharding.get_mesh()
    )
    count = sequences // rows
    for _ in range(steps):
      total = None
      for micro_1BT in itertools.islice(micro_batches, count):
        one = loss_and_gradients(params, micro_1BT, self._config)
        total = add(total, one) if total else one
      params, opt_state, loss = update(
        params, opt_state, total, count, rate, *optimizer
      )
      yield params, loss

  def _validate(self, params: Any) -> float:
    """Returns the mean loss on held-out tokens."""
    losses = [loss_fn(params, x, self._config) for x in self._val_batches]
    return float(np.mean(losses))

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


def _spread(sequences: TokenSequences, count: int) -> np.ndarray:
  """Returns places of sequences, the first and the last among them."""
  return np.linspace(0, len(sequences) - 1, count, dtype=int)


def _spans(values: np.ndarray) -> list[np.ndarray]:
  """Returns the values of up to 100 spans of steps."""
  return (
    np.array_split(values, min(_POINTS, len(values))) if len(values) else []
  )


def _rounded(values: Any, digits: int = 2) -> list[float]:
  return [round(float(x), digits) for x in values]
