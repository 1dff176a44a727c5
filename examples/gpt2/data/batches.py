"""Batches of a run: which tokens, and where on the devices.

A batch is a pure function of the seed and the step, the same for any number of
devices, processes and micro-batches. Each process reads only the sequences of
its own devices.
"""

import jax
from jax.sharding import Mesh
import numpy as np

from examples.gpt2.config import Config
from examples.gpt2.devices.sharding import batch_sharding, num_batch_shards


def batch_shape(config: Config, mesh: Mesh) -> jax.ShapeDtypeStruct:
  """Returns the shape and sharding of the tokens of a step.

  Args:
    config: Settings, with their micro-batch.
    mesh: Device mesh.

  Returns:
    int32, shape (micro-batches, sequences of a micro-batch of all shards,
    context length + 1).
  """
  rows = config.micro_batch_size * num_batch_shards(mesh)
  return jax.ShapeDtypeStruct(
    (config.batch_size // rows, rows, config.context_length + 1),
    np.int32,
    sharding=batch_sharding(mesh),
  )


def training_batch(
  tokens: np.ndarray, config: Config, step: int, mesh: Mesh
) -> jax.Array:
  """Makes the batch of a step: random windows, by seed and step alone.

  Args:
    tokens: Training tokens, shape (tokens,).
    config: Resolved settings.
    step: Number of the step.
    mesh: Device mesh.

  Returns:
    Array of :func:`batch_shape`: inputs and, one further, targets.
  """
  generator = np.random.default_rng((config.seed, step))
  starts = generator.integers(
    len(tokens) - config.context_length, size=config.batch_size
  )
  return _make_batch(tokens, starts, batch_shape(config, mesh))


def validation_batch(
  tokens: np.ndarray, config: Config, mesh: Mesh
) -> tuple[jax.Array, int]:
  """Makes the batch of an evaluation, the same at every step.

  Args:
    tokens: Validation tokens, shape (tokens,).
    config: Resolved settings.
    mesh: Device mesh.

  Returns:
    The batch, of :func:`batch_shape` but for the number of micro-batches, and
    the number of sequences to count: those after it, in the order of the first
    two axes, repeat others to fill the last micro-batch.
  """
  starts = validation_starts(
    len(tokens), config.context_length, config.eval_sequences
  )
  like = batch_shape(config, mesh)
  rows = like.shape[1]
  # Repeated sequences give no new maximum, where padding would.
  filled = np.resize(starts, -(-len(starts) // rows) * rows)
  return _make_batch(tokens, filled, like), len(starts)


def validation_starts(
  num_tokens: int, length: int, max_sequences: int
) -> np.ndarray:
  """Returns where the sequences of an evaluation start, int64, one axis.

  They are spread evenly and share no token but the last target of one, which
  may be the first input of the next.

  Args:
    num_tokens: Number of tokens to take from, above ``length``.
    length: Tokens in a sequence; one more, the last target, follows it.
    max_sequences: Number of sequences, if there are as many.
  """
  available = (num_tokens - 1) // length
  count = min(available, max_sequences)
  return np.arange(count) * available // count * length


def windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
  """Reads windows of tokens: int32, the shape of the starts and an axis T."""
  views = np.lib.stride_tricks.sliding_window_view(tokens, length)
  return views[starts].astype(np.int32)


def _make_batch(
  tokens: np.ndarray, starts: np.ndarray, like: jax.ShapeDtypeStruct
) -> jax.Array:
  """Makes an array over all devices, with any number of micro-batches."""
  _, rows, length = like.shape
  starts_AB = starts.reshape(-1, rows)
  return jax.make_array_from_callback(
    (*starts_AB.shape, length),
    like.sharding,
    # Called for the devices of this process alone; T is not sharded.
    lambda index: windows(tokens, starts_AB[index[:2]], length),
    dtype=like.dtype,
  )
