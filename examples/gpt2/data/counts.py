"""What is to be known of all tokens of a run: counted once, and kept."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from examples.gpt2.config import Config, UsageError, digest
from examples.gpt2.data.shards import TokenFiles
from examples.gpt2.storage import (
  as_path,
  file_system,
  is_remote,
  make_folder,
)

_VERSION = ('size', 'generation', 'etag', 'ETag', 'updated', 'LastModified')

_COUNTED = ('largest_token', 'sha256', 'unigram_entropy')


def cached_statistics(
  parts: list[TokenFiles], vocab_size: int, config: Config
) -> dict[str, Any]:
  """Counts the tokens of files, once for the very same ones.

  Files are the same where path, size and times of the last change are, and
  what they are read as.
  """
  key = digest(
    [
      [*_stamp(x.path), x.dtype.str, x.offset, x.size]
      for part in parts
      for x in part.shards
    ]
  )
  cache = as_path(config.cache_dir) / 'statistics' / f'{key[:16]}.json'
  with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
    statistics = json.loads(cache.read_text())
    is_whole = all(name in statistics for name in _COUNTED)
    if is_whole and statistics['largest_token'] < vocab_size:
      return statistics
  statistics = count_tokens(parts, vocab_size)
  with contextlib.suppress(OSError):  # The next run then counts again.
    make_folder(cache.parent)
    cache.write_text(json.dumps(statistics))
  return statistics


def count_tokens(parts: list[TokenFiles], vocab_size: int) -> dict[str, Any]:
  """Reads all tokens: the largest, a hash, and their entropy.

  Raises ``UsageError`` for tokens that are not in the vocabulary.
  """
  counts = np.zeros(vocab_size, np.int64)
  sha256 = hashlib.sha256()
  for part in parts:
    sha256.update(f'{len(part)} tokens'.encode())
    with tqdm.tqdm(desc='counting tokens', total=len(part), delay=2) as bar:
      for chunk in part.chunks():
        _check_below(chunk, vocab_size, part.shards[0].path.parent)
        sha256.update(chunk)  # type: ignore[arg-type]
        counts += np.bincount(chunk, minlength=vocab_size)
        bar.update(chunk.size)
  return {
    'largest_token': int(np.flatnonzero(counts)[-1]),
    'sha256': sha256.hexdigest(),
    'unigram_entropy': entropy(counts),
  }


def entropy(counts: np.ndarray) -> float:
  """Returns the entropy of frequencies, in nats."""
  probabilities = counts[counts > 0] / counts.sum()
  return float(-np.sum(probabilities * np.log(probabilities)))


def check_largest(largest: int, vocab_size: int, source: object) -> None:
  """Raises ``UsageError`` where the largest token is not in a vocabulary."""
  if largest >= vocab_size:
    raise UsageError(
      f'{source} holds the token {largest}, but the vocabulary has '
      f'{vocab_size} tokens: if these are tokens, train with a larger '
      '--vocab-size.'
    )


def check_length(
  part: str, tokens: TokenFiles | np.ndarray, length: int
) -> None:
  """Raises ``UsageError`` where tokens are too few for a sequence."""
  if len(tokens) <= length:
    raise UsageError(
      f'The {part} part of the data has {len(tokens)} tokens, too few for a '
      f'sequence of --context-length {length} and its last target: give more '
      'text or a shorter context.'
    )


def _check_below(tokens: np.ndarray, vocab_size: int, source: object) -> None:
  """Raises ``UsageError`` for tokens that are not in a vocabulary."""
  if tokens.min() < 0:
    raise UsageError(f'{source} holds the token {tokens.min()}.')
  check_largest(int(tokens.max()), vocab_size, source)


def _stamp(path: Path) -> list[Any]:
  """Returns what tells apart the versions of a file."""
  if is_remote(path):
    info = file_system(path).info(os.fspath(path))
    return [str(path), *(str(info.get(name)) for name in _VERSION)]
  stat = path.stat()
  times = stat.st_mtime_ns, stat.st_ctime_ns
  return [str(path.resolve()), stat.st_size, *times]
