"""Which sequences of which sources a step takes, by the seed and the step."""

from collections.abc import Sequence
import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.gpt2.config import UsageError
from examples.gpt2.data.shards import TokenFiles

# Of so many sequences, each source has its share to the last one.
_BLOCK = 1 << 16
_ROUNDS = 6  # Of the Feistel network.


class Source(NamedTuple):
  """A source of tokens."""

  path: str
  weight: float | None  # Share of the sequences, as a multiple of any unit.


def parse_sources(data: str | Sequence[str]) -> list[Source]:
  """Parses paths, such as ``'tokens/web:0.7'``.

  Raises ``UsageError`` unless all of several have a weight above 0, or none.
  """
  texts = [data] if isinstance(data, str) else list(data)
  sources = [_parse(text) for text in texts]
  given = [source.weight for source in sources if source.weight is not None]
  is_each = len(given) in (0, len(sources))
  if not is_each or not all(0 < x < math.inf for x in given):
    raise UsageError(
      '--data must give a weight above 0 for each source, as in tokens/web:0.7 '
      f'tokens/code:0.3, or for none, got {" ".join(texts)}.'
    )
  if not sources:
    raise UsageError('--data must name at least one source.')
  return sources


def _parse(text: str) -> Source:
  path, _, weight = text.rpartition(':')
  if Path(text).expanduser().exists():  # A name with a colon.
    return Source(text, None)
  try:
    return Source(path, float(weight)) if path else Source(text, None)
  except ValueError:  # As in gs://bucket.
    return Source(text, None)


class Mixture(TokenFiles):
  """Tokens of sources, one after the other, and how sequences are drawn."""

  def __init__(
    self,
    sources: Sequence[TokenFiles],
    weights: Sequence[float],
    with_replacement: bool,
  ):
    """Takes sources with weights, of which only the proportions count.

    Raises ``UsageError`` if a weight is too small for a single sequence out of
    65,536.
    """
    super().__init__([shard for source in sources for shard in source.shards])
    sizes = np.array([len(source) for source in sources])
    self._starts = np.cumsum(sizes) - sizes
    self._sizes = sizes
    self._counts = _apportion(weights)
    self._with_replacement = with_replacement

  def starts(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
    """Returns where the sequences of a step begin, int64, shape (count,).

    Without replacement, an epoch of a source has each of its sequences once:
    those that begin at multiples of the length. Another epoch has them in
    another order.

    Args:
      seed: Seed of the run.
      step: Number of the step, from 1.
      count: Sequences of a step.
      length: Tokens of a sequence, without its last target.
    """
    numbers = np.arange((step - 1) * count, step * count)
    sources, ordinals = self._assign(seed, numbers)
    starts = np.empty(count, np.int64)
    if self._with_replacement:
      shares = np.random.default_rng((seed, step)).random(count)
      ends = self._sizes[sources] - length
      starts[:] = self._starts[sources] + (shares * ends).astype(np.int64)
      return starts
    for source in np.unique(sources).tolist():
      is_here = sources == source
      size = (int(self._sizes[source]) - 1) // length
      epochs, places = np.divmod(ordinals[is_here], size)
      for epoch in np.unique(epochs).tolist():
        # The number of an epoch may be -1, of a step before the first.
        key = (seed, source, epoch + 1)
        here = epochs == epoch
        places[here] = permute(places[here], size, key)
      starts[is_here] = self._starts[source] + places * length
    return starts

  def _assign(
    self, seed: int, numbers: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sources of sequences, and their numbers in these."""
    if len(self._counts) == 1:
      return np.zeros_like(numbers), numbers
    blocks, places = np.divmod(numbers, _BLOCK)
    sources, ordinals = np.empty_like(numbers), np.empty_like(numbers)
    for block in np.unique(blocks).tolist():
      here = blocks == block
      of_block, ranks = _block(self._counts, seed, block + 1)
      sources[here] = of_block[places[here]]
      counts = np.array(self._counts)[sources[here]]
      ordinals[here] = block * counts + ranks[places[here]]
    return sources, ordinals


def _apportion(weights: Sequence[float]) -> tuple[int, ...]:
  """Returns the sequences of each source in a block, by largest remainders."""
  exact = np.array(weights, float) / sum(weights) * _BLOCK
  counts = np.floor(exact).astype(int)
  last = np.argsort(counts - exact, kind='stable')[: _BLOCK - counts.sum()]
  counts[last] += 1
  if not all(counts):
    raise UsageError(
      f'--data has weights {list(weights)}, of which the smallest is less than '
      f'one part in {_BLOCK} of their sum.'
    )
  return tuple(counts.tolist())


@functools.lru_cache(maxsize=2)
def _block(
  counts: tuple[int, ...], seed: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the sources of a block, and how often each came before there."""
  places = permute(np.arange(_BLOCK), _BLOCK, (seed, number, len(counts)))
  sources = np.repeat(np.arange(len(counts)), counts)[places]
  ranks = np.empty_like(sources)
  firsts = np.repeat(np.cumsum(counts) - counts, counts)
  ranks[np.argsort(sources, kind='stable')] = np.arange(_BLOCK) - firsts
  return sources, ranks


def permute(places: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
  """Permutes the integers below a size, without a table of them.

  A Feistel network permutes those of a power of four; what it takes out of
  range is permuted again, until it is not.

  Args:
    places: Integers in [0, size).
    size: Number of integers.
    key: Integers of at least 0 that choose the permutation.

  Returns:
    Where each of the places goes, int64.
  """
  bits = max(1, ((size - 1).bit_length() + 1) // 2)
  keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
  found = _feistel(places.astype(np.uint64), bits, keys)
  while (outside := found >= size).any():
    found[outside] = _feistel(found[outside], bits, keys)
  return found.astype(np.int64)


def _feistel(x: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
  shift, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
  left, right = x >> shift, x & mask
  for key in keys:
    left, right = right, left ^ (_mix(right + key) & mask)
  return (left << shift) | right


def _mix(x: np.ndarray) -> np.ndarray:
  """Hashes 64 bits, as SplitMix64 does."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
