"""The state of training, and the compiled steps.

Letters at the end of a name are axes, see ``model.py``.
"""

import dataclasses
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from examples.gpt2 import sharding
from examples.gpt2.config import Config, padded_vocab_size
from examples.gpt2.loss import mean_cross_entropy
from examples.gpt2.model import Transformer, as_module, shapes
from examples.gpt2.schedules import make_optimizer
import merit_optax


class TrainState(NamedTuple):
  """What a step changes."""

  step: Any  # Steps done, int32.
  params: Any  # Tree of float32 parameters.
  opt_state: Any  # State of the optimizer.


class Trainer:
  """A model and its optimizer on a mesh, and their compiled steps.

  Attributes:
    mesh: Device mesh.
    optimizer: Optimizer of the parameters.
    model_config: What the model is.
    shapes: :class:`TrainState` of shapes and shardings.
    num_params: Number of parameters.
    init: Compiled function from nothing to the first :class:`TrainState`.
    step: Compiled function from a state, which is donated, and tokens of shape
      (A, B, T + 1) to the next state and a dictionary with the mean loss before
      the step in nats a token (``'train_loss'``) and the norm of the gradient
      before it is clipped (``'gradient_norm'``). If one of these is not finite,
      the state stays as it was but for its counters.
    update: Compiled end of a step, from a state, which is donated, and
      gradients to the next state.
  """

  def __init__(self, config: Config, vocab_size: int, mesh: Mesh):
    """Makes a trainer; nothing is computed yet.

    ``vocab_size`` is the number of token identifiers, which the model rounds
    up. Raises ``UsageError`` if the mesh does not fit the sizes.
    """
    self.mesh = mesh
    self.optimizer = make_optimizer(config)
    self.model_config = dataclasses.replace(
      config.model, vocab_size=padded_vocab_size(vocab_size)
    )
    self._config = config
    self.shapes = self._shapes(shapes(self.model_config))
    self.num_params = sum(x.size for x in jax.tree.leaves(self.shapes.params))
    state_sharding = jax.tree.map(lambda x: x.sharding, self.shapes)
    everywhere = sharding.replicated(mesh)
    self.init = jax.jit(self._init, out_shardings=state_sharding)
    self.step = jax.jit(
      self._step, donate_argnums=0, out_shardings=(state_sharding, everywhere)
    )
    self.update = jax.jit(
      self._update, donate_argnums=0, out_shardings=state_sharding
    )

  @property
  def flops_per_token(self) -> float:
    """FLOPs of a forward and backward pass, for each token.

    Six for each weight of a matrix product and 12 T a feature of a layer for
    attention, the masked half of it included, as is usual; recomputation does
    not count.
    """
    config, params = self.model_config, sharding.by_path(self.shapes.params)
    matrices = sum(x.size for k, x in params.items() if k.endswith('.kernel'))
    if not config.untied_head:
      matrices += config.vocab_size * config.width
    features = config.num_layers * config.attention_width
    return 6.0 * matrices + 12.0 * features * config.context_length

  def model(self, params: Any) -> Transformer:
    """Returns the model with some parameters; to be traced."""
    return as_module(self.model_config, params)

  def loss(self, params: Any, tokens_BT: jax.Array) -> jax.Array:
    """Returns the mean loss of tokens of shape (B, T + 1); to be traced."""
    model = self.model(params)
    features_BTD, _ = model.features(tokens_BT[:, :-1])
    return mean_cross_entropy(features_BTD, model.head_VD, tokens_BT[:, 1:])

  def loss_and_gradients(
    self, params: Any, tokens_ABT: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Returns mean loss and gradient of tokens of shape (A, B, T + 1)."""

    def add(total: Any, tokens_BT: jax.Array) -> tuple[Any, None]:
      one = jax.value_and_grad(self.loss)(params, tokens_BT)
      return jax.tree.map(jnp.add, total, one), None

    zero = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zero, tokens_ABT)
    loss, gradients = jax.tree.map(lambda x: x / len(tokens_ABT), total)
    return loss, gradients

  def _shapes(self, params: Any) -> TrainState:
    def lying(x: jax.ShapeDtypeStruct, s: Any) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)

    shardings = sharding.parameter_shardings(self.mesh, params)
    params = jax.tree.map(lying, params, shardings)
    opt_state = jax.tree.map(
      lying,
      jax.eval_shape(self.optimizer.init, params),
      merit_optax.state_shardings(self.optimizer, params),
    )
    step = jax.ShapeDtypeStruct([], jnp.int32)
    step = lying(step, sharding.replicated(self.mesh))
    return TrainState(step, params, opt_state)

  def _init(self) -> TrainState:
    key = jax.random.key(self._config.seed)
    model = Transformer(self.model_config, rngs=nnx.Rngs(key))
    params = nnx.as_pure(nnx.state(model))
    return TrainState(
      jnp.zeros([], jnp.int32), params, self.optimizer.init(params)
    )

  def _step(
    self, state: TrainState, tokens_ABT: jax.Array
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    loss, gradients = self.loss_and_gradients(state.params, tokens_ABT)
    norm = optax.tree.norm(gradients)
    updated = self._update(state, gradients)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
      # Counters go on, so that the schedule stays a function of the step.
      is_counter = jnp.issubdtype(new.dtype, jnp.integer)
      return new if is_counter else jnp.where(is_finite, new, old)

    metrics = {'train_loss': loss, 'gradient_norm': norm}
    return jax.tree.map(keep, updated, state), metrics

  def _update(self, state: TrainState, gradients: Any) -> TrainState:
    updates, opt_state = self.optimizer.update(
      gradients, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state)
