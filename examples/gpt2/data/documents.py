"""Documents in files: read into memory and split, or streamed one by one."""

from collections.abc import Iterable, Iterator
import dataclasses
import gzip
import hashlib
import itertools
import json
from pathlib import Path
import sysconfig
from typing import IO, NamedTuple
import zlib

import tqdm

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import END_OF_TEXT

_VALIDATION_SHARE = 0.05
# With fewer files than this, a split by file would be too coarse.
_FILES_FOR_SPLIT = 40
_NOT_STDLIB = {
  'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test',
}  # fmt: skip
_JSON_SUFFIXES = ('.jsonl', '.ndjson', '.json')
_LONG_TEXT = 1 << 17
_LONG_LINE = 1 << 14


class Corpus(NamedTuple):
  """Text of a run, in memory."""

  source: str  # Where it came from, for people.
  train: list[str]  # Documents to train on.
  validation: list[str]  # Documents held out.
  num_bytes: int  # Size of all documents in UTF-8.
  sha256: str  # Hash of all documents and of the split, hexadecimal.


def load_corpus(data: str) -> Corpus:
  """Reads text files, of which each is a document, and splits them.

  The data is ``'stdlib'``, a text file, or a folder of text files, which is
  read with all its subfolders; what is not UTF-8 text is left out. Of many
  files about every twentieth, chosen by a hash of its name, is held out; of
  few, the last twentieth of their text. Raises ``UsageError`` if there is no
  such path, or no text in it.
  """
  if not data:
    raise UsageError('--data must not be empty.')
  if data == 'stdlib':
    root = Path(sysconfig.get_path('stdlib'))
    paths = [
      path
      for path in _find_files(root, '*.py')
      if not _NOT_STDLIB & set(path.relative_to(root).parts)
    ]
  else:
    root = Path(data).expanduser()
    paths = _find_files(root)
  texts = {p.relative_to(root).as_posix(): _read_text(p) for p in paths}
  documents = {name: text for name, text in texts.items() if text.strip()}
  if not documents:
    raise UsageError(
      f'--data {data} holds no UTF-8 text: expected a text file or a folder '
      'of text files that are not empty.'
    )
  train, validation = _split(documents)
  return Corpus(
    source=f'{data} ({len(documents)} of {len(paths)} files)',
    train=train,
    validation=validation,
    num_bytes=sum(len(text.encode()) for text in documents.values()),
    sha256=_hash(train, validation),
  )


def _find_files(path: Path, pattern: str = '*') -> list[Path]:
  """Returns a file, or the files of a folder and its subfolders in order."""
  if path.is_file():
    return [path]
  if not path.is_dir():
    raise UsageError(
      f'--data {path} does not exist: expected a file or a folder of files.'
    )
  return [file for file in sorted(path.rglob(pattern)) if file.is_file()]


def _read_text(path: Path) -> str:
  """Returns the text of a file, nothing where it is not UTF-8 text."""
  content = path.read_bytes()
  try:
    return '' if b'\0' in content else content.decode()
  except UnicodeDecodeError:
    return ''


def _split(documents: dict[str, str]) -> tuple[list[str], list[str]]:
  """Splits documents, by their names, into training and validation."""
  if len(documents) < _FILES_FOR_SPLIT:
    text = '\n'.join(documents.values())
    cut = round(len(text) * (1 - _VALIDATION_SHARE))
    return [text[:cut]], [text[cut:]]
  order = sorted(documents, key=lambda name: _hash([name]))
  wanted = _VALIDATION_SHARE * sum(map(len, documents.values()))
  validation: list[str] = []
  while sum(map(len, validation)) < wanted:
    validation.append(documents[order.pop()])
  return [documents[name] for name in order], validation


def _hash(*groups: list[str]) -> str:
  digest = hashlib.sha256()
  for group in groups:
    digest.update(f'{len(group)} documents'.encode())
    for text in group:
      content = text.encode()
      digest.update(f'{len(content)} bytes'.encode() + content)
  return digest.hexdigest()


@dataclasses.dataclass
class DocumentReader:
  """Streams the documents of text files and of files of JSON lines.

  Each line of ``.jsonl``, ``.ndjson`` and ``.json`` is a JSON object with the
  text of a document in a field. Any other file is a text: a document, or more
  than one with lines ``<|endoftext|>`` between them; a document of more than
  131,072 bytes is cut there, at the next end of a line (or of a word, in a line
  of more than 16,384 bytes). Files that end in ``.gz`` are unpacked. Empty
  documents are left out, and of folders what a leading dot hides.
  """

  data: Iterable[Path]  # Files, and folders with their subfolders.
  text_field: str = 'text'  # Field of the text in JSON.
  skip_bad: bool = False  # Whether to leave out what cannot be read.
  num_skipped: int = 0  # Documents left out by the last reading.
  num_bytes: int = 0  # Size in UTF-8 of the documents of the last reading.

  def read(self, purpose: str) -> Iterator[str]:
    """Yields the documents in order, with a progress bar of that name.

    Raises ``UsageError`` if there are no files, if a document cannot be read,
    unless those are skipped, or if a compressed file is damaged.
    """
    self.num_skipped = self.num_bytes = 0
    paths = [
      file
      for path in map(Path.expanduser, self.data)
      for file in _find_files(path)
      if not any(x.startswith('.') for x in file.relative_to(path).parts)
    ]
    if not paths:
      raise UsageError(f'--data {" ".join(map(str, self.data))} has no files.')
    documents = itertools.chain.from_iterable(map(self._read_file, paths))
    progress = tqdm.tqdm(documents, purpose, unit=' documents')
    for text in filter(None, progress):
      self.num_bytes += len(text.encode())
      yield text

  def _read_file(self, path: Path) -> Iterator[str]:
    is_json = path.name.removesuffix('.gz').endswith(_JSON_SUFFIXES)
    try:
      with gzip.open(path) if path.suffix == '.gz' else path.open('rb') as file:
        parts = enumerate(file, 1) if is_json else _split_text(file)
        for line, content in parts:
          yield self._parse(path, line, content, is_json)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
      raise UsageError(f'{path} is damaged: {error}.') from error

  def _parse(self, path: Path, line: int, content: bytes, is_json: bool) -> str:
    """Returns the text of a document, nothing for one that is skipped."""
    try:
      text = content.decode()
      return _text_of(text, self.text_field) if is_json else text
    except (ValueError, RecursionError) as error:
      if not self.skip_bad:
        line += content.count(b'\n', 0, getattr(error, 'start', 0))
        raise UsageError(
          f'{path}, line {line}: expected UTF-8 text, in JSON lines a JSON '
          f'object with a text field {self.text_field!r}, got {error}; '
          '--skip-bad leaves out what cannot be read.'
        ) from error
      self.num_skipped += 1
      return ''


def _text_of(line: str, field: str) -> str:
  """Returns the text in a line of JSON; of an empty line, an empty one."""
  record = json.loads(line) if line.strip() else {field: ''}
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
      first += document.count(b'\n', 0, cut) + ends
      del document[:cut]
  yield first, bytes(document)
