"""Plain text that a run is trained on directly: split, tokenized and cached."""

import bisect
import codecs
from collections.abc import Iterator, Sequence
import hashlib
import itertools
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

import tqdm

from examples.gpt2.config import UsageError
from examples.gpt2.data.files import COMPRESSED, find_files, kind
from examples.gpt2.data.token_files import PARTS, token_writer, write_index
from examples.gpt2.data.tokenizer import (
  END_OF_TEXT,
  encode,
  num_identifiers,
  train_tokenizer,
)
from examples.gpt2.storage import as_path, file_system, is_remote, new_folder

_VALIDATION_SHARE = 0.05
# So many slices of the text are held out, each of which is the end of a part of
# the same size. The end of the text alone may be an index or a license.
_SLICES = 10
_END_OF_DOCUMENT = re.compile(rf'^{re.escape(END_OF_TEXT)}\s*?\n', re.M)
_BLOCK = 1 << 15
_TO_NEXT_LINE = 1000
_INSIDE = bytes(range(0x80, 0xC0))  # Bytes within a character of UTF-8.


class Segment(NamedTuple):
  """Consecutive bytes of a file."""

  path: Path
  start: int
  stop: int


class Corpus(NamedTuple):
  """Text of a run, in files."""

  source: str  # Where it came from, for people.
  segments: dict[str, list[Segment]]  # By part.
  sha256: str  # Hash of the files and the split, hexadecimal.

  def num_bytes(self, *parts: str) -> int:
    """Returns the size of parts."""
    segments = [x for part in parts for x in self.segments[part]]
    return sum(x.stop - x.start for x in segments)

  def texts(self, part: str) -> Iterator[str]:
    """Yields the text of a part in pieces, and ``''`` after each segment.

    So after each file, where text was held out, and in place of a line
    ``<|endoftext|>``. Raises ``UsageError`` where a file is no UTF-8.
    """
    for segment in self.segments[part]:
      yield from _read(segment)
      yield ''


def load_corpus(data: Sequence[str], leave_out: Sequence[Path] = ()) -> Corpus:
  """Finds the files of a text, and splits it.

  Binary files are left out of folders. 5 % of the text are held out, whatever
  its files: ten slices of all files one after the other, evenly spread, which
  begin and end with a line if possible.

  Args:
    data: Files, folders, or ``'stdlib'``.
    leave_out: Folders that are not read.

  Raises:
    UsageError: If there is no text, or files that have to be prepared.
  """
  paths = find_files(data, leave_out)
  name = ' '.join(data)
  for path in paths:
    is_named = len(paths) == 1
    is_code = path.suffix == '.json' and not is_named
    is_packed = path.suffix.lower() in COMPRESSED
    if (kind(path) != 'text' and not is_code) or (is_packed and is_named):
      raise UsageError(
        f'{path} is no plain text: make token files of it by python -m '
        f'examples.gpt2.prepare --data {name} --out-dir tokens, and train with '
        '--data tokens.'
      )
  sizes = [file_system(path).info(os.fspath(path))['size'] for path in paths]
  if not sum(sizes):
    raise UsageError(f'{name} holds no text: expected UTF-8, not empty.')
  segments = _split(paths, sizes)
  return Corpus(
    source=f'{name} ({len(paths)} files)',
    segments=segments,
    sha256=_hash(paths, sizes),
  )


def _split(
  paths: Sequence[Path], sizes: Sequence[int]
) -> dict[str, list[Segment]]:
  period = sum(sizes) / _SLICES
  # The parts alternate at these places of all files one after the other.
  cuts = [
    round(period * (i + share))
    for i in range(_SLICES)
    for share in (1 - _VALIDATION_SHARE, 1)
  ]
  segments: dict[str, list[Segment]] = {part: [] for part in PARTS}
  offset = 0
  for path, size in zip(paths, sizes, strict=True):
    inside = [x for x in cuts if offset < x < offset + size]
    aligned = _aligned(path, [x - offset for x in inside]) if inside else []
    places = [0, *aligned, size]
    for place, (start, stop) in zip(
      [offset, *inside], itertools.pairwise(places), strict=True
    ):
      if start < stop:
        part = PARTS[bisect.bisect_right(cuts, place) % 2]
        segments[part].append(Segment(path, start, stop))
    offset += size
  return segments


def _aligned(path: Path, places: Sequence[int]) -> list[int]:
  """Moves places to the next line if one is near, else to a character."""
  found = []
  with path.open('rb') as file:
    for place in places:
      file.seek(place - 1)
      before, end, _ = file.read(_TO_NEXT_LINE).partition(b'\n')
      rest = before[1:]
      found.append(
        place + (len(before) if end else len(rest) - len(rest.lstrip(_INSIDE)))
      )
  return found


def _hash(paths: Sequence[Path], sizes: Sequence[int]) -> str:
  digest = hashlib.sha256(f'{_SLICES} {_VALIDATION_SHARE}'.encode())
  for path, size in zip(paths, sizes, strict=True):
    digest.update(f'{size} bytes'.encode())
    with path.open('rb') as file:
      digest.update(hashlib.file_digest(file, 'sha256').digest())
  return digest.hexdigest()


def _read(segment: Segment) -> Iterator[str]:
  """Yields text in pieces that end where a line does, if it is not too long."""
  path, start, stop = segment
  decoder = codecs.getincrementaldecoder('utf-8')()
  left, text = stop - start, ''
  with path.open('rb') as file:
    file.seek(start)
    while left:
      block = file.read(min(left, _BLOCK))
      if not block:
        raise OSError(f'{path} has become shorter while it was read.')
      left -= len(block)
      try:
        text += decoder.decode(block, final=not left)
      except UnicodeDecodeError as error:
        raise UsageError(
          f'{path} is no UTF-8 text within bytes {stop - left - len(block)} to '
          f'{stop - left}: {error}.'
        ) from error
      cut = text.rfind('\n') + 1 if left else 0
      piece, text = text[: cut or len(text)], text[cut or len(text) :]
      if file.tell() <= _BLOCK and not start:
        piece = piece.removeprefix('\ufeff')
      first, *others = _END_OF_DOCUMENT.split(piece)
      yield from filter(None, [first])
      for other in others:
        yield ''
        yield from filter(None, [other])


def fill_cache(folder: Path, corpus: Corpus, vocab_size: int) -> None:
  """Trains a tokenizer and writes token files, all or nothing.

  Raises ``UsageError`` if the folder cannot be written.
  """
  try:
    # In a store, another run may be writing its files, which are the same ones.
    with new_folder(folder, replace=is_remote(folder)) as scratch:
      size = corpus.num_bytes('train')
      tokenizer = train_tokenizer(
        _with_bar(corpus.texts('train'), 'training the tokenizer', size),
        vocab_size,
      )
      tokenizer.save(str(scratch / 'tokenizer.json'))
      shards: dict[str, list[dict[str, Any]]] = {part: [{}] for part in PARTS}
      for part in PARTS:
        bar = f'tokenizing for {part}', corpus.num_bytes(part)
        texts = _with_bar(corpus.texts(part), *bar)
        with token_writer(scratch / f'{part}.bin', shards[part][0]) as write:
          for tokens in encode(tokenizer, END_OF_TEXT, texts):
            write(tokens)
        if not shards[part][0]['tokens']:
          raise UsageError(
            f'{corpus.source} is too short to hold a part out: give more text.'
          )
      size = num_identifiers(tokenizer)
      write_index(scratch, shards, {'vocab_size': size})
  except OSError as error:
    # On a disk, another run may have been quicker.
    if is_remote(folder) or not folder.is_dir():
      raise UsageError(
        f'--cache-dir {folder.parent} cannot be used: {error}. Name another '
        'folder.'
      ) from error


def _with_bar(texts: Iterator[str], name: str, size: int) -> Iterator[str]:
  with tqdm.tqdm(None, name, size, unit='B', unit_scale=True, delay=1) as bar:
    for text in texts:
      bar.update(len(text))
      yield text


def cache_folder(cache_dir: Path) -> Path:
  """Returns the folder of ``--cache-dir``, ``UsageError`` without a home."""
  try:
    return as_path(cache_dir)
  except RuntimeError as error:
    raise UsageError(
      f'--cache-dir {cache_dir}: {error} Name another folder.'
    ) from error
