"""Batches of a run: which tokens, and where on the devices.

A batch is a pure function of the seed and the step, the same for any number of
devices, processes and micro-batches. Each process reads only the sequences of
its own devices.
"""

from collections.abc import Sequence
import functools
import math

import grain
import jax
from jax.sharding import Mesh
import numpy as np

from examples.gpt2.config import Config
from examples.gpt2.data.token_files import TokenFiles
from examples.gpt2.sharding import batch_sharding, num_batch_shards


class Mixture(TokenFiles):
  """Tokens of several sources, one after the other, with weights.

  ``weights`` are shares of the sequences, of which the proportions count.
  """

  def __init__(self, sources: Sequence[TokenFiles], weights: Sequence[float]):
    shards = [shard for source in sources for shard in source.shards]
    super().__init__(shards, sources[0].vocab_size)
    self.sizes = tuple(len(source) for source in sources)
    self.weights = tuple(weights)


def batch_shape(config: Config, mesh: Mesh) -> jax.ShapeDtypeStruct:
  """Returns the shape and sharding of the tokens of a step.

  The axes are micro-batches, sequences of a micro-batch of all shards, and
  tokens: inputs and, one further, targets.
  """
  rows = _rows(config, mesh)
  return jax.ShapeDtypeStruct(
    (config.batch_size // rows, rows, config.model.context_length + 1),
    np.int32,
    sharding=batch_sharding(mesh),
  )


def training_batch(
  tokens: TokenFiles | np.ndarray, config: Config, step: int, mesh: Mesh
) -> jax.Array:
  """Makes the batch of a step, of number 1 for the first."""
  length, size = config.model.context_length, config.batch_size
  sizes = getattr(tokens, 'sizes', (len(tokens),))
  weights = getattr(tokens, 'weights', (1.0,))
  draw = _draw(sizes, weights, config.sampling, config.seed, length)
  first = max(step - 1, 0) * size
  starts = np.array([draw[i] for i in range(first, first + size)])
  return make_batch(tokens, starts, length, _rows(config, mesh), mesh)


@functools.lru_cache(maxsize=8)
def _draw(
  sizes: tuple[int, ...],
  weights: tuple[float, ...],
  sampling: str,
  seed: int,
  length: int,
) -> grain.MapDataset:
  """Returns where each sequence of a run begins, by its number.

  Without replacement, an epoch of a source has each of its sequences once:
  those that begin at multiples of the length. Each epoch has another order.

  Args:
    sizes: Tokens of each source.
    weights: Of each source.
    sampling: Setting of that name.
    seed: Seed of the run.
    length: Tokens of a sequence, without its last target.
  """
  datasets, first = [], 0
  for size in sizes:
    if sampling == 'with-replacement':
      draw = functools.partial(_anywhere, first, first + size - length)
      dataset = grain.MapDataset.source([0]).seed(seed).repeat()
      datasets.append(dataset.random_map(draw))
    else:
      starts = range(first, first + (size - 1) // length * length, length)
      dataset = grain.MapDataset.source(starts).seed(seed)
      datasets.append(dataset.shuffle().repeat())
    first += size
  return grain.MapDataset.mix(datasets, list(weights))


def _anywhere(
  first: int, end: int, _: object, generator: np.random.Generator
) -> int:
  return int(generator.integers(first, end))


def validation_batch(
  tokens: TokenFiles | np.ndarray, config: Config, mesh: Mesh
) -> tuple[jax.Array, int]:
  """Makes the batch of an evaluation, and counts its sequences.

  They are spread evenly and share no token but the last target of one, which
  may be the first input of the next. Those after the count, in the order of the
  first two axes, repeat others to fill the last micro-batch.
  """
  starts = spread(
    len(tokens), config.model.context_length, config.eval_sequences
  )
  rows = _rows(config, mesh)
  # Repeated sequences give no new maximum, where padding would.
  filled = np.resize(starts, math.ceil(len(starts) / rows) * rows)
  length = config.model.context_length
  batch = make_batch(tokens, filled, length, rows, mesh)
  return batch, len(starts)


def _rows(config: Config, mesh: Mesh) -> int:
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
  tokens_ABT[is_read_AB] = _windows(tokens, starts_AB[is_read_AB], length + 1)
  return jax.make_array_from_callback(shape, sharding, tokens_ABT.__getitem__)


def _windows(
  tokens: TokenFiles | np.ndarray, starts: np.ndarray, length: int
) -> np.ndarray:
  if isinstance(tokens, TokenFiles):
    return tokens.windows(starts.tolist(), length)
  return np.lib.stride_tricks.sliding_window_view(tokens, length)[starts]
