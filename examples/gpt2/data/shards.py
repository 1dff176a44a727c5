"""Token files of every format, read as one array."""

import bisect
from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import json
import os
from pathlib import Path, PurePath
import re
import struct
from typing import Any

import numpy as np

from examples.gpt2.config import UsageError
from examples.gpt2.data.files import file_size
from examples.gpt2.storage import file_system, is_remote, read_ranges

PARTS = ('train', 'val')  # To train on, and held out.
INDEX = 'index.json'  # Of shards that examples.gpt2.prepare has finished.
PROGRESS = 'progress.json'  # Of those that it has not.

TOKEN_SUFFIXES = ('.bin', '.npy')
_PART = re.compile(r'(?:^|[_.-])(?:(train)|val|valid|validation)(?=[_.-])')
# Of llm.c and what descends from it: 256 numbers of 32 bits, of which the first
# is this, the second a version, and the third the number of tokens.
_LLM_C = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}
_LLM_C_HEADER = 1024
_NUMPY = b'\x93NUMPY'
_NUMPY_HEADERS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}
_MEGATRON = b'MMIDIDX\0\0'
_MEGATRON_HEAD = struct.Struct('<9sQBQ')
_MEGATRON_DTYPES = {
  1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
_TOKENS_AT_ONCE = 1 << 24
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


def read_parts(parts: Sequence[tuple[Shard, int, int]]) -> list[np.ndarray]:
  """Returns the tokens of shards from a first to before a last one.

  What is in an object store is read at the same time.
  """
  remote = [part for part in parts if is_remote(part[0].path)]
  contents = iter(
    read_ranges(
      [shard.path for shard, *_ in remote],
      [s.offset + first * s.dtype.itemsize for s, first, _ in remote],
      [(last - first) * s.dtype.itemsize for s, first, last in remote],
    )
  )
  return [
    np.frombuffer(next(contents), shard.dtype)
    if is_remote(shard.path)
    else shard.mapped[first:last]
    for shard, first, last in parts
  ]


class TokenFiles:
  """The tokens of shards, one after the other, read where they are asked for.

  It is indexed by slices, as an array of one axis.
  """

  def __init__(self, shards: Sequence[Shard]):
    self.shards = tuple(shards)
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
    found = read_parts(parts)
    tokens = np.concatenate(found, dtype=np.int32, casting='unsafe')
    return tokens.reshape(len(starts), length)

  def _parts(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
    """Yields shards, and the range of their tokens."""
    i = bisect.bisect_right(self._ends, start)
    while start < stop:
      first = self._ends[i] - self.shards[i].size
      yield self.shards[i], start - first, min(stop, self._ends[i]) - first
      start, i = self._ends[i], i + 1

  def chunks(self) -> Iterator[np.ndarray]:
    """Yields all tokens, in the types of the files."""
    for shard in self.shards:
      for start in range(0, shard.size, _TOKENS_AT_ONCE):
        stop = min(shard.size, start + _TOKENS_AT_ONCE)
        yield read_parts([(shard, start, stop)])[0]


def find_files(folder: Path) -> dict[str, list[Path]]:
  """Returns the token files of a folder by part, those of all names in order.

  They are ``train.bin`` and ``val.bin``, or have a word of their name that says
  so, as ``fineweb_train_000001.bin`` and ``text_valid_document.bin`` have.
  Where there are both of the former, others are copies or of another kind.
  """
  found: dict[str, list[Path]] = {part: [] for part in PARTS}
  if not folder.is_dir():
    return found
  usual = {part: [folder / f'{part}.bin'] for part in PARTS}
  if all(path.is_file() for (path,) in usual.values()):
    return usual
  for path in sorted(folder.iterdir()):
    name = _PART.search(path.name.lower())
    is_hidden = path.name.startswith('.')
    is_tokens = path.suffix in TOKEN_SUFFIXES and not is_hidden
    if name and is_tokens and path.is_file():
      found[PARTS[0] if name[1] else PARTS[1]].append(path)
  return found


def has_token_files(folder: Path) -> bool:
  """Returns whether a folder holds token files."""
  return read_index(folder) is not None or any(find_files(folder).values())


def open_parts(
  folder: Path, vocab_size: int, index: dict[str, Any] | None
) -> dict[str, TokenFiles]:
  """Opens the token files of a folder by part, nothing for one without files.

  Without an index, as ``read_index`` returns it, or headers, their type is by
  the size of the vocabulary.
  """
  if index is None:
    found = find_files(folder).items()
    return {x: open_files(paths, vocab_size) for x, paths in found if paths}
  sizes = {
    PurePath(x['name']).name: x['size']
    for x in file_system(folder).ls(os.fspath(folder), detail=True)
  }
  parts = {}
  for part, rows in index['shards'].items():
    shards = [
      Shard(folder / x['file'], np.dtype(x['dtype']), x['tokens']) for x in rows
    ]
    for shard in shards:
      size, expected = sizes.get(shard.path.name), shard.num_bytes
      if size != expected:
        raise UsageError(
          f'{shard.path} has {size or 0} bytes: expected {expected} by '
          f'{INDEX}. It is damaged, or was not copied whole.'
        )
    parts[part] = TokenFiles(shards)
  return parts


def read_index(folder: Path) -> dict[str, Any] | None:
  """Returns the index of a folder that examples.gpt2.prepare wrote, if any."""
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
    if not any(find_files(folder).values()):
      return None
    raise UsageError(f'{folder / INDEX} is damaged: {error}') from error
  # Others have files of that name too.
  shards = index.get('shards') if isinstance(index, dict) else None
  return index if isinstance(shards, dict) and {*shards} >= {*PARTS} else None


def open_files(paths: Sequence[Path], vocab_size: int) -> TokenFiles:
  """Opens token files; without a header, their type is by the vocabulary."""
  dtype = token_dtype(vocab_size)
  return TokenFiles([open_shard(path, dtype) for path in paths])


def open_shard(path: Path, dtype: np.dtype) -> Shard:
  """Finds out what a token file is.

  Args:
    path: File of llm.c or modded-nanogpt, of NumPy, of Megatron with its
      ``.idx``, or of tokens without a header, as nanoGPT's.
    dtype: Type of tokens without a header.

  Raises:
    UsageError: If it is cut off, or if its tokens are not of the type.
  """
  size = file_size(path)
  with path.open('rb') as file:
    head = file.read(_LLM_C_HEADER)
  index = path.with_suffix('.idx')
  if head.startswith(_NUMPY):
    shard = _numpy_shard(path)
  elif llm_c := _llm_c_shard(path, head):
    shard = llm_c
  elif path.suffix == '.bin' and index.is_file():
    shard = _megatron_shard(path, index)
  else:
    shard = Shard(path, dtype, size // dtype.itemsize)
    if not size or size % dtype.itemsize:
      raise UsageError(
        f'{path} has {size} bytes: expected {dtype} tokens, a multiple of '
        f'{dtype.itemsize}.'
      )
    _check_plausible(shard)
  if not shard.size:
    raise UsageError(f'{path} holds no tokens.')
  expected = shard.offset + shard.num_bytes
  if size != expected:
    raise UsageError(
      f'{path} is cut off or damaged: it has {size} bytes, but its header says '
      f'{shard.size} {shard.dtype} tokens, which are {expected}.'
    )
  return shard


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
      read = _NUMPY_HEADERS[np.lib.format.read_magic(file)]
      shape, _, dtype = read(file)
      offset = file.tell()
  except (ValueError, KeyError) as error:
    raise UsageError(f'{path} is a damaged NumPy file: {error}') from error
  if len(shape) != 1 or dtype.kind not in 'iu':
    raise UsageError(
      f'{path} is a NumPy array of {dtype} and shape {shape}: expected '
      'integers on one axis.'
    )
  return Shard(path, dtype, shape[0], offset)


def _megatron_shard(path: Path, index: Path) -> Shard:
  """Reads what an index says of the last sequence, and with it of all.

  After the head and a number of documents, which fairseq's does not have, come
  the lengths of all sequences, and where they begin.
  """
  with index.open('rb') as file:
    head = file.read(_MEGATRON_HEAD.size).ljust(_MEGATRON_HEAD.size, b'\0')
    magic, _, code, count = _MEGATRON_HEAD.unpack(head)
    if magic != _MEGATRON or code not in _MEGATRON_DTYPES:
      raise UsageError(
        f'{index} is no index of Megatron, or has tokens that are no integers '
        f'(type {code}): {path.name} cannot be read without.'
      )
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    size = file_size(index)
    is_of_fairseq = size == len(head) + 12 * count
    starts = len(head) + (0 if is_of_fairseq else 8) + 4 * count
    if size < starts + 8 * count:
      raise UsageError(
        f'{index} is cut off: it has {size} bytes, too few for the {count} '
        'sequences that it names.'
      )
    if not count:
      return Shard(path, dtype, 0)
    file.seek(starts - 4)
    length = int.from_bytes(file.read(4), 'little')
    file.seek(starts + 8 * (count - 1))
    start = int.from_bytes(file.read(8), 'little')
  return Shard(path, dtype, start // dtype.itemsize + length)


def _check_plausible(shard: Shard) -> None:
  """Raises ``UsageError`` where every second token is nearly always tiny.

  So are the upper halves of tokens of twice the width.
  """
  (sample,) = read_parts([(shard, 0, min(shard.size, _SAMPLE) // 2 * 2)])
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


def read_windows(
  tokens: TokenFiles | np.ndarray, starts: np.ndarray, length: int
) -> np.ndarray:
  """Returns windows of tokens: int32, of the shape of their starts + length."""
  if isinstance(tokens, np.ndarray):
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length)
    return windows[starts].astype(np.int32)
  found = tokens.windows(starts.ravel().tolist(), length)
  return found.reshape(*starts.shape, length)
