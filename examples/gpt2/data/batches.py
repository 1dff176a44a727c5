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


def training_starts(
  num_tokens: int, length: int, batch_size: int, seed: int, step: int
) -> np.ndarray:
  """Returns where the sequences of a step start, int64, shape (batch size,).

  Args:
    num_tokens: Number of tokens to draw from, above ``length``.
    length: Tokens in a sequence; one more, the last target, follows it.
    batch_size: Sequences in the step.
    seed: Seed of the run, not negative.
    step: Number of the step, not negative.
  """
  generator = np.random.default_rng((seed, step))
  return generator.integers(num_tokens - length, size=batch_size)


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


def windows(
  tokens: np.ndarray,
  starts: np.ndarray,
  length: int,
  positions: slice = slice(None),
) -> np.ndarray:
  """Reads windows of tokens.

  Args:
    tokens: Tokens, perhaps memory-mapped, shape (tokens,).
    starts: First position of each window, integer, any shape.
    length: Tokens in a window.
    positions: Part of each window to return.

  Returns:
    int32, the shape of ``starts`` and an axis of positions.
  """
  views = np.lib.stride_tricks.sliding_window_view(tokens, length)
  return views[starts][..., positions].astype(np.int32)


def make_batch(
  tokens: np.ndarray, starts: np.ndarray, like: jax.ShapeDtypeStruct
) -> jax.Array:
  """Makes a batch as one array over all devices and processes.

  Args:
    tokens: Tokens, perhaps memory-mapped, shape (tokens,). Only what the
      devices of this process hold is read, and only once.
    starts: First position of each sequence, a whole number of micro-batches;
      the same in each process.
    like: Shape and sharding of a batch, (micro-batches, sequences, length of a
      window), of which the number of micro-batches may differ.

  Returns:
    Array of such a shape.
  """
  _, rows, length = like.shape
  starts_AB = starts.reshape(-1, rows)
  parts: dict[str, np.ndarray] = {}

  def read(index: tuple[slice, ...]) -> np.ndarray:
    # Devices along a tensor axis hold the same sequences.
    key = str(index)
    if key not in parts:
      parts[key] = windows(tokens, starts_AB[index[:-1]], length, index[-1])
    return parts[key]

  return jax.make_array_from_callback(
    (*starts_AB.shape, length), like.sharding, read, dtype=like.dtype
  )


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
  tokens: np.ndarray,
  config: Config,
  step: int,
  mesh: Mesh,
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
  length = config.context_length
  starts = training_starts(
    len(tokens), length, config.batch_size, config.seed, step
  )
  return make_batch(tokens, starts, batch_shape(config, mesh))


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
  shape = batch_shape(config, mesh)
  rows = shape.shape[1]
  # Repeated sequences give no new maximum, where padding would.
  filled = np.resize(starts, -(-len(starts) // rows) * rows)
  return make_batch(tokens, filled, shape), len(starts)
