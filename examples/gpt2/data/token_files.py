"""Token files of every format, read as one array."""

import bisect
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from pathlib import Path
import re
from typing import Any

import numpy as np
import tqdm

from examples.gpt2.config import UsageError
from examples.gpt2.storage import (
  file_system,
  is_remote,
  os_errors,
  whole_file,
  write_whole,
)

PARTS = ('train', 'val')  # To train on, and held out.
INDEX = 'index.json'  # Of shards that examples.gpt2.prepare has finished.
PROGRESS = 'progress.json'  # Of those that it has not.
TOKEN_SUFFIXES = ('.bin', '.npy')

_PART = re.compile(r'(?:^|[_.-])(?:(train)|val|valid|validation)(?=[_.-])')
# Of llm.c and modded-nanogpt: 256 numbers of 32 bits, of which the first is
# this, the second a version, and the third the number of tokens.
_LLM_C = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}
_LLM_C_HEADER = 1024
_NUMPY = b'\x93NUMPY'
_TOKENS_AT_ONCE = 1 << 24
_COUNTED = 1 << 30
_SAMPLE = 1 << 16


def token_dtype(vocab_size: int) -> np.dtype:
  """Returns the type of tokens in files: uint16, or uint32 if need be."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@dataclasses.dataclass(frozen=True)
class Shard:
  """A file of tokens."""

  path: Path
  dtype: np.dtype  # Of a token.
  size: int  # Number of tokens.
  offset: int = 0  # Bytes before the first token.

  @property
  def num_bytes(self) -> int:
    """Size of the tokens."""
    return self.size * self.dtype.itemsize

  @functools.cached_property
  def mapped(self) -> np.ndarray:
    """Its tokens, memory-mapped, where it is on a disk."""
    mapped = np.memmap(self.path, self.dtype, 'r', self.offset, self.size)
    return np.asarray(mapped)  # Slices of a memmap are slow to make.


class TokenFiles:
  """The tokens of shards, one after the other, read where they are asked for.

  It is indexed by slices, as an array of one axis. Reading raises
  ``UsageError`` for a token that is not below ``vocab_size``, and ``OSError``
  where a file cannot be read.
  """

  def __init__(self, shards: Sequence[Shard], vocab_size: int):
    self.shards = tuple(shards)
    self.vocab_size = vocab_size
    self._ends = list(itertools.accumulate(shard.size for shard in shards))

  def __len__(self) -> int:
    return self._ends[-1]

  @property
  def num_bytes(self) -> int:
    """Size of the tokens in the files."""
    return sum(shard.num_bytes for shard in self.shards)

  def __getitem__(self, index: slice) -> np.ndarray:
    start, stop, step = index.indices(len(self))
    return self.windows([start], max(0, stop - start))[0, ::step]

  def windows(self, starts: Sequence[int], length: int) -> np.ndarray:
    """Returns windows of tokens: int32, shape (windows, length)."""
    parts = [
      part for start in starts for part in self._parts(start, start + length)
    ]
    if not parts:
      return np.zeros((len(starts), length), np.int32)
    found = _read(parts)
    tokens = np.concatenate(found, dtype=np.int32, casting='unsafe')
    self._check(tokens)
    return tokens.reshape(len(starts), length)

  def _parts(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
    """Yields shards, and the range of their tokens."""
    i = bisect.bisect_right(self._ends, start)
    while start < stop:
      first = self._ends[i] - self.shards[i].size
      yield self.shards[i], start - first, min(stop, self._ends[i]) - first
      start, i = self._ends[i], i + 1

  def count(self) -> tuple[np.ndarray, str]:
    """Reads all tokens, of more than 2**30 so many, spread evenly.

    Returns how often each token occurs, shape (vocab_size,), and a hash.
    """
    counts = np.zeros(self.vocab_size, np.int64)
    sha256 = hashlib.sha256(f'{len(self)} tokens'.encode())
    number = min(len(self), _COUNTED)
    with tqdm.tqdm(desc='counting tokens', total=number, delay=2) as bar:
      for first in range(0, number, _TOKENS_AT_ONCE):
        start = first * len(self) // number
        stop = start + min(_TOKENS_AT_ONCE, number - first)
        for part in self._parts(start, stop):
          (tokens,) = _read([part])
          self._check(tokens)
          sha256.update(tokens)  # type: ignore[arg-type]
          counts += np.bincount(tokens, minlength=self.vocab_size)
        bar.update(stop - start)
    return counts, sha256.hexdigest()

  def _check(self, tokens: np.ndarray) -> None:
    """Raises ``UsageError`` for tokens that are not in the vocabulary."""
    for token in (tokens.min(), tokens.max()):
      check_token(int(token), self.vocab_size, self.shards[0].path.parent)


def check_token(token: int, vocab_size: int, source: object) -> None:
  """Raises ``UsageError`` for a token that is not in a vocabulary."""
  if not 0 <= token < vocab_size:
    raise UsageError(
      f'{source} holds the token {token}, but the vocabulary has {vocab_size} '
      'tokens: if these are tokens, train with a larger --vocab-size.'
    )


def entropy(counts: np.ndarray) -> float:
  """Returns the entropy of frequencies, in nats."""
  probabilities = counts[counts > 0] / counts.sum()
  return float(-np.sum(probabilities * np.log(probabilities)))


def _read(parts: Sequence[tuple[Shard, int, int]]) -> list[np.ndarray]:
  """Returns the tokens of shards from a first to before a last one.

  What is in an object store is read at the same time.
  """
  remote = [part for part in parts if is_remote(part[0].path)]
  contents: Iterator[bytes] = iter(())
  if remote:
    with os_errors():
      contents = iter(
        file_system(remote[0][0].path).cat_ranges(
          [os.fspath(shard.path) for shard, *_ in remote],
          [s.offset + first * s.dtype.itemsize for s, first, _ in remote],
          [s.offset + last * s.dtype.itemsize for s, _, last in remote],
          on_error='raise',
        )
      )
  found = [
    np.frombuffer(next(contents), shard.dtype)
    if is_remote(shard.path)
    else shard.mapped[first:last]
    for shard, first, last in parts
  ]
  for tokens, (shard, first, last) in zip(found, parts, strict=True):
    if len(tokens) != last - first:
      raise OSError(f'{shard.path} has become shorter while it was in use.')
  return found


def find_token_files(folder: Path) -> dict[str, list[Path]]:
  """Returns the token files of a folder by part, those of all names in order.

  They are ``train.bin`` and ``val.bin``, or have a word of their name that says
  so, as ``fineweb_train_000001.bin`` has. Where there are both of the former,
  others are copies or of another kind.
  """
  found: dict[str, list[Path]] = {part: [] for part in PARTS}
  if not folder.is_dir():
    return found
  usual = {part: [folder / f'{part}.bin'] for part in PARTS}
  if all(path.is_file() for (path,) in usual.values()):
    return usual
  for path in sorted(folder.iterdir()):
    name = _PART.search(path.name.lower())
    is_tokens = path.suffix in TOKEN_SUFFIXES and path.name[0] != '.'
    if name and is_tokens and path.is_file():
      found[PARTS[0] if name[1] else PARTS[1]].append(path)
  return found


def has_token_files(folder: Path) -> bool:
  """Returns whether a folder holds token files."""
  return read_index(folder) is not None or any(
    find_token_files(folder).values()
  )


def read_index(folder: Path) -> dict[str, Any] | None:
  """Returns the index of a folder that examples.gpt2.prepare wrote, if any.

  Raises ``UsageError`` if it is damaged, or prepare has not finished.
  """
  try:
    index = json.loads((folder / INDEX).read_text())
  except (FileNotFoundError, NotADirectoryError):
    if (folder / PROGRESS).exists():
      raise UsageError(
        f'{folder} holds tokens of an examples.gpt2.prepare that has not '
        'finished: give its command again, and it goes on.'
      ) from None
    return None
  except ValueError as error:
    if not any(find_token_files(folder).values()):
      return None
    raise UsageError(f'{folder / INDEX} is damaged: {error}') from error
  # Others have files of that name too.
  shards = index.get('shards') if isinstance(index, dict) else None
  return index if isinstance(shards, dict) and {*shards} >= {*PARTS} else None


def open_parts(
  folder: Path, vocab_size: int, index: dict[str, Any] | None
) -> dict[str, TokenFiles]:
  """Opens the token files of a folder by part, nothing for one without files.

  Args:
    folder: On a disk or in a store.
    vocab_size: Number that all tokens have to be below. Files without a header
      or an index are read as uint32 if it is above 65536, else as uint16.
    index: What ``read_index`` returns.

  Raises:
    UsageError: If a file is cut off, or of another format.
  """
  if index is None:
    found = find_token_files(folder).items()
    return {x: open_files(paths, vocab_size) for x, paths in found if paths}
  parts = {}
  for part, rows in index['shards'].items():
    shards = [
      Shard(folder / x['file'], np.dtype(x['dtype']), x['tokens']) for x in rows
    ]
    for shard in shards:
      size = _size(shard.path) if shard.path.is_file() else 0
      if size != shard.num_bytes:
        raise UsageError(
          f'{shard.path} has {size} bytes: expected {shard.num_bytes} by '
          f'{INDEX}. It is damaged, or was not copied whole.'
        )
    if shards:
      parts[part] = TokenFiles(shards, vocab_size)
  return parts


def open_files(paths: Sequence[Path], vocab_size: int) -> TokenFiles:
  """Opens token files; without a header, their type is by the vocabulary."""
  dtype = token_dtype(vocab_size)
  return TokenFiles([_open_shard(path, dtype) for path in paths], vocab_size)


def _size(path: Path) -> int:
  return file_system(path).info(os.fspath(path))['size']


def _open_shard(path: Path, dtype: np.dtype) -> Shard:
  """Finds out what a token file is; without a header, it is of a type."""
  size = _size(path)
  with path.open('rb') as file:
    head = file.read(_LLM_C_HEADER)
  found = _numpy_shard(path) if head.startswith(_NUMPY) else None
  found = found or _llm_c_shard(path, head)
  if found is None:
    if not size or size % dtype.itemsize:
      raise UsageError(
        f'{path} has {size} bytes: expected {dtype} tokens, a multiple of '
        f'{dtype.itemsize}.'
      )
    found = Shard(path, dtype, size // dtype.itemsize)
    _check_plausible(found)
  if not found.size:
    raise UsageError(f'{path} holds no tokens.')
  expected = found.offset + found.num_bytes
  if size != expected:
    raise UsageError(
      f'{path} is cut off or damaged: it has {size} bytes, but its header says '
      f'{found.size} {found.dtype} tokens, which are {expected}.'
    )
  return found


def _llm_c_shard(path: Path, head: bytes) -> Shard | None:
  if len(head) < _LLM_C_HEADER:
    return None
  magic, version, size, *_ = np.frombuffer(head, '<i4').tolist()
  dtype = _LLM_C.get((magic, version))
  if dtype is not None:
    return Shard(path, np.dtype(dtype), size, _LLM_C_HEADER)
  versions = dict(_LLM_C.keys())
  if magic in versions:
    raise UsageError(
      f'{path} is a shard of llm.c of magic {magic} and version {version}: '
      f'expected version {versions[magic]}.'
    )
  return None


def _numpy_shard(path: Path) -> Shard:
  try:
    with path.open('rb') as file:
      major, _ = np.lib.format.read_magic(file)
      read = getattr(np.lib.format, f'read_array_header_{major}_0')
      shape, _, dtype = read(file)
      offset = file.tell()
  except (ValueError, AttributeError) as error:
    raise UsageError(f'{path} is a damaged NumPy file: {error}') from error
  if len(shape) != 1 or dtype.kind not in 'iu':
    raise UsageError(
      f'{path} is a NumPy array of {dtype} and shape {shape}: expected '
      'integers on one axis.'
    )
  return Shard(path, dtype, shape[0], offset)


def _check_plausible(shard: Shard) -> None:
  """Raises ``UsageError`` where every second token is nearly always tiny.

  So are the upper halves of tokens of twice the width.
  """
  (sample,) = _read([(shard, 0, min(shard.size, _SAMPLE) // 2 * 2)])
  small = sample < 4
  even, odd = small.reshape(-1, 2).mean(axis=0) if small.size else (0, 0)
  if odd > 0.9 and odd - even > 0.1:
    wider = 'uint32 or int64' if shard.dtype == np.uint16 else 'int64'
    raise UsageError(
      f'{shard.path} holds no {shard.dtype} tokens, since every second one is '
      f'nearly always below 4: it seems to hold {wider} tokens. Without a '
      'header, tokens are read as uint16, with a --vocab-size above 65536 as '
      "uint32; write them so, or as NumPy's .npy files or llm.c's shards."
    )


@contextlib.contextmanager
def token_writer(
  path: Path, row: dict[str, Any]
) -> Iterator[Callable[[np.ndarray], None]]:
  """Writes a token file, whole or not at all.

  Gives a function that adds tokens; what the index says of the file is added to
  ``row`` at the end.
  """
  sha256, size, dtype = hashlib.sha256(), 0, ''
  with whole_file(path) as scratch, scratch.open('wb') as file:

    def write(tokens: np.ndarray) -> None:
      nonlocal size, dtype
      content = tokens.tobytes()
      file.write(content)
      sha256.update(content)
      size, dtype = size + len(tokens), tokens.dtype.name

    yield write
  row |= {'file': path.name, 'dtype': dtype, 'tokens': size}
  row['sha256'] = sha256.hexdigest()


def write_index(
  folder: Path, shards: dict[str, list[dict[str, Any]]], description: Any
) -> None:
  """Writes what is known of token files: the last step of making them.

  ``description`` has the ``vocab_size``, and what the caller adds.
  """
  parts = open_parts(folder, description['vocab_size'], {'shards': shards})
  counts, _ = parts['train'].count()
  index = {**description, 'unigram_entropy': entropy(counts), 'shards': shards}
  write_whole(folder / INDEX, json.dumps(index, indent=1).encode())
