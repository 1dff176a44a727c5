"""Documents in files, streamed one by one."""

from collections.abc import Iterable, Iterator
import dataclasses
import io
import itertools
import json
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet
import tqdm

from examples.gpt2.config import UsageError
from examples.gpt2.data import files
from examples.gpt2.data.tokenizer import END_OF_TEXT
from examples.gpt2.storage import as_path

_LONG_TEXT = 1 << 17
_LONG_LINE = 1 << 14
_ROWS_AT_ONCE = 1024
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_FILES_SHOWN = 10


class Position(NamedTuple):
  """A place between two documents."""

  file: int = 0  # Number of the file.
  documents: int = 0  # Documents of it before the place.


@dataclasses.dataclass
class LeftOut:
  """What was not read of a file."""

  documents: int = 0
  num_bytes: int = 0
  reason: str = ''  # Of the first.


@dataclasses.dataclass
class DocumentReader:
  """Streams the documents of text, JSON lines and Parquet files.

  Each line of ``.jsonl``, ``.ndjson``, ``.jsonlines`` and ``.json`` is a JSON
  object with the text of a document in a field, or the file is one array of
  such objects; each row of ``.parquet`` has it in a column. Any other file is a
  text: a document, or more than one with lines ``<|endoftext|>`` between them;
  a document of more than 131,072 bytes is cut there, at the next end of a line
  (or of a word, in a line of more than 16,384 bytes). Text is UTF-8, UTF-16 or
  UTF-32. Files that end in ``.gz``, ``.zst``, ``.bz2`` or ``.xz`` are unpacked.
  Empty documents are left out, and of folders what a leading dot hides.
  """

  data: Iterable[Path]  # Files, and folders with their subfolders.
  text_field: str = 'text'  # Field of the text in JSON, column in Parquet.
  skip_bad: bool = False  # Whether to leave out what cannot be read.
  is_cut: bool = True  # Whether texts may be more than a document.

  def __post_init__(self) -> None:
    self.restore(None)

  def restore(self, place: dict[str, Any] | None) -> None:
    """Goes to a place that ``place`` has returned, or to the beginning."""
    place = place or {'position': (), 'left_out': {}}
    # After the last document that was yielded.
    self.position = Position(*place['position'])
    # Size in UTF-8 of the documents that were yielded.
    self.num_bytes = place.get('num_bytes', 0)
    # Bytes that were no UTF-8, now U+FFFD.
    self.num_replaced = place.get('num_replaced', 0)
    self.left_out = {k: LeftOut(*x) for k, x in place['left_out'].items()}

  def place(self) -> dict[str, Any]:
    """Returns where the reader is, with what it has counted, as JSON values."""
    left_out = {k: dataclasses.astuple(x) for k, x in self.left_out.items()}
    return {
      'position': tuple(self.position),
      'num_bytes': self.num_bytes,
      'num_replaced': self.num_replaced,
      'left_out': left_out,
    }

  @property
  def num_skipped(self) -> int:
    """Documents that were left out."""
    return sum(x.documents for x in self.left_out.values())

  def find_files(self) -> list[Path]:
    """Returns the files; raises ``UsageError`` if there are none."""
    paths = [x for path in self.data for x in files.find_files(as_path(path))]
    if not paths:
      raise UsageError(f'{" ".join(map(str, self.data))} has no files.')
    return paths

  def read(
    self, purpose: str | None, place: dict[str, Any] | None = None
  ) -> Iterator[str]:
    """Yields the documents after a place, with a progress bar of that name.

    Raises ``UsageError`` if there are no files, if a document cannot be read,
    unless those are skipped, or if a compressed file is damaged.
    """
    self.restore(place)
    start = self.position
    paths = self.find_files()
    with tqdm.tqdm(
      None, purpose, unit=' documents', disable=purpose is None
    ) as bar:
      for number, path in enumerate(paths[start.file :], start.file):
        bar.set_postfix_str(f'file {number + 1} of {len(paths)}')
        skipped = start.documents if number == start.file else 0
        for i, text in enumerate(self._read_file(path, skipped), skipped + 1):
          bar.update()
          if text:
            self.position = Position(number, i)
            self.num_bytes += len(text.encode())
            yield text

  def _read_file(self, path: Path, skipped: int) -> Iterator[str]:
    """Yields the documents of a file, and nothing for each that is left out."""
    kind = files.kind(path)
    read = self._read_parquet if kind == 'Parquet' else self._read_lines
    try:
      with files.open_unpacked(path) as stream:
        yield from read(path, stream, skipped)
    except files.OtherFormatError as error:
      if not self.skip_bad:
        raise UsageError(
          f'{path} is a file of another format ({error}): expected '
          f'{files.ACCEPTED}; --skip-bad leaves such files out.'
        ) from error
      size = files.file_size(path)
      self.left_out[str(path)] = LeftOut(0, size, f'a {error} file')

  def _read_lines(
    self, path: Path, stream: IO[bytes], skipped: int
  ) -> Iterator[str]:
    is_json = files.kind(path) == 'JSON lines'
    stream = files.as_utf8(stream)
    parts: Iterator[tuple[int, bytes]]
    if is_json:
      parts = enumerate(_records(stream), 1)
    elif self.is_cut:
      parts = _split_text(stream)
    else:
      parts = iter([(1, stream.read())])
    for line, content in itertools.islice(parts, skipped, None):
      yield self._parse(path, line, content, is_json)

  def _read_parquet(
    self, path: Path, stream: IO[bytes], skipped: int
  ) -> Iterator[str]:
    try:
      table = pa.parquet.ParquetFile(stream)
    except (pa.ArrowException, OSError) as error:
      if not files.is_damage(error):
        raise
      raise files.OtherFormatError('damaged Parquet') from error
    texts = [x.name for x in table.schema_arrow if _is_text(x.type)]
    if self.text_field not in texts:
      if self.skip_bad:
        raise files.OtherFormatError(f'Parquet without {self.text_field!r}')
      expected = ', '.join(texts) or 'one of text, of which it has none'
      raise UsageError(
        f'{path} has no column {self.text_field!r} of text: expected '
        f'--text-field to be one of {expected}.'
      )
    batches = table.iter_batches(_ROWS_AT_ONCE, columns=[self.text_field])
    rows = itertools.chain.from_iterable(map(_contents, batches))
    contents = enumerate(rows, 1)
    try:
      for row, content in itertools.islice(contents, skipped, None):
        yield self._parse(path, row, content or b'', False)
    except (pa.ArrowException, OSError) as error:
      if not files.is_damage(error):
        raise
      raise UsageError(f'{path} is damaged: {error}') from error

  def _parse(self, path: Path, line: int, content: bytes, is_json: bool) -> str:
    """Returns the text of a document, nothing for one that is left out."""
    try:
      text = self._decode(content)
      return _text_of(text, self.text_field) if is_json else text
    except (ValueError, RecursionError) as error:
      if not self.skip_bad:
        line += content.count(b'\n', 0, getattr(error, 'start', 0))
        raise UsageError(
          f'{path}, line {line}: expected UTF-8 text, in JSON lines a JSON '
          f'object with a text field {self.text_field!r}, got {error}; '
          '--skip-bad leaves out what cannot be read.'
        ) from error
      found = self.left_out.setdefault(str(path), LeftOut(reason=str(error)))
      found.documents += 1
      found.num_bytes += len(content)
      return ''

  def _decode(self, content: bytes) -> str:
    """Returns text; a few bytes that are no UTF-8 are replaced if possible."""
    try:
      return content.decode()
    except UnicodeDecodeError:
      if not self.skip_bad or files.is_mostly_bad(content):
        raise
      text = content.decode(errors='replace')
      self.num_replaced += files.count_bad(content)
      return text

  def describe_left_out(self) -> str:
    """Returns what was left out, by file, as lines of text."""
    lines = [
      f'left out of {path}: '
      + (f'{x.documents:,} documents, ' if x.documents else '')
      + f'{x.num_bytes:,} bytes ({x.reason})'
      for path, x in self.left_out.items()
    ]
    if self.num_replaced:
      lines.insert(0, f'{self.num_replaced:,} bytes that are no UTF-8 replaced')
    more = len(lines) - _FILES_SHOWN
    if more > 0:
      total = sum(x.num_bytes for x in self.left_out.values())
      lines[_FILES_SHOWN:] = [f'and {more:,} more; in all {total:,} bytes']
    return ''.join(f'\n  {line}' for line in lines)


def _is_text(kind: pa.DataType) -> bool:
  if pa.types.is_dictionary(kind):
    kind = kind.value_type
  return kind in _TEXTS


def _contents(batch: pa.RecordBatch) -> list[bytes | None]:
  """Returns the texts in the only column of some rows."""
  column = batch.column(0)
  if pa.types.is_dictionary(column.type):
    column = column.dictionary_decode()
  # What is no UTF-8 would stop a whole batch, as strings.
  return column.cast(pa.binary()).to_pylist()


def _records(stream: IO[bytes]) -> Iterator[bytes]:
  """Yields JSON values: the lines, or the items of an array."""
  head = b''
  for line in stream:
    head += line
    if line.strip():
      break
  if not head.lstrip().startswith(b'['):
    yield from io.BytesIO(head)
    yield from stream
    return
  content = head + stream.read()
  try:
    items = json.loads(content)
  except (ValueError, RecursionError):  # Each line is then looked at by itself.
    yield from io.BytesIO(content)
    return
  for item in items:
    yield json.dumps(item).encode()


def _text_of(line: str, field: str) -> str:
  """Returns the text in a line of JSON; of an empty line, an empty one."""
  line = line.removeprefix('\ufeff').strip()
  record = json.loads(line) if line else {field: ''}
  text = record.get(field) if isinstance(record, dict) else None
  if not isinstance(text, str):
    raise ValueError(f'JSON without it: {line[:40]!r}')
  text.encode()  # JSON can hold halves of characters, which UTF-8 cannot.
  return text


def _split_text(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
  """Yields documents and, before each, the number of its first line."""
  first, document, in_line = 1, bytearray(), False
  while part := stream.readline(_LONG_LINE):
    ends = not in_line and part.strip() == END_OF_TEXT.encode()
    in_line = len(part) == _LONG_LINE and not part.endswith(b'\n')
    if not ends:
      document += part
    cut = document.rfind(b' ') + 1 if in_line else len(document)
    if ends or cut > _LONG_TEXT:
      yield first, bytes(document[:cut])
      first += document.count(b'\n', 0, cut)
      if ends:
        first += 1  # The line that ends it is no part of it.
      del document[:cut]
  yield first, bytes(document)
