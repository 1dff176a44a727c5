"""Streams documents of any amount of text, one by one or in groups."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
import gzip
import io
import json
from pathlib import Path
from typing import IO
import zlib

import tqdm

from examples.gpt2.config import UsageError
from examples.gpt2.data.corpus import END_OF_TEXT

_LONG_TEXT = 1 << 17
_LONG_LINE = 1 << 14
_JSON_SUFFIXES = ('.jsonl', '.ndjson', '.json')
_CHARACTERS_IN_MEMORY = 1 << 22


class DocumentReader:
  """Streams the documents of text files and of files of JSON lines.

  Each line of ``.jsonl``, ``.ndjson`` and ``.json`` is a JSON object with the
  text of a document in a field. Any other file is a text: a document, or more
  than one with lines ``<|endoftext|>`` between them; a document of more than
  131,072 bytes is cut there, at the next end of a line (or of a word, in a line
  of more than 16,384 bytes). Files that end in ``.gz`` are unpacked. Empty
  documents are left out.

  Attributes:
    paths: The files, in the order in which they are read.
    num_bytes: Size of the files as they lie on the disk.
    num_skipped: Documents that the last reading left out as not readable.
  """

  def __init__(
    self, data: Sequence[Path], text_field: str = 'text', skip_bad: bool = False
  ):
    """Finds the files.

    Args:
      data: Files, and folders that are read with all their subfolders but
        without what a leading dot hides.
      text_field: Field of the text in JSON.
      skip_bad: Whether documents that cannot be read are left out.

    Raises:
      UsageError: If a path does not exist, or there are no files.
    """
    self.paths = [file for path in data for file in _files_of(path)]
    if not self.paths:
      raise UsageError(f'--data {" ".join(map(str, data))} holds no files.')
    self.num_bytes = sum(path.stat().st_size for path in self.paths)
    self.num_skipped = 0
    self._text_field = text_field
    self._skip_bad = skip_bad

  def read(self, on_read: Callable[[int], object]) -> Iterator[str]:
    """Reads all documents in order.

    Args:
      on_read: Called with the number of bytes of each piece of a file.

    Yields:
      The text of each document, which UTF-8 can encode.

    Raises:
      UsageError: If a document cannot be read, unless those are skipped, or if
        a compressed file is damaged.
    """
    self.num_skipped = 0
    for path in self.paths:
      try:
        with _open(path, on_read) as stream:
          yield from filter(None, self._documents(path, stream))
      except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f'{path} is damaged: {error}.') from error

  def _documents(self, path: Path, stream: IO[bytes]) -> Iterator[str]:
    split, parse, expected = _split_text, bytes.decode, 'UTF-8 text'
    if path.name.removesuffix('.gz').endswith(_JSON_SUFFIXES):
      split = functools.partial(enumerate, start=1)
      parse = functools.partial(_parse_json, field=self._text_field)
      expected = f'a JSON object with a text field {self._text_field!r}'
    for line, content in split(stream):
      try:
        yield parse(content)
      except (ValueError, RecursionError) as error:
        if not self._skip_bad:
          raise UsageError(
            f'{path}, line {line + _lines_before(error)}: expected {expected}, '
            f'got {error}; --skip-bad leaves out what cannot be read.'
          ) from error
        self.num_skipped += 1


def read_with_progress(reader: DocumentReader, what: str) -> Iterator[str]:
  """Reads all documents, with a progress bar of the bytes of their files.

  Args:
    reader: Reader of the documents.
    what: What they are read for, for people.

  Yields:
    The text of each document.
  """
  with tqdm.tqdm(
    total=reader.num_bytes, desc=what, unit='B', unit_scale=True
  ) as progress:
    yield from reader.read(progress.update)


def in_groups(documents: Iterable[str]) -> Iterator[list[str]]:
  """Groups documents: enough for all cores, and not too much for memory.

  Args:
    documents: Text of documents.

  Yields:
    The next documents, in order; the last group may be empty.
  """
  batch: list[str] = []
  size = 0
  for text in documents:
    batch.append(text)
    size += len(text)
    if size > _CHARACTERS_IN_MEMORY:
      yield batch
      batch, size = [], 0
  yield batch


def _lines_before(error: Exception) -> int:
  """Returns how many lines of a document are above a mistake in it."""
  if not isinstance(error, UnicodeDecodeError):
    return 0
  return error.object.count(b'\n', 0, error.start)


def _files_of(path: Path) -> list[Path]:
  path = path.expanduser()
  if path.is_file():
    return [path]
  if not path.is_dir():
    raise UsageError(
      f'--data {path} does not exist: expected files of text or of JSON lines, '
      'or folders of such files.'
    )
  return [
    file
    for file in sorted(path.rglob('*'))
    if file.is_file()
    and not any(part.startswith('.') for part in file.relative_to(path).parts)
  ]


class _CountedFile(io.FileIO):
  """A file that says how many bytes are read."""

  def __init__(self, path: Path, on_read: Callable[[int], object]):
    super().__init__(path)
    self._on_read = on_read

  def readinto(self, buffer: memoryview) -> int:
    count = super().readinto(buffer)
    self._on_read(count)
    return count


@contextlib.contextmanager
def _open(path: Path, on_read: Callable[[int], object]) -> Iterator[IO[bytes]]:
  with io.BufferedReader(_CountedFile(path, on_read), 1 << 20) as file:
    yield gzip.GzipFile(fileobj=file) if path.suffix == '.gz' else file


def _parse_json(line: bytes, field: str) -> str:
  """Returns the text in a line of JSON; of an empty line, an empty one."""
  if not line.strip():
    return ''
  record = json.loads(line.decode())
  text = record.get(field) if isinstance(record, dict) else None
  if not isinstance(text, str):
    raise ValueError(f'JSON without it: {line[:40]!r}')
  text.encode()  # JSON can hold halves of characters, which UTF-8 cannot.
  return text


def _split_text(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
  """Yields documents and, before each, the number of its first line."""
  first = number = 1
  document = bytearray()
  for part in _lines(stream):
    number += part.endswith(b'\n')
    ends = part.strip() == END_OF_TEXT.encode()
    if not ends:
      document += part
    if ends or len(document) > _LONG_TEXT:
      yield first, bytes(document)
      document.clear()
      first = number
  yield first, bytes(document)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
  """Yields lines; those that are too long, in parts that end with a space."""
  rest = b''
  while line := stream.readline(_LONG_LINE):
    whole = line.endswith(b'\n') or len(line) < _LONG_LINE
    line = rest + line
    cut = len(line) if whole else line.rfind(b' ') + 1
    yield line[:cut]
    rest = line[cut:]
  yield rest
