"""Finds the text of a run, which fits in memory, and splits it."""

import dataclasses
import hashlib
from pathlib import Path
import sysconfig

from examples.gpt2.config import UsageError

END_OF_TEXT = '<|endoftext|>'
"""Token that follows each document."""

_VALIDATION_SHARE = 0.05
# With fewer files than this, a split by file would be too coarse.
_FILES_FOR_SPLIT = 40
_SKIPPED_FOLDERS = {
    'site-packages', 'dist-packages', '__pycache__', 'test', 'tests',
    'idle_test',
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Text to train on.

  Attributes:
    source: Where it came from, for people.
    train: Documents to train on.
    validation: Documents held out.
    num_bytes: Size of all documents in UTF-8, bytes.
    sha256: Hash of all documents and of the split, hexadecimal.
  """

  source: str
  train: list[str]
  validation: list[str]
  num_bytes: int
  sha256: str


def load_corpus(data: str) -> Corpus:
  """Reads a corpus.

  Args:
    data: ``'stdlib'``, a text file, or a folder of text files, which is read
      with all its subfolders; files that are not UTF-8 text are left out.

  Returns:
    The corpus. Of many files, about every twentieth, chosen by a hash of its
    name, is held out; of few, the last twentieth of their text.

  Raises:
    UsageError: If there is no such path, or no text in it.
  """
  root, paths = _find_files(data)
  documents = {}
  for path in paths:
    text = _read_text(path)
    if text is not None and text.strip():
      documents[path.relative_to(root).as_posix()] = text
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


def _find_files(data: str) -> tuple[Path, list[Path]]:
  """Returns the root of a corpus and its files in order."""
  if data == 'stdlib':
    root = Path(sysconfig.get_path('stdlib'))
    return root, [
      path
      for path in sorted(root.rglob('*.py'))
      if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    ]
  root = Path(data).expanduser()
  if not data:
    raise UsageError('--data must not be empty.')
  if root.is_file():
    return root.parent, [root]
  if not root.is_dir():
    raise UsageError(
      f'--data {data} does not exist: expected "stdlib", a text file, a '
      'folder of text files, or a folder with train.bin and val.bin.'
    )
  return root, [path for path in sorted(root.rglob('*')) if path.is_file()]


def _read_text(path: Path) -> str | None:
  """Returns the text of a file, or ``None`` where it is not UTF-8 text."""
  content = path.read_bytes()
  if b'\0' in content:
    return None
  try:
    return content.decode()
  except UnicodeDecodeError:
    return None


def _split(documents: dict[str, str]) -> tuple[list[str], list[str]]:
  """Splits documents, by their names, into training and validation."""
  if len(documents) < _FILES_FOR_SPLIT:
    text = '\n'.join(documents.values())
    cut = round(len(text) * (1 - _VALIDATION_SHARE))
    return [text[:cut]], [text[cut:]]
  order = sorted(documents, key=lambda name: _hash([name]))
  wanted = _VALIDATION_SHARE * sum(len(text) for text in documents.values())
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
