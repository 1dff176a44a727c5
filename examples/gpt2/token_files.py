"""Token files: of examples.gpt2.prepare, llm.c, nanoGPT and others."""

from collections.abc import Sequence
import contextlib
import dataclasses
import json
import math
from pathlib import Path
import re
from typing import Any

import numpy as np

from examples.gpt2.command import UsageError
from examples.gpt2.storage import as_path, is_remote, read, size

INDEX = 'index.json'  # Of what examples.gpt2.prepare has written.
PARTS = ('train', 'val')  # To train on, and held out.

_PART = re.compile(r'(?:^|[_.-])(?:(train)|val|valid|validation)(?=[_.-])')
# Of llm.c and modded-nanogpt: 256 numbers of 32 bits, of which the first is
# this, and the third the number of tokens.
_LLM_C = {20240520: np.uint16, 20240801: np.uint32}
_LLM_C_HEADER = 1024
_HEAD = 1 << 20  # Bytes of a file that tell its format.


def parse_sources(data: Sequence[str]) -> list[tuple[str, float | None]]:
  """Parses names and weights, such as ``'tokens/web:0.7'``.

  Raises ``UsageError`` unless all of several have a weight above 0, or none.
  """
  sources = [_parse(text) for text in data]
  given = [weight for _, weight in sources if weight is not None]
  is_each = len(given) in (0, len(sources))
  if not sources or not is_each or not all(0 < x < math.inf for x in given):
    raise UsageError(
      '--data must name sources, each with a weight above 0, as in '
      f'tokens/web:0.7 tokens/code:0.3, or none, got {" ".join(data)!r}.'
    )
  return sources


def _parse(text: str) -> tuple[str, float | None]:
  name, _, weight = text.rpartition(':')
  if not name or as_path(text).exists():  # A name with a colon.
    return text, None
  try:
    return name, float(weight)
  except ValueError:  # As in gs://bucket.
    return text, None


def token_dtype(vocab_size: int) -> np.dtype:
  """Returns the type of tokens in files: uint16, or uint32 if need be."""
  return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def open_part(folder: Path, part: str, vocab_size: int) -> list[Any]:
  """Opens the token files of ``'train'`` or ``'val'``, as arrays of tokens.

  Args:
    folder: Folder with token files, on a disk or in a store.
    part: The part.
    vocab_size: Number of tokens. Files without a header or an index are read as
      uint32 if it is above 65536, else as uint16.

  Raises:
    UsageError: If there are no files, or one is cut off or of another format.
  """
  index = read_index(folder)
  if index is None:
    paths = _find_files(folder)[part]
    files = [open_tokens(path, vocab_size) for path in paths]
  else:
    dtype = np.dtype(index['dtype'])
    shards = index['shards'][part].items()
    files = [_open(folder / name, dtype, count) for name, count in shards]
  if not files:
    raise UsageError(
      f'{folder} has no {part}.bin: expected text, or a folder with token '
      'files to train and to validate on.'
    )
  return files


def open_held_out(path: Path, vocab_size: int) -> list[Any]:
  """Opens a token file, or those of a folder to validate on.

  Raises ``UsageError`` as ``open_part`` does.
  """
  if path.suffix == '.bin' and path.is_file():
    return [open_tokens(path, vocab_size)]
  return open_part(path, 'val', vocab_size)


def has_token_files(folder: Path) -> bool:
  """Returns whether a folder holds token files."""
  return read_index(folder) is not None or any(_find_files(folder).values())


def is_text(name: str) -> bool:
  """Returns whether a name stands for text, not for token files."""
  path = as_path(name)
  if name == 'stdlib':
    return True
  is_tokens = path.suffix == '.bin' or has_token_files(path)
  return not is_tokens and path.exists()


def read_index(folder: Path) -> dict[str, Any] | None:
  """Returns the index of a folder that examples.gpt2.prepare wrote, if any.

  Raises ``UsageError`` if prepare has not finished.
  """
  try:
    index = json.loads(read(folder / INDEX))
  except (FileNotFoundError, ValueError):
    return None
  # Others have files of that name too.
  if not isinstance(index, dict) or 'shards' not in index:
    return None
  if not index['shards']:
    raise UsageError(
      f'{folder} holds tokens of an examples.gpt2.prepare that has not '
      'finished: give its command again, and it goes on.'
    )
  return index


def _find_files(folder: Path) -> dict[str, list[Path]]:
  """Returns the token files of a folder by part, in the order of their names.

  They are ``train.bin`` and ``val.bin``, or have a word of their name that says
  so, as ``fineweb_train_000001.bin`` has. Where there are both of the former,
  others are copies or of another kind.
  """
  usual = {part: [folder / f'{part}.bin'] for part in PARTS}
  if all(path.is_file() for (path,) in usual.values()):
    return usual
  found: dict[str, list[Path]] = {part: [] for part in PARTS}
  for path in sorted(folder.iterdir()) if folder.is_dir() else ():
    name = _PART.search(path.name.lower())
    if name and path.suffix == '.bin' and path.name[0] != '.':
      found['train' if name[1] else 'val'].append(path)
  return found


def open_tokens(path: Path, vocab_size: int) -> Any:
  """Opens a token file of llm.c, or one without a header, see ``open_part``."""
  num_bytes, dtype = size(path), token_dtype(vocab_size)
  head = read(path, 0, min(num_bytes, _HEAD)) if num_bytes else b''
  if num_bytes >= _LLM_C_HEADER:
    magic, _, count = np.frombuffer(head, '<i4', 3).tolist()
    if magic in _LLM_C:
      return _open(path, np.dtype(_LLM_C[magic]), count, _LLM_C_HEADER)
  if num_bytes % dtype.itemsize:
    raise UsageError(
      f'{path} has {num_bytes} bytes: expected {dtype} tokens, a multiple of '
      f'{dtype.itemsize}.'
    )
  width = _token_width(np.frombuffer(head, dtype))
  if width != dtype.itemsize:
    raise UsageError(
      f'{path} has {width} bytes per token: expected {dtype} tokens, as '
      f"NumPy's tokens.astype('{dtype}') makes them."
    )
  return _open(path, dtype, num_bytes // dtype.itemsize)


def _token_width(words: np.ndarray) -> int:
  """Returns the bytes of a token, by which of the words are always zero."""
  # Few tokens can be zero by chance.
  for parts in (4, 2) if len(words) >= 1000 else ():
    used = words[: len(words) // parts * parts].reshape(-1, parts).any(0)
    if used.sum() == 1:
      return parts * words.itemsize
  return words.itemsize


def _open(path: Path, dtype: np.dtype, count: int, offset: int = 0) -> Any:
  expected, found = offset + count * dtype.itemsize, 0
  with contextlib.suppress(FileNotFoundError):
    found = size(path)
  if found != expected or not count:
    raise UsageError(
      f'{path} has {found} bytes, expected {expected} for {count} {dtype} '
      'tokens: it is damaged, or was not copied whole.'
    )
  if is_remote(path):
    return RemoteTokens(path, dtype, count, offset)
  # Slices of a memmap itself are slow to make.
  return np.asarray(np.memmap(path, dtype, 'r', offset, count))


@dataclasses.dataclass(frozen=True)
class RemoteTokens:
  """The tokens of a file in an object store, read where they are sliced."""

  path: Path
  dtype: np.dtype
  size: int
  offset: int  # Bytes before the first token.

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: slice) -> np.ndarray:
    first, last, _ = index.indices(self.size)
    start, stop = (self.offset + x * self.dtype.itemsize for x in (first, last))
    return np.frombuffer(read(self.path, start, stop), self.dtype)
