"""Files of documents: which there are, and what is in them."""

from collections.abc import Callable, Iterator, Sequence
import io
import json
import os
from pathlib import Path, PurePath
import sysconfig
from typing import Any, NamedTuple

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet
import zstandard

from examples.gpt2.command import UsageError
from examples.gpt2.storage import (
  as_path,
  file_system,
  is_remote,
  resolved,
  size,
)
from examples.gpt2.tokenizer import END_OF_TEXT

_JSON = {'.jsonl', '.ndjson', '.jsonlines', '.json'}
_COMPRESSED = {'.gz', '.zst', '.bz2', '.xz'}
_HEAD = 1 << 16  # Bytes that tell what a file is.
_NOT_STDLIB = {
  'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test',
}  # fmt: skip
# Files beside the documents of a data set.
_BESIDE = {
  'readme.md', 'license', 'license.md', 'license.txt', 'dataset_info.json',
  'dataset_infos.json',
}  # fmt: skip
# Longer texts are cut there, at the end of a line if possible.
_LONGEST_DOCUMENT = 1 << 20
_BYTES_OF_A_PROCESS = 1 << 27
_TEXT_TYPES = {'string', 'large_string', 'string_view'}  # Of Arrow.
_COLUMNS = datasets.Features(
  {'text': datasets.Value('string'), 'fault': datasets.Value('string')}
)


def _unpack(file: Any, mode: str) -> Any:
  # By default, fsspec reads the first frame alone.
  return zstandard.ZstdDecompressor().stream_reader(
    file, read_across_frames=True
  )


fsspec.compression.register_compression('zstd', _unpack, 'zst', force=True)


class Files(NamedTuple):
  """Files of documents."""

  # 'text', 'JSON lines', 'JSON array' or 'Parquet' by path, in order.
  kinds: dict[Path, str]
  left_out: dict[str, list[str]]  # Names of files by the reason.


def describe(files: Files) -> dict[str, str]:
  """Returns what was found and what was left out, for people."""
  kinds = [*files.kinds.values()]
  counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
  found = {'read': ', '.join(f'{x:,} of {k}' for k, x in counts.items())}
  return found | (
    {'left out': _count(files.left_out)} if files.left_out else {}
  )


def _count(names: dict[str, list[str]]) -> str:
  return '; '.join(f'{len(x):,} {k} ({some_of(x)})' for k, x in names.items())


def some_of(names: Sequence[str]) -> str:
  """Returns the first of some names."""
  return ', '.join(names[:3]) + ', ...' * (len(names) > 3)


def load_documents(
  files: Files,
  text_field: str,
  cache_dir: Path,
  num_proc: int = 1,
  skip_bad: bool = False,
) -> tuple[datasets.Dataset, list[str]]:
  """Reads files of documents, perhaps compressed, on disks or in stores.

  Args:
    files: JSON, Parquet, or text. A text is a document, or more than one with
      lines ``<|endoftext|>`` between them; one of more than a million
      characters is cut. Its byte order mark is left out, CRLF stays.
    text_field: Field that holds the text in JSON, column in Parquet.
    cache_dir: Folder on a disk, where the documents are kept as Arrow files.
    num_proc: Processes that read files on a disk.
    skip_bad: Leave out what cannot be read.

  Returns:
    Documents in the only column ``text``, which may be None or empty, and what
    was left out.

  Raises:
    UsageError: If a file is damaged, or has no such text.
  """
  known = [
    # Time and size have the cache tell changed files apart.
    (os.fspath(path), kind, str(file_system(path).modified(os.fspath(path))))
    for path, kind in files.kinds.items()
  ]
  processes = min(
    num_proc, len(known), sum(map(size, files.kinds)) // _BYTES_OF_A_PROCESS
  )
  is_parallel = processes > 1 and not any(map(is_remote, files.kinds))
  try:
    found = datasets.Dataset.from_generator(
      _read, _COLUMNS, os.fspath(cache_dir),
      gen_kwargs={'files': known, 'field': text_field, 'skip_bad': skip_bad},
      num_proc=processes if is_parallel else None,
    )  # fmt: skip
  except datasets.exceptions.DatasetGenerationError as error:
    raise (error.__cause__ or error) from None
  skipped = found.data['fault'].drop_null().to_pylist()
  return found.select_columns('text'), skipped


def _read(
  files: Sequence[tuple[str, str, str]], field: str, skip_bad: bool
) -> Iterator[dict[str, str | None]]:
  """Yields the documents of files, and what is wrong with those that are bad.

  Raises ``UsageError`` for the latter if they are not to be skipped.
  """
  for path, kind, _ in files:
    for found in _or_bad(_READERS[kind](path, field)):
      fault = None
      if isinstance(found, _Bad):
        fault = f'{path}{found.place} cannot be read: {found.reason}'
        if not skip_bad:
          raise UsageError(f'{fault} (--skip-bad leaves it out)')
      yield {'text': None if fault else found, 'fault': fault}


class _Bad(NamedTuple):
  """What cannot be read of a file."""

  place: str
  reason: str


def _or_bad(found: Iterator[Any]) -> Iterator[Any]:
  """Yields what a reader does, and what ends it instead of the end."""
  try:
    yield from found
  except Exception as error:  # Of Arrow and of what unpacks.
    yield _Bad('', str(error) or type(error).__name__)


def _read_text(path: str, field: str) -> Iterator[str]:
  """Yields the documents of a text."""
  del field  # Of JSON and Parquet.
  lines: list[str] = []
  length = 0
  with fsspec.open(
    path, 'rt', compression='infer', encoding='utf-8-sig', newline=''
  ) as file:
    while line := file.readline(_LONGEST_DOCUMENT):
      is_end = line.strip() == END_OF_TEXT
      if not is_end:
        lines.append(line)
        length += len(line)
      if is_end or length >= _LONGEST_DOCUMENT:
        yield ''.join(lines)
        lines, length = [], 0
    yield ''.join(lines)


def _read_lines(path: str, field: str) -> Iterator[Any]:
  with fsspec.open(path, compression='infer') as file:
    for number, line in enumerate(io.BufferedReader(file), 1):
      try:
        yield _text_of(json.loads(line.strip() or b'null'), field)
      except ValueError as error:
        yield _Bad(f', line {number}', str(error))


def _read_array(path: str, field: str) -> Iterator[Any]:
  with fsspec.open(path, compression='infer') as file:
    items = json.loads(file.read())
  for number, item in enumerate(items, 1):
    try:
      yield _text_of(item, field)
    except ValueError as error:
      yield _Bad(f', item {number}', str(error))


def _text_of(value: Any, field: str) -> str | None:
  """Returns the text of a JSON value; None stands for no text."""
  if isinstance(value, dict):
    known = ', '.join(value)
    for key in [field] if field in value else field.split('.'):
      if not isinstance(value, dict) or key not in value:
        raise ValueError(f'it has no {field!r}: --text-field may be {known}')
      value = value[key]
  if value is not None and not isinstance(value, str):
    raise ValueError(f'{field!r} is {type(value).__name__}, and no text')
  (value or '').encode()  # Half of a pair of surrogates is an error.
  return value


def _read_column(path: str, field: str) -> Iterator[str | None]:
  with fsspec.open(path) as file:
    parquet = pyarrow.parquet.ParquetFile(file)
    types = {
      x.name: x.type.value_type if pa.types.is_dictionary(x.type) else x.type
      for x in parquet.schema_arrow
    }
    texts = [k for k, x in types.items() if str(x) in _TEXT_TYPES]
    if field not in texts:
      found = f'is of {types[field]}' if field in types else 'is not there'
      raise ValueError(
        f'the column {field!r} {found}: expected --text-field out of '
        f'{", ".join(texts) or "others, but no column is text"}'
      )
    for batch in parquet.iter_batches(1000, columns=[field]):
      yield from batch.column(0).to_pylist()


_READERS: dict[str, Callable[[str, str], Iterator[Any]]] = {
  'text': _read_text,
  'JSON lines': _read_lines,
  'JSON array': _read_array,
  'Parquet': _read_column,
}


# Files.


def find_files(
  data: Sequence[str | Path], leave_out: Sequence[Path] = ()
) -> Files:
  """Finds files, and those of folders with subfolders, each once, in order.

  Of folders it leaves out hidden files, folders of runs, and those of
  ``leave_out``; and, which it tells, binary and empty files, and what describes
  a data set. ``'stdlib'`` is the source of Python's standard library.

  Raises ``UsageError`` if a path does not exist, or there are no files.
  """
  found: dict[Path, tuple[Path, str]] = {}
  left_out: dict[str, list[str]] = {}
  others = [*map(resolved, leave_out)]
  for name in map(str, data):
    is_stdlib = name == 'stdlib'
    root = Path(sysconfig.get_path('stdlib')) if is_stdlib else as_path(name)
    if not root.exists():
      raise UsageError(
        f'{name} does not exist: expected a file or a folder of files.'
      )
    if root.is_file():
      kinds = {root: _kind(root)}
      if kinds[root] not in _READERS:
        raise UsageError(f'{root} holds no UTF-8 text: it is {kinds[root]}.')
    else:
      paths = sorted(_in_folder(root, is_stdlib))
      kept = [x for x in paths if not _is_within(x, others)]
      kinds = _of_data_set({path: _kind(path) for path in kept})
    for path, kind in kinds.items():
      if kind in _READERS:
        found.setdefault(resolved(path), (path, kind))
      else:
        left_out.setdefault(kind, []).append(path.name)
  if not found:
    names = ' '.join(map(str, data))
    but = f' of text, but {_count(left_out)}' if left_out else ''
    raise UsageError(f'{names} has no files{but}.')
  return Files(dict(found.values()), left_out)


def _is_within(path: Path, folders: Sequence[Path]) -> bool:
  whole = resolved(path)
  return any(whole.is_relative_to(x) for x in folders)


def _in_folder(root: Path, is_stdlib: bool) -> Iterator[Path]:
  """Yields the files of a folder, and of the folders in it."""
  if is_remote(root):
    # One request for a thousand files, where a walk would ask for each folder.
    top = os.fspath(root).partition('://')[2].rstrip('/') + '/'
    for name in file_system(root).find(top):
      parts = PurePath(name.removeprefix(top)).parts
      if parts and not any(x.startswith('.') for x in parts):
        yield root.joinpath(*parts)
    return
  known = set()
  for folder, folders, files in os.walk(root, followlinks=True):
    is_run = 'model.json' in files and folder != os.fspath(root)
    if is_run or (real := os.path.realpath(folder)) in known:
      folders.clear()
      continue
    known.add(real)
    folders[:] = [
      x for x in folders if x[0] != '.' and not (is_stdlib and x in _NOT_STDLIB)
    ]
    for name in files:
      if name[0] != '.' and (not is_stdlib or name.endswith('.py')):
        yield Path(folder, name)


def _kind(path: Path) -> str:
  """Returns what a file holds: one of ``_READERS``, or what it is instead."""
  name = PurePath(path.name.lower())
  suffix = PurePath(name.stem if name.suffix in _COMPRESSED else name).suffix
  if suffix == '.parquet':
    return 'Parquet'
  try:
    with fsspec.open(os.fspath(path), compression='infer') as file:
      head = file.read(_HEAD)
  except (OSError, EOFError, ValueError):
    head = b' '  # It is damaged, which is found where it is read.
  if not head:
    return 'empty'
  if head[:2] in (b'\xff\xfe', b'\xfe\xff'):
    return 'UTF-16'
  if b'\0' in head:
    return 'binary'
  if suffix not in _JSON:
    return 'text'
  is_array = head.removeprefix(b'\xef\xbb\xbf').lstrip()[:1] == b'['
  return 'JSON array' if is_array else 'JSON lines'


def _of_data_set(kinds: dict[Path, str]) -> dict[Path, str]:
  """Tells a folder of documents from one of text, with JSON files of its own.

  Of the former, files that describe it are left out.
  """
  documents = {k: x for k, x in kinds.items() if k.name.lower() not in _BESIDE}
  if 'text' in documents.values():
    return {
      path: 'text' if path.suffix == '.json' and kind in _READERS else kind
      for path, kind in kinds.items()
    }
  if not _READERS.keys() & {*documents.values()}:
    return kinds
  beside = kinds.keys() - documents.keys()
  return kinds | dict.fromkeys(beside, 'about the data set')
