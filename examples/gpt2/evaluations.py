"""Losses on fixed sequences, which a run is validated by."""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from examples.gpt2.config import Config, ModelConfig
from examples.gpt2.data import (
  EvaluationSet,
  batch_shape,
  fixed_batches,
  micro_batch_shape,
  spread,
)
from examples.gpt2.loss import token_losses
from examples.gpt2.model import as_module
from examples.gpt2.sharding import replicated


def losses_program(config: ModelConfig, mesh: Mesh) -> Any:
  """Returns a function, to be called or compiled, that measures a micro-batch.

  It takes parameters and tokens of shape (1, B, T + 1), and returns the loss of
  each target in nats, (B, T), to all processes.
  """

  def measure(params: Any, tokens_ABT: jax.Array) -> jax.Array:
    model, [tokens_BT] = as_module(config, params), tokens_ABT
    features_BTD, _ = model.features(tokens_BT[:, :-1])
    return token_losses(features_BTD, model.head_VD, tokens_BT[:, 1:])

  return jax.jit(measure, out_shardings=replicated(mesh))


class Evaluations:
  """Evaluates a model on the sets of a run, which stay on the mesh."""

  def __init__(
    self,
    sets: Sequence[EvaluationSet],
    config: Config,
    model: ModelConfig,
    mesh: Mesh,
  ):
    _, rows, length = batch_shape(config, mesh).shape
    self._shape = micro_batch_shape(rows, length - 1, mesh)
    self._program = losses_program(model, mesh)
    self._weights = [x.weight for x in sets]
    self._batches: dict[str, list[jax.Array]] = {}
    self._counts = []
    for x in sets:
      places = spread(len(x.sequences), config.eval_sequences)
      self._batches[x.name] = [*fixed_batches(x.sequences, places, rows, mesh)]
      self._counts.append(len(places))

  def compile(self, params: Any) -> jax.stages.Compiled:
    """Compiles for shapes of parameters what a call runs, and returns it."""
    self._program = self._program.lower(params, self._shape).compile()
    return self._program

  def __call__(self, params: Any) -> dict[str, Any]:
    """Returns the validation loss, nats a token, and of several sets each."""
    losses = {}
    for count, (name, batches) in zip(
      self._counts, self._batches.items(), strict=True
    ):
      found = [np.asarray(self._program(params, x)) for x in batches]
      losses[name] = float(np.concatenate(found)[:count].mean(dtype=float))
    mean = {'val_loss': weighted_mean([*losses.values()], self._weights)}
    return mean | ({'val_losses': losses} if len(losses) > 1 else {})


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
  """Returns a mean of values, of which those of weight 0 may be infinite."""
  terms = [x * y for x, y in zip(values, weights, strict=True) if y]
  return math.fsum(terms) / math.fsum(weights)
