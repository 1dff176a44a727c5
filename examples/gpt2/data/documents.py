"""Documents of JSON lines, Parquet and text, by Hugging Face Datasets."""

from collections.abc import Iterator, Sequence
import contextlib
import glob
import os
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow.parquet
import zstandard

from examples.gpt2.config import UsageError
from examples.gpt2.data.files import kind
from examples.gpt2.data.tokenizer import END_OF_TEXT
from examples.gpt2.storage import file_system

# Longer ones are cut there, at the end of a line if possible.
_LONGEST_DOCUMENT = 1 << 20
_TEXT = datasets.Features({'text': datasets.Value('string')})
_ACCEPTED = 'string', 'large_string'


def _unpack(file: Any, mode: str) -> Any:
  # By default, fsspec reads the first frame alone.
  return zstandard.ZstdDecompressor().stream_reader(
    file, read_across_frames=True
  )


fsspec.compression.register_compression('zstd', _unpack, 'zst', force=True)


def load_documents(
  paths: Sequence[Path], text_field: str, cache_dir: Path
) -> datasets.Dataset:
  """Reads files of documents, perhaps compressed, on disks or in stores.

  Args:
    paths: JSON lines, Parquet, or text. A text is a document, or more than one
      with lines ``<|endoftext|>`` between them; one of more than a million
      characters is cut.
    text_field: Field that holds the text in JSON, column in Parquet.
    cache_dir: Folder on a disk, where the documents are kept as Arrow files.

  Returns:
    Documents in the only column ``text``, which may be None or empty.

  Raises:
    UsageError: If a file is damaged, or has no such text.
  """
  texts = [path for path in paths if kind(path) == 'text']
  tables = [
    _load_table(path, text_field, cache_dir)
    for path in paths
    if kind(path) != 'text'
  ]
  if texts:
    names = [os.fspath(path) for path in texts]
    versions = [file_system(x).ukey(os.fspath(x)) for x in texts]
    arguments = {'paths': names, 'versions': versions}
    with _errors('--data'):
      tables.append(
        datasets.Dataset.from_generator(
          _read_texts, _TEXT, os.fspath(cache_dir), gen_kwargs=arguments
        )
      )
  return datasets.concatenate_datasets(tables)


def _load_table(
  path: Path, text_field: str, cache_dir: Path
) -> datasets.Dataset:
  name, builder = os.fspath(path), kind(path)
  settings = {}
  with _errors(name):
    if builder == 'parquet' and path.suffix.lower() == '.parquet':
      with path.open('rb') as file:
        schema = pyarrow.parquet.read_schema(file)
      _check(name, text_field, datasets.Features.from_arrow_schema(schema))
      settings = {'columns': [text_field]}
    table = datasets.load_dataset(
      builder,
      data_files=[glob.escape(name)],  # The library looks for a pattern.
      split='train',
      cache_dir=os.fspath(cache_dir),
      **settings,
    )
  _check(name, text_field, table.features)
  table = table.select_columns(text_field)
  if text_field != 'text':
    table = table.rename_column(text_field, 'text')
  return table if table.features == _TEXT else table.cast(_TEXT)


def _check(name: str, text_field: str, found: datasets.Features) -> None:
  """Raises ``UsageError`` where a file has no text in a column."""
  dtype = getattr(found.get(text_field), 'dtype', None)
  if dtype in _ACCEPTED:
    return
  texts = [x for x, y in found.items() if getattr(y, 'dtype', '') in _ACCEPTED]
  what = (
    f'of type {dtype or found[text_field]}'
    if text_field in found
    else 'missing'
  )
  raise UsageError(
    f'{name}: the column {text_field!r} is {what}, expected text (of type '
    + ' or '.join(_ACCEPTED)
    + '). '
    + (
      f'--text-field may name another: {", ".join(texts)}.'
      if texts
      else 'No other column holds text.'
    )
  )


@contextlib.contextmanager
def _errors(name: str) -> Iterator[None]:
  """Has a ``UsageError`` name a file that is damaged or of another format.

  Errors of a disk or a store stay what they are.
  """
  datasets.disable_progress_bars()  # Each file would have some.
  try:
    yield
  except Exception as caught:
    error: BaseException = caught
    if isinstance(caught, datasets.exceptions.DatasetGenerationError):
      error = caught.__cause__ or caught
    if isinstance(error, UsageError):
      raise error from caught
    if isinstance(error, datasets.table.CastError):
      raise UsageError(
        f'{name}: later rows have other fields than those in the first 10 MB '
        f'({str(error)[:300]}): write the text alone to another file.'
      ) from error
    if isinstance(error, OSError) and error.errno is not None:
      raise error from caught
    raise UsageError(f'{name} cannot be read: {error}') from error
  finally:
    datasets.enable_progress_bars()


def _read_texts(
  paths: Sequence[str], versions: Sequence[str]
) -> Iterator[dict[str, str]]:
  """Yields the documents of text files."""
  del versions  # Make the library tell changed files apart.
  for path in paths:
    with fsspec.open(
      path, 'rt', compression='infer', encoding='utf-8', newline=''
    ) as file:
      try:
        for document in _documents(file):
          yield {'text': document}
      except UnicodeDecodeError as error:
        raise UsageError(f'{path} is no UTF-8 text: {error}.') from error


def _documents(file: Any) -> Iterator[str]:
  lines: list[str] = []
  size = 0
  while line := file.readline(_LONGEST_DOCUMENT):
    is_end = line.strip() == END_OF_TEXT
    if not is_end:
      lines.append(line)
      size += len(line)
    if is_end or size >= _LONGEST_DOCUMENT:
      yield ''.join(lines)
      lines, size = [], 0
  yield ''.join(lines)
