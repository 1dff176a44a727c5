"""Batches of a run: which tokens, and where on the devices.

A batch is a pure function of the seed and the step, the same for any number of
devices, processes and micro-batches. Each process reads only the sequences of
its own devices.
"""

import math

import jax
from jax.sharding import Mesh
import numpy as np

from examples.gpt2.config import FittedConfig
from examples.gpt2.data.mixture import Mixture
from examples.gpt2.data.shards import TokenFiles, read_windows
from examples.gpt2.devices.sharding import batch_sharding, num_batch_shards


def batch_shape(config: FittedConfig, mesh: Mesh) -> jax.ShapeDtypeStruct:
  """Returns the shape and sharding of the tokens of a step.

  The axes are micro-batches, sequences of a micro-batch of all shards, and
  tokens: inputs and, one further, targets.
  """
  rows = _rows(config, mesh)
  return jax.ShapeDtypeStruct(
    (config.batch_size // rows, rows, config.context_length + 1),
    np.int32,
    sharding=batch_sharding(mesh),
  )


def training_batch(
  tokens: TokenFiles | np.ndarray, config: FittedConfig, step: int, mesh: Mesh
) -> jax.Array:
  """Makes the batch of a step: windows by seed and step alone.

  Those of a mixture are drawn as it says, others with replacement.
  """
  length, size = config.context_length, config.batch_size
  if isinstance(tokens, Mixture):
    starts = tokens.starts(config.seed, step, size, length)
  else:
    generator = np.random.default_rng((config.seed, step))
    starts = generator.integers(len(tokens) - length, size=size)
  return make_batch(tokens, starts, length, _rows(config, mesh), mesh)


def validation_batch(
  tokens: TokenFiles | np.ndarray, config: FittedConfig, mesh: Mesh
) -> tuple[jax.Array, int]:
  """Makes the batch of an evaluation, and counts its sequences.

  They are spread evenly and share no token but the last target of one, which
  may be the first input of the next. Those after the count, in the order of the
  first two axes, repeat others to fill the last micro-batch.
  """
  starts = spread(len(tokens), config.context_length, config.eval_sequences)
  rows = _rows(config, mesh)
  # Repeated sequences give no new maximum, where padding would.
  filled = np.resize(starts, math.ceil(len(starts) / rows) * rows)
  batch = make_batch(tokens, filled, config.context_length, rows, mesh)
  return batch, len(starts)


def _rows(config: FittedConfig, mesh: Mesh) -> int:
  return config.micro_batch_size * num_batch_shards(mesh)


def spread(num_tokens: int, length: int, most: int) -> np.ndarray:
  """Returns the starts of sequences that are spread evenly over a text."""
  available = (num_tokens - 1) // length
  count = min(available, most)
  return np.arange(count) * available // count * length


def make_batch(
  tokens: TokenFiles | np.ndarray,
  starts: np.ndarray,
  length: int,
  rows: int,
  mesh: Mesh,
) -> jax.Array:
  """Makes a batch over all devices, shape (A, B, T + 1).

  Args:
    tokens: Tokens of the text.
    starts: First tokens of the sequences, of any number of micro-batches.
    length: Tokens of a sequence, T.
    rows: Sequences of a micro-batch of all shards, B.
    mesh: Device mesh.
  """
  starts_AB = starts.reshape(-1, rows)
  shape, sharding = (*starts_AB.shape, length + 1), batch_sharding(mesh)
  # All sequences of this process are read in one call: from an object store,
  # that is at the same time. T is not sharded.
  is_read_AB = np.zeros(starts_AB.shape, bool)
  for index in sharding.addressable_devices_indices_map(shape).values():
    is_read_AB[index[:2]] = True  # type: ignore[index]
  tokens_ABT = np.zeros(shape, np.int32)
  windows = read_windows(tokens, starts_AB[is_read_AB], length + 1)
  tokens_ABT[is_read_AB] = windows
  return jax.make_array_from_callback(shape, sharding, tokens_ABT.__getitem__)
