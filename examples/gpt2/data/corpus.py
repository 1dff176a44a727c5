"""Text that a run is trained on directly: read into memory, and split."""

import hashlib
from pathlib import Path
import sysconfig
from typing import NamedTuple

from examples.gpt2.config import UsageError
from examples.gpt2.data import files
from examples.gpt2.data.documents import DocumentReader
from examples.gpt2.storage import as_path

_VALIDATION_SHARE = 0.05
# With fewer documents than this, a split by document would be too coarse.
_DOCUMENTS_FOR_SPLIT = 40
_NOT_STDLIB = {
  'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test',
}  # fmt: skip


class Corpus(NamedTuple):
  """Text of a run, in memory."""

  source: str  # Where it came from, for people.
  train: list[str]  # Documents to train on.
  validation: list[str]  # Documents held out.
  num_bytes: int  # Size of all documents in UTF-8.
  sha256: str  # Hash of all documents and of the split, hexadecimal.


def load_corpus(data: str, text_field: str = 'text') -> Corpus:
  """Reads the documents of files, and splits them.

  The data is ``'stdlib'``, a file, or a folder, which is read with its
  subfolders, as :class:`DocumentReader` reads them; but each text file is one
  document, and what cannot be read is left out. Of many documents about every
  twentieth, chosen by a hash of its name, is held out; of few, the last
  twentieth of their text. Raises ``UsageError`` if there is no such path, or no
  text in it.
  """
  if data == 'stdlib':
    root = Path(sysconfig.get_path('stdlib'))
    paths = [
      path
      for path in files.find_files(root, '*.py')
      if not _NOT_STDLIB & set(path.relative_to(root).parts)
    ]
  else:
    root = as_path(data)
    paths = files.find_files(root)
  if not paths:
    raise UsageError(f'{data} is a folder without files.')
  reader = DocumentReader(paths, text_field, skip_bad=True, is_cut=False)
  documents, read = {}, set()
  for text in filter(str.strip, reader.read(None)):
    number, of_file = reader.position
    name = paths[number].relative_to(root).as_posix()
    documents[f'{name}:{of_file}' if of_file > 1 else name] = text
    read.add(number)
  if not documents:
    raise UsageError(
      f'{data} holds no text: expected a file or a folder of '
      f'{files.ACCEPTED}, not empty.{reader.describe_left_out()}'
    )
  train, validation = _split(documents)
  return Corpus(
    source=f'{data} ({len(read)} of {len(paths)} files)'
    + reader.describe_left_out(),
    train=train,
    validation=validation,
    num_bytes=sum(len(text.encode()) for text in documents.values()),
    sha256=_hash(train, validation),
  )


def _split(documents: dict[str, str]) -> tuple[list[str], list[str]]:
  """Splits documents, by their names, into training and validation."""
  if len(documents) < _DOCUMENTS_FOR_SPLIT:
    text = '\n'.join(documents.values())
    cut = round(len(text) * (1 - _VALIDATION_SHARE))
    return [text[:cut]], [text[cut:]]
  order = sorted(documents, key=lambda name: _hash([name]))
  wanted = _VALIDATION_SHARE * sum(map(len, documents.values()))
  validation: list[str] = []
  while wanted > 0:
    validation.append(documents[order.pop()])
    wanted -= len(validation[-1])
  return [documents[name] for name in order], validation


def _hash(*groups: list[str]) -> str:
  digest = hashlib.sha256()
  for group in groups:
    digest.update(f'{len(group)} documents'.encode())
    for text in group:
      content = text.encode()
      digest.update(f'{len(content)} bytes'.encode() + content)
  return digest.hexdigest()
