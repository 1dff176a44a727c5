"""Writes shards of tokens, and goes on where it was killed."""

from collections.abc import Mapping, Sequence
import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from examples.gpt2.config import UsageError, describe_changes
from examples.gpt2.data.counts import entropy
from examples.gpt2.data.shards import INDEX, PARTS, PROGRESS
from examples.gpt2.storage import make_folder, whole_file, write_whole

_LENGTHS = 'documents'


class Documents:
  """Tokens of documents, one after the other, and their lengths."""

  def __init__(self) -> None:
    self.tokens: list[np.ndarray] = []
    self.lengths: list[np.ndarray] = []

  def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Adds documents: their tokens, and the number of tokens of each."""
    self.tokens.append(tokens)
    self.lengths.append(lengths)

  @property
  def num_tokens(self) -> int:
    """Number of tokens."""
    return sum(map(len, self.tokens))

  @property
  def num_documents(self) -> int:
    """Number of documents."""
    return sum(map(len, self.lengths))


class ShardWriter:
  """Writes tokens to a folder, as shards with an index.

  The folder gets ``train-00000.bin`` and so on, tokens alone, and the same of
  ``val``; where a part fits into one shard, ``train.bin``. ``documents/`` has
  for each the number of tokens of each document, as ``.npy``. ``index.json``
  comes last: the type of the tokens and, by shard, their number and hash.

  Whenever a shard is full, what is not yet in one is saved beside it, with the
  place that the caller would go on from. As a context, it deletes what it wrote
  if it ends by an error before anything was saved.

  Attributes:
    place: JSON value that was given with the last documents, None at first.
  """

  def __init__(
    self,
    folder: Path,
    settings: Any,
    shard_tokens: int,
    others: Sequence[str] = (),
  ):
    """Begins, or goes on with what the same settings left in the folder.

    ``others`` are the names of files that the caller writes into it. Raises
    ``OSError`` where the folder holds something else, or cannot be written, and
    ``UsageError`` where other settings left something.
    """
    self.place: Any = None
    self._folder = folder
    self._settings = json.loads(json.dumps(settings))
    self._shard_tokens = shard_tokens
    self._others = [folder / name for name in others]
    self._shards: dict[str, list[dict[str, Any]]] = {x: [] for x in PARTS}
    self._waiting = {part: Documents() for part in PARTS}
    self._counts = np.zeros(0, np.int64)
    self._saves = 0
    if (folder / PROGRESS).is_file():
      self._restore()
    else:
      make_folder(folder)
      self._write_progress()

  def __enter__(self) -> 'ShardWriter':
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None and not self._saves:
      self.discard()

  def discard(self) -> None:
    """Deletes what has been written, and the folder if nothing is left."""
    names = [x['file'] for part in PARTS for x in self._shards[part]]
    paths = [self._folder / name for name in names]
    paths += [_lengths_file(path) for path in paths]
    paths += [*self._others, self._saved, self._folder / PROGRESS]
    for path in paths:
      path.unlink(missing_ok=True)
    for folder in (self._folder / _LENGTHS, self._folder):
      with contextlib.suppress(OSError):  # A store has no folders.
        folder.rmdir()

  def num_tokens(self, part: str) -> int:
    """Returns the number of tokens of a part so far."""
    written = sum(shard['tokens'] for shard in self._shards[part])
    return written + self._waiting[part].num_tokens

  def num_documents(self, part: str) -> int:
    """Returns the number of documents of a part so far."""
    written = sum(shard['documents'] for shard in self._shards[part])
    return written + self._waiting[part].num_documents

  def add(
    self, parts: Mapping[str, tuple[np.ndarray, np.ndarray]], place: Any
  ) -> None:
    """Adds documents: by part their tokens, and the number of tokens of each.

    A call with the next documents would follow, if ``place`` were its start.
    """
    self.place = place
    is_full = False
    for part, (tokens, lengths) in parts.items():
      self._waiting[part].add(tokens, lengths)
      self._counts = _add(self._counts, np.bincount(tokens))
      if self._waiting[part].num_tokens >= self._shard_tokens:
        self._write(part, f'{part}-{len(self._shards[part]):05}.bin')
        is_full = True
    if is_full:
      self._save()

  def finish(self, description: Mapping[str, Any]) -> None:
    """Writes what is left, and the index with entries of the caller."""
    for part in PARTS:
      number = len(self._shards[part])
      if self._waiting[part].num_tokens:
        name = f'{part}-{number:05}.bin' if number else f'{part}.bin'
        self._write(part, name)
    index = {
      **description,
      'unigram_entropy': entropy(self._counts),
      'largest_token': len(self._counts) - 1,
      'shards': self._shards,
    }
    write_whole(self._folder / INDEX, _json(index))
    # Without the saved tokens, a kill in between would leave a progress file
    # that needs them.
    for path in (self._folder / PROGRESS, self._saved):
      path.unlink(missing_ok=True)

  def _write(self, part: str, name: str) -> None:
    """Writes a shard, and the lengths of its documents."""
    documents, sha256 = self._waiting[part], hashlib.sha256()
    with (
      whole_file(self._folder / name) as scratch,
      scratch.open('wb') as file,
    ):
      for tokens in documents.tokens:
        file.write(tokens.tobytes())
        sha256.update(tokens)  # type: ignore[arg-type]
    lengths = _lengths_file(self._folder / name)
    make_folder(lengths.parent)
    with whole_file(lengths) as scratch, scratch.open('wb') as file:
      np.save(file, np.concatenate(documents.lengths))
    self._shards[part].append(
      {
        'file': name,
        'dtype': documents.tokens[0].dtype.name,
        'tokens': documents.num_tokens,
        'documents': documents.num_documents,
        'sha256': sha256.hexdigest(),
      }
    )
    self._waiting[part] = Documents()

  @property
  def _saved(self) -> Path:
    """File of the tokens that were saved and are in no shard."""
    return self._folder / f'progress-{self._saves}.npz'

  def _save(self) -> None:
    """Saves what is in no shard yet, then says so in one file."""
    before = self._saved
    self._saves += 1
    arrays: dict[str, Any] = {'counts': self._counts}
    for part, documents in self._waiting.items():
      if documents.tokens:
        arrays[f'{part}_tokens'] = np.concatenate(documents.tokens)
        arrays[f'{part}_lengths'] = np.concatenate(documents.lengths)
    content = io.BytesIO()
    np.savez(content, **arrays)
    write_whole(self._saved, content.getvalue())
    self._write_progress()
    before.unlink(missing_ok=True)

  def _write_progress(self) -> None:
    progress = {
      'settings': self._settings,
      'saves': self._saves,
      'place': self.place,
      'shards': self._shards,
    }
    write_whole(self._folder / PROGRESS, _json(progress))

  def _restore(self) -> None:
    progress = json.loads((self._folder / PROGRESS).read_text())
    changes = describe_changes(progress['settings'], self._settings)
    if changes:
      raise UsageError(
        f'{self._folder} holds a part of tokens of other settings or files '
        f'({changes}): choose another folder, or delete it.'
      )
    self._saves, self.place = progress['saves'], progress['place']
    self._shards = progress['shards']
    if not self._saves:
      return
    with self._saved.open('rb') as file, np.load(file) as arrays:
      self._counts = arrays['counts']
      for part, documents in self._waiting.items():
        if f'{part}_tokens' in arrays:
          documents.add(arrays[f'{part}_tokens'], arrays[f'{part}_lengths'])


def _lengths_file(shard: Path) -> Path:
  return shard.parent / _LENGTHS / f'{shard.stem}.npy'


def _json(value: Any) -> bytes:
  return json.dumps(value, indent=1).encode()


def _add(counts: np.ndarray, more: np.ndarray) -> np.ndarray:
  """Adds counts, of which one array may be shorter."""
  total = np.zeros(max(len(counts), len(more)), np.int64)
  total[: len(counts)] += counts
  total[: len(more)] += more
  return total
