"""Token files, and the tokens of a run: text is tokenized once and cached."""

from collections.abc import Iterable
import contextlib
import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
import shutil
from typing import Any
import warnings

import jax
import numpy as np
import tokenizers
import tqdm

from examples.gpt2.config import Config, UsageError, digest
from examples.gpt2.data.atomic import new_folder
from examples.gpt2.data.documents import Corpus, load_corpus
from examples.gpt2.data.tokenizer import (
  TOKEN_DTYPE,
  encode,
  num_identifiers,
  read_tokenizer,
  train_tokenizer,
)
from examples.gpt2.devices.processes import any_failed, on_first

PARTS = ('train.bin', 'val.bin')  # To train on, and held out.
_TOKENIZER = 'tokenizer.json'
_STATISTICS = 'statistics.json'
_DOCUMENTS_AT_ONCE = 128
_TOKENS_AT_ONCE = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Tokens of a run, memory-mapped."""

  source: str  # Where they came from, for people.
  num_bytes: int  # Size of the text, or of the token files.
  sha256: str  # Hash of the text, or of the token files.
  train: np.ndarray  # uint16, shape (tokens,).
  validation: np.ndarray  # uint16, shape (tokens,).
  tokenizer: tokenizers.Tokenizer | None  # Of the text, where there is one.
  vocab_size: int  # Number that all token identifiers are below.
  # Of the frequencies of all tokens, nats a token: the loss of the best model
  # that ignores the context.
  unigram_entropy: float


def load_tokens(config: Config) -> Tokens:
  """Reads the tokens that the settings name, tokenizing text the first time.

  Token files are read in whole, to count and hash the tokens, only the first
  time too: ``--cache-dir`` keeps what was found until the files change. Of
  several processes, the first does this work for all that see its cache.

  Raises ``UsageError`` if the data is missing, empty, not text, too short for a
  sequence in one of its parts, or not the same in all processes.
  """
  if jax.process_count() == 1:
    return _load(config)
  expected = on_first(lambda: _load(config).sha256)
  tokens = _load(config)
  if any_failed(tokens.sha256 != expected):
    raise UsageError(
      f'--data {config.data} must be the same in all processes: its hash is '
      f'{tokens.sha256[:16]} here, {expected[:16]} in process 0.'
    )
  return tokens


def _load(config: Config) -> Tokens:
  folder = Path(config.data).expanduser()
  missing = [name for name in PARTS if not (folder / name).is_file()]
  if not missing:
    return _open_folder(folder, config)
  if len(missing) < len(PARTS):
    raise UsageError(
      f'--data {config.data} holds token files, but no {missing[0]}.'
    )
  corpus = load_corpus(config.data)
  key = digest(corpus.sha256, config.vocab_size, tokenizers.__version__)
  folder = config.cache_dir.expanduser() / key[:16]
  _fill_cache(folder, corpus, config)
  return dataclasses.replace(
    _open_folder(folder, config),
    source=corpus.source,
    num_bytes=corpus.num_bytes,
    sha256=corpus.sha256,
  )


def _open_folder(folder: Path, config: Config) -> Tokens:
  """Opens a folder with train.bin, val.bin and perhaps tokenizer.json."""
  vocab_size, tokenizer = config.vocab_size, None
  if (folder / _TOKENIZER).is_file():
    tokenizer = read_tokenizer(folder / _TOKENIZER)
    vocab_size = num_identifiers(tokenizer)
  train, validation = (map_tokens(folder / name) for name in PARTS)
  check_length('training', train, config.context_length)
  check_length('validation', validation, config.context_length)
  statistics = _cached_statistics(folder, config.cache_dir)
  if statistics['largest_token'] >= vocab_size:
    raise UsageError(
      f'--data {config.data} holds the token {statistics["largest_token"]}, '
      f'but its vocabulary has {vocab_size} tokens: give a larger --vocab-size.'
    )
  return Tokens(
    source=str(folder),
    num_bytes=train.nbytes + validation.nbytes,
    sha256=statistics['sha256'],
    train=train,
    validation=validation,
    tokenizer=tokenizer,
    vocab_size=vocab_size,
    unigram_entropy=statistics['unigram_entropy'],
  )


def map_tokens(path: Path) -> np.ndarray:
  """Maps a token file into memory: uint16, shape (tokens,)."""
  size = path.stat().st_size
  if not size or size % TOKEN_DTYPE.itemsize:
    raise UsageError(
      f'{path} has {size} bytes: expected uint16 tokens, an even number.'
    )
  return np.memmap(path, TOKEN_DTYPE, mode='r')


def check_length(part: str, tokens: np.ndarray, length: int) -> None:
  """Raises ``UsageError`` where tokens are too few for a sequence."""
  if len(tokens) <= length:
    raise UsageError(
      f'The {part} part of --data has {len(tokens)} tokens, too few for a '
      f'sequence of --context-length {length} and its last target: give more '
      'text or a shorter context.'
    )


def write_tokens(
  folder: Path,
  tokenizer: tokenizers.Tokenizer,
  documents: Iterable[tuple[str, str]],
) -> list[int]:
  """Writes train.bin, val.bin and tokenizer.json, in bounded memory.

  Documents are pairs of a part, out of ``PARTS``, and a text. Returns the
  number of documents in each part.
  """
  tokenizer.save(str(folder / _TOKENIZER))
  documents, counts = iter(documents), [0, 0]
  with contextlib.ExitStack() as stack:
    files = [stack.enter_context((folder / x).open('wb')) for x in PARTS]
    while group := list(itertools.islice(documents, _DOCUMENTS_AT_ONCE)):
      for i, file in enumerate(files):
        texts = [text for part, text in group if part == PARTS[i]]
        encode(tokenizer, texts).tofile(file)
        counts[i] += len(texts)
  return counts


def _fill_cache(folder: Path, corpus: Corpus, config: Config) -> None:
  """Tokenizes a corpus, all or nothing, unless the folder has its tokens."""
  if _is_whole(folder, config.cache_dir):
    return
  if folder.exists():
    warnings.warn(f'{folder} is damaged, and is made again.', stacklevel=2)
    shutil.rmtree(folder)
  documents = [(PARTS[0], text) for text in corpus.train]
  documents += [(PARTS[1], text) for text in corpus.validation]
  try:
    with new_folder(folder) as scratch:
      tokenizer = train_tokenizer(corpus.train, config.vocab_size)
      write_tokens(scratch, tokenizer, tqdm.tqdm(documents, 'tokenizing'))
      (scratch / _STATISTICS).write_text(json.dumps(_statistics(scratch)))
  except OSError:
    if not folder.is_dir():  # Another run may have been quicker.
      raise


def _is_whole(folder: Path, cache_dir: Path) -> bool:
  """Returns whether a cached folder holds what was written to it.

  An error of the disk is raised: it is no damage, and the cache is shared.
  """
  try:
    read_tokenizer(folder / _TOKENIZER)
    written = json.loads((folder / _STATISTICS).read_text())
    return written == _cached_statistics(folder, cache_dir)
  except (FileNotFoundError, ValueError):
    return False


def _cached_statistics(folder: Path, cache_dir: Path) -> dict[str, Any]:
  """Counts the tokens of a folder, once for the very same files.

  Files are the same where path, size and times of the last change are.
  """
  paths = [(folder / name).resolve() for name in PARTS]
  stats = [(str(path), path.stat()) for path in paths]
  key = digest([(p, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in stats])
  cache = cache_dir.expanduser() / 'statistics' / f'{key[:16]}.json'
  with contextlib.suppress(OSError, ValueError):
    return json.loads(cache.read_text())
  statistics = _statistics(folder)
  with contextlib.suppress(OSError):  # The next run then counts again.
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(statistics))
  return statistics


def _statistics(folder: Path) -> dict[str, Any]:
  """Reads all tokens of a folder: the largest, a hash, and their entropy."""
  counts = np.zeros(np.iinfo(TOKEN_DTYPE).max + 1, np.int64)
  sha256 = hashlib.sha256()
  for name in PARTS:
    tokens = map_tokens(folder / name)
    sha256.update(f'{len(tokens)} tokens'.encode())
    chunks = np.array_split(tokens, len(tokens) // _TOKENS_AT_ONCE + 1)
    for chunk in tqdm.tqdm(chunks, f'counting tokens of {name}', delay=2):
      sha256.update(chunk)
      counts += np.bincount(chunk, minlength=len(counts))
  probabilities = counts[counts > 0] / counts.sum()
  return {
    'largest_token': int(np.flatnonzero(counts)[-1]),
    'sha256': sha256.hexdigest(),
    'unigram_entropy': float(-np.sum(probabilities * np.log(probabilities))),
  }
