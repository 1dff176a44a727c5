"""Files that people have text in: found, recognized, unpacked and decoded."""

import bz2
import codecs
from collections.abc import Iterator
import contextlib
import functools
import gzip
import io
import lzma
import os
from pathlib import Path, PurePath
import sys
from typing import IO, Any
import zlib

from examples.gpt2.config import UsageError
from examples.gpt2.storage import file_system, is_remote

if sys.version_info >= (3, 14):
  from compression import zstd
else:
  from backports import zstd

KINDS = {
  '.jsonl': 'JSON lines', '.ndjson': 'JSON lines', '.jsonlines': 'JSON lines',
  '.json': 'JSON lines', '.parquet': 'Parquet',
}  # fmt: skip
"""Kinds of files by the end of their name; all others are text."""

ACCEPTED = (
  'text, JSON lines (.jsonl, .ndjson, .jsonlines, .json) or Parquet '
  '(.parquet), as they are or compressed (.gz, .zst, .bz2, .xz)'
)
"""What is read, for messages."""

# Zstandard's own limit, which files of --long=31 need.
_LONGEST = {zstd.DecompressionParameter.window_log_max: 31}
_UNPACK: dict[str, Any] = {
  '.gz': gzip.open,
  '.zst': functools.partial(zstd.open, options=_LONGEST),
  '.bz2': bz2.open,
  '.xz': lzma.open,
}
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
_OTHERS = {
  b'PAR1': 'Parquet', b'ARROW1': 'Arrow', b'\x1f\x8b': 'gzip',
  b'\x28\xb5\x2f\xfd': 'Zstandard', b'BZh9': 'bzip2', b'\xfd7zXZ\0': 'xz',
  b'\xff\xff\xff\xff': 'Arrow stream', b'\x04\x22\x4d\x18': 'LZ4',
  b'PK\3\4': 'ZIP', b'7z\xbc\xaf': '7-Zip', b'%PDF-': 'PDF',
  b'\x89PNG': 'PNG', b'\xff\xd8\xff': 'JPEG', b'GIF8': 'GIF',
  b'\x89HDF': 'HDF5', b'\x93NUMPY': 'NumPy', b'SQLite format 3': 'SQLite',
  b'\x7fELF': 'program', b'MMIDIDX': 'Megatron index',
}  # fmt: skip
_MARKS = (
  (codecs.BOM_UTF8, 'utf-8'),
  (codecs.BOM_UTF32_LE, 'utf-32-le'),  # Begins as the mark of UTF-16 does.
  (codecs.BOM_UTF32_BE, 'utf-32-be'),
  (codecs.BOM_UTF16_LE, 'utf-16-le'),
  (codecs.BOM_UTF16_BE, 'utf-16-be'),
)
# What Hugging Face keeps beside the Parquet files of a data set.
_BESIDE = {'readme.md', 'license', 'dataset_info.json', 'dataset_infos.json'}
_HEAD = 1 << 16
_LOW = bytes({*range(32)} - {*b'\r\n'})
_REPLACEMENT = '\ufffd'
_CONTROL = set(map(chr, [*range(32), *range(0x7F, 0xA0)])) - set('\t\n\v\f\r')


class OtherFormatError(ValueError):
  """A file is none of what is read; the message is its format."""


def find_files(path: Path, pattern: str = '*') -> list[Path]:
  """Returns a file, or the files of a folder and its subfolders in order.

  What a leading dot hides is left out, and in a folder of Parquet files what
  describes the data set. Raises ``UsageError`` if there is no such path.
  """
  if path.is_file():
    return [path]
  if not path.is_dir():
    raise UsageError(
      f'{path} does not exist: expected a file or a folder of files.'
    )
  files = [
    file
    for file in sorted(_find_all(path, pattern))
    if not any(x.startswith('.') for x in file.relative_to(path).parts)
  ]
  if any(kind(file) == 'Parquet' for file in files):
    return [file for file in files if file.name.lower() not in _BESIDE]
  return files


def _find_all(folder: Path, pattern: str) -> list[Path]:
  if not is_remote(folder):
    return [file for file in folder.rglob(pattern) if file.is_file()]
  # One request for a thousand files, where a glob would ask for each folder.
  root = os.fspath(folder).partition('://')[2].rstrip('/') + '/'
  names = file_system(folder).find(root)
  paths = [folder / name.removeprefix(root) for name in names if name != root]
  return [path for path in paths if path.match(pattern)]


def file_size(path: Path) -> int:
  """Returns the bytes of a file, on a disk or in an object store."""
  return file_system(path).info(os.fspath(path))['size']


def kind(path: PurePath) -> str:
  """Returns the kind of a file, by its name without that of a compression."""
  name = path.name.lower()
  for suffix in _UNPACK:
    name = name.removesuffix(suffix)
  return KINDS.get(PurePath(name).suffix, 'text')


@contextlib.contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
  """Opens a file, and unpacks what it holds.

  Raises ``UsageError`` if that is damaged, also where it is read.
  """
  unpack = _UNPACK.get(path.suffix.lower())
  with path.open('rb') as file:
    if unpack is None:
      yield file
      return
    try:
      with unpack(file) as stream:
        yield stream
    except (*_DAMAGE, OSError) as error:
      if not is_damage(error):
        raise
      raise UsageError(f'{path} is damaged: {error}.') from error


def is_damage(error: Exception) -> bool:
  """Returns whether what failed is to unpack, and not to read.

  Both are an ``OSError`` in gzip, bz2 and pyarrow. That of a disk has a number,
  and that of a store is narrower, but where gcsfs is refused access.
  """
  if not isinstance(error, OSError):
    return True
  is_plain = type(error) in (OSError, gzip.BadGzipFile) and error.errno is None
  return is_plain and not str(error).startswith('Forbidden: ')


def as_utf8(stream: IO[bytes]) -> IO[bytes]:
  """Returns the text of a stream in UTF-8 and without a byte-order mark.

  It is in UTF-8, or in UTF-16 or UTF-32 with a mark; UTF-16 is recognized
  without one too. Raises ``OtherFormatError`` if it is no text.
  """
  head = stream.read(_HEAD)
  marked = [x for x in _MARKS if head.startswith(x[0])]
  mark, encoding = marked[0] if marked else (b'', _encoding(head))
  stream.seek(len(mark))
  if encoding == 'utf-8':
    return stream
  return io.BufferedReader(_Recoded(stream, encoding), _HEAD)


def _encoding(head: bytes) -> str:
  """Returns the encoding of text without a byte-order mark."""
  for magic, name in _OTHERS.items():
    if head.startswith(magic):
      raise OtherFormatError(name)
  if head[257:262] == b'ustar':
    raise OtherFormatError('tar')
  if b'\0' not in head:
    return 'utf-8'
  # In UTF-16, characters of one script have the same first byte, in most
  # scripts one below 32. In UTF-8, such bytes are few, or at any place.
  first, second = (_count_low(head[i::2]) for i in (0, 1))
  fewer, more = sorted((first, second))
  is_utf_16 = more * 6 >= len(head) and fewer * 4 <= more * 3
  if not is_utf_16 and not is_mostly_bad(head):
    return 'utf-8'
  encoding = 'utf-16-le' if second > first else 'utf-16-be'
  text = head.decode(encoding, 'replace')
  if _CONTROL & set(text):
    raise OtherFormatError('binary')
  return encoding


def _count_low(content: bytes) -> int:
  """Returns the number of bytes below 32 that end no line."""
  return len(content) - len(content.translate(None, _LOW))


def is_mostly_bad(content: bytes) -> bool:
  """Returns whether more than one in a hundred characters is no UTF-8."""
  return count_bad(content) * 100 > len(content.decode(errors='replace'))


def count_bad(content: bytes) -> int:
  """Returns the number of characters that are no UTF-8."""
  text = content.decode(errors='replace')
  return text.count(_REPLACEMENT) - content.count(_REPLACEMENT.encode())


class _Recoded(io.RawIOBase):
  """Text of another encoding as UTF-8."""

  def __init__(self, stream: IO[bytes], encoding: str):
    chunks = iter(functools.partial(stream.read, _HEAD), b'')
    self._texts = codecs.iterdecode(chunks, encoding, 'replace')
    self._left = b''

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    while not self._left:
      text = next(self._texts, None)
      if text is None:
        return 0
      self._left = text.encode()
    count = min(len(buffer), len(self._left))
    buffer[:count] = self._left[:count]
    self._left = self._left[count:]
    return count
