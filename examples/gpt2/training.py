"""The optimizer, the state of training, and the compiled steps."""

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax

from examples.gpt2 import sharding
from examples.gpt2.config import Config
from examples.gpt2.model import (
  GPT2,
  GPT2Config,
  logits_and_max_attention_logits,
)
import merit_optax

_WARMUP_SHARE = 0.1
_MAX_GRADIENT_NORM = 1.0
# Sizes that a power of two divides are quicker, and split over a tensor axis.
_VOCAB_MULTIPLE = 64
_BETAS = dict(b1=0.9, b2=0.95)
_OPTIMIZERS = {
  'merit': merit_optax.merit,
  'adamw': optax.adamw,
  'lamb': optax.lamb,
}


class TrainState(NamedTuple):
  """What a step changes.

  Attributes:
    params: Tree of float32 parameters.
    opt_state: State of the optimizer.
  """

  params: Any
  opt_state: Any


def make_schedule(config: Config) -> optax.Schedule:
  """Returns the learning rate by step: linear warm-up, then cosine to zero."""
  warmup_steps = round(_WARMUP_SHARE * config.steps)
  return optax.warmup_cosine_decay_schedule(
    init_value=config.learning_rate / max(1, warmup_steps),
    peak_value=config.learning_rate,
    warmup_steps=warmup_steps,
    decay_steps=config.steps,
  )


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """Returns the optimizer, behind a clip of the gradient's global norm."""
  return optax.chain(
    optax.clip_by_global_norm(_MAX_GRADIENT_NORM),
    _OPTIMIZERS[config.optimizer](
      make_schedule(config), weight_decay=config.weight_decay, **_BETAS
    ),
  )


class Trainer:
  """A model and its optimizer on a mesh, and their compiled steps.

  Attributes:
    mesh: Device mesh.
    param_shapes: Tree of the parameters' shapes.
    num_params: Number of parameters.
    init: Compiled function from nothing to the first :class:`TrainState`.
    step: Compiled function from a state, which is donated, and tokens of shape
      (micro-batches, sequences, T + 1) to the next state and the mean loss in
      nats a token, before the step.
  """

  def __init__(self, config: Config, vocab_size: int, mesh: Mesh):
    """Makes a trainer; nothing is computed yet.

    Args:
      config: Resolved settings.
      vocab_size: Number of token identifiers; the model's is rounded up.
      mesh: Device mesh.

    Raises:
      UsageError: If the mesh does not fit the sizes.
    """
    self.mesh = mesh
    self._micro_batch_size = config.micro_batch_size
    self._optimizer = make_optimizer(config)
    model_config = GPT2Config(
      vocab_size=-(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
      context_length=config.context_length,
      num_layers=config.num_layers,
      num_heads=config.num_heads,
      width=config.width,
    )
    self._make_model = lambda: GPT2(model_config, rngs=nnx.Rngs(config.seed))
    self._graphdef, variables = nnx.split(nnx.eval_shape(self._make_model))
    self.param_shapes = nnx.as_pure(variables)
    self.num_params = sum(x.size for x in jax.tree.leaves(self.param_shapes))
    state_sharding = self._state_sharding(self.param_shapes)
    self.init = jax.jit(self._init, out_shardings=state_sharding)
    self.step = jax.jit(
      self._step, donate_argnums=0, out_shardings=(state_sharding, None)
    )
    self._evaluate_all = jax.jit(self._evaluate_micro_batches)

  def put_micro_batches(self, sequences: np.ndarray) -> jax.Array:
    """Cuts sequences, shape (B, T + 1), to micro-batches and shards them."""
    tokens_ABT = sequences.reshape(
      -1, self._micro_batch_size, sequences.shape[-1]
    )
    return jax.device_put(tokens_ABT, sharding.batch_sharding(self.mesh))

  def evaluate(self, params: Any, sequences: np.ndarray) -> dict[str, Any]:
    """Evaluates parameters.

    Args:
      params: Tree of parameters.
      sequences: Tokens, shape (sequences, T + 1).

    Returns:
      ``'val_loss'``, nats a token, and ``'max_attention_logit'``, the largest
      attention logit of each layer.
    """
    count = len(sequences)
    padded = -(-count // self._micro_batch_size) * self._micro_batch_size
    # Repeated sequences fill the last micro-batch: no new maximum, no loss.
    filled = np.resize(sequences, (padded, sequences.shape[-1]))
    losses_AB, logits_AL = jax.device_get(
      self._evaluate_all(params, self.put_micro_batches(filled))
    )
    return {
      'val_loss': float(np.mean(losses_AB.ravel()[:count], dtype=float)),
      'max_attention_logit': logits_AL.max(axis=0).tolist(),
    }

  def logits(self, params: Any, tokens_BT: jax.Array) -> jax.Array:
    """Returns the model's logits, float32, shape (B, T, V); to be traced."""
    return self._model(params)(tokens_BT)

  def loss_and_gradients(
    self, params: Any, tokens_ABT: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Returns mean loss and gradient of tokens of shape (A, B, T + 1)."""

    def add(total: Any, tokens_BT: jax.Array) -> tuple[Any, None]:
      one = jax.value_and_grad(self._mean_loss)(params, tokens_BT)
      return jax.tree.map(jnp.add, total, one), None

    zero = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zero, tokens_ABT)
    return jax.tree.map(lambda x: x / len(tokens_ABT), total)

  def _model(self, params: Any) -> GPT2:
    return nnx.merge(self._graphdef, params)

  def _state_sharding(self, shapes: Any) -> TrainState:
    params = sharding.parameter_shardings(self.mesh, shapes)
    opt_state = sharding.state_shardings(
      self.mesh,
      self._optimizer,
      jax.eval_shape(self._optimizer.init, shapes),
      params,
    )
    return TrainState(params, opt_state)

  def _init(self) -> TrainState:
    params = nnx.as_pure(nnx.state(self._make_model()))
    return TrainState(params, self._optimizer.init(params))

  def _step(
    self, state: TrainState, tokens_ABT: jax.Array
  ) -> tuple[TrainState, jax.Array]:
    loss, gradients = self.loss_and_gradients(state.params, tokens_ABT)
    updates, opt_state = self._optimizer.update(
      gradients, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state), loss

  def _mean_loss(self, params: Any, tokens_BT: jax.Array) -> jax.Array:
    logits_BTV = self.logits(params, tokens_BT[:, :-1])
    return jnp.mean(sequence_losses(logits_BTV, tokens_BT))

  def _evaluate_micro_batches(
    self, params: Any, tokens_ABT: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns losses, shape (A, B), and largest logits, shape (A, layers)."""

    def evaluate(tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
      logits_BTV, largest_L = logits_and_max_attention_logits(
        self._model(params), tokens_BT[:, :-1]
      )
      return sequence_losses(logits_BTV, tokens_BT), largest_L

    return jax.lax.map(evaluate, tokens_ABT)


def sequence_losses(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
  """Returns the cross-entropy of each sequence in nats a token, shape (B,).

  Args:
    logits_BTV: Logits of each next token, shape (B, T, V).
    tokens_BT: Inputs and, one further, targets, shape (B, T + 1).
  """
  return optax.softmax_cross_entropy_with_integer_labels(
    logits_BTV, tokens_BT[:, 1:]
  ).mean(axis=-1)
