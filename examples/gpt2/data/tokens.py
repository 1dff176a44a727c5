"""Tokens of a run, made once and cached."""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import shutil
import tempfile
import warnings

import numpy as np
import tokenizers
import tqdm

from examples.gpt2.config import Config, UsageError, digest
from examples.gpt2.data.corpus import Corpus, load_corpus
from examples.gpt2.data.tokenizer import (
  TOKEN_DTYPE,
  encode,
  new_folder,
  read_tokenizer,
  train_tokenizer,
)

_TOKENS_AT_ONCE = 1 << 24
_PARTS = ('train.bin', 'val.bin')
_HASH = 'tokens.sha256'
_CACHED = (*_PARTS, 'tokenizer.json', _HASH)


@dataclasses.dataclass(frozen=True)
class Survey:
  """What all tokens have to be read for.

  Attributes:
    largest_token: The largest identifier.
    sha256: Hash of the token files, hexadecimal.
    unigram_entropy: As in :class:`Tokens`.
  """

  largest_token: int
  sha256: str
  unigram_entropy: float


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Tokens of a run, memory-mapped.

  Attributes:
    source: Where they came from, for people.
    num_bytes: Size of the text in bytes, or of the token files.
    sha256: Hash of the text, or of the token files.
    train: Training tokens, uint16, shape (tokens,).
    validation: Validation tokens, uint16, shape (tokens,).
    tokenizer: Tokenizer of the text, where there is one.
    vocab_size: Number of token identifiers.
    unigram_entropy: Entropy of the frequencies of all tokens, nats a token: the
      loss of the best model that ignores the context.
  """

  source: str
  num_bytes: int
  sha256: str
  train: np.ndarray
  validation: np.ndarray
  tokenizer: tokenizers.Tokenizer | None
  vocab_size: int
  unigram_entropy: float


def load_tokens(config: Config) -> Tokens:
  """Reads the tokens that the settings name, tokenizing text the first time.

  Token files are read in whole, to count and hash the tokens, only the first
  time too: ``--cache-dir`` keeps what was found until the files change.

  Args:
    config: Resolved settings.

  Returns:
    The tokens, of which both parts hold at least one sequence.

  Raises:
    UsageError: If the data is missing, empty, not text, or too short.
  """
  folder = Path(config.data).expanduser()
  missing = [name for name in _PARTS if not (folder / name).is_file()]
  if not missing:
    return _open_tokens(folder, config, vocab_size=config.vocab_size)
  if len(missing) < len(_PARTS):
    raise UsageError(
      f'--data {config.data} holds token files, but no {missing[0]}.'
    )
  corpus = load_corpus(config.data)
  _check_can_be_long_enough(corpus, config.context_length)
  cache = config.cache_dir.expanduser() / _cache_key(corpus, config.vocab_size)
  if not all((cache / name).is_file() for name in _CACHED):
    shutil.rmtree(cache, ignore_errors=True)
    _fill_cache(cache, corpus, config.vocab_size)
  tokens = _open_tokens(cache, config)
  if tokens.sha256 != (cache / _HASH).read_text():
    warnings.warn(f'{cache} is damaged, and made anew.', stacklevel=2)
    shutil.rmtree(cache)
    _fill_cache(cache, corpus, config.vocab_size)
    tokens = _open_tokens(cache, config)
  return dataclasses.replace(
    tokens,
    source=corpus.source,
    num_bytes=corpus.num_bytes,
    sha256=corpus.sha256,
  )


def _cache_key(corpus: Corpus, vocab_size: int) -> str:
  return digest(corpus.sha256, vocab_size, tokenizers.__version__)[:16]


def _fill_cache(cache: Path, corpus: Corpus, vocab_size: int) -> None:
  """Writes tokenizer and tokens of a corpus to a new folder, all or nothing."""
  try:
    with new_folder(cache) as folder:
      tokenizer = train_tokenizer(corpus.train, vocab_size)
      tokenizer.save(str(folder / 'tokenizer.json'))
      for part, documents in _by_part(corpus).items():
        with (folder / part).open('wb') as file:
          for document in tqdm.tqdm(documents, f'tokenizing for {part}'):
            encode(tokenizer, [document]).tofile(file)
      parts = [np.fromfile(folder / part, TOKEN_DTYPE) for part in _PARTS]
      (folder / _HASH).write_text(_hash(parts))
  except OSError:
    if not cache.is_dir():  # Another run may have been quicker.
      raise


def _by_part(corpus: Corpus) -> dict[str, list[str]]:
  return dict(zip(_PARTS, (corpus.train, corpus.validation), strict=True))


def _open_tokens(
  folder: Path, config: Config, vocab_size: int | None = None
) -> Tokens:
  """Opens a folder with train.bin, val.bin and perhaps tokenizer.json."""
  tokenizer_file = folder / 'tokenizer.json'
  tokenizer = None
  if tokenizer_file.is_file():
    tokenizer = read_tokenizer(tokenizer_file)
    vocab_size = tokenizer.get_vocab_size()
  parts = [folder / name for name in _PARTS]
  train, validation = map(map_tokens, parts)
  for path, part in zip(parts, (train, validation), strict=True):
    size = len(part)
    _check_length(path.name, str(size), size, config.context_length)
  survey = _cached_survey(parts, [train, validation], config.cache_dir)
  if survey.largest_token >= vocab_size:
    raise UsageError(
      f'--data {config.data} holds the token {survey.largest_token}, but '
      f'its vocabulary has {vocab_size} tokens: give a larger --vocab-size.'
    )
  return Tokens(
    source=str(folder),
    num_bytes=sum(path.stat().st_size for path in parts),
    sha256=survey.sha256,
    train=train,
    validation=validation,
    tokenizer=tokenizer,
    vocab_size=vocab_size,
    unigram_entropy=survey.unigram_entropy,
  )


def map_tokens(path: Path) -> np.ndarray:
  """Maps a file of uint16 tokens."""
  size = path.stat().st_size
  if size % TOKEN_DTYPE.itemsize or not size:
    raise UsageError(
      f'{path} has {size} bytes: expected uint16 tokens, an even number.'
    )
  return np.memmap(path, TOKEN_DTYPE, mode='r')


def _check_can_be_long_enough(corpus: Corpus, context_length: int) -> None:
  """Refuses, before the work, text that has fewer bytes than are tokens needed.

  A token is a byte or more, and an end-of-text token follows each document.
  """
  for part, documents in _by_part(corpus).items():
    most = sum(len(text.encode()) + 1 for text in documents)
    _check_length(part, f'at most {most}', most, context_length)


def _check_length(
  part: str, said: str, num_tokens: int, context_length: int
) -> None:
  """Raises ``UsageError`` unless a part can hold a sequence."""
  if num_tokens <= context_length:
    name = 'validation' if part == 'val.bin' else 'training'
    raise UsageError(
      f'The {name} part of --data has {said} tokens, too few for a '
      f'sequence of --context-length {context_length} and its last target: '
      'give more text or a shorter context.'
    )


def _cached_survey(
  paths: list[Path], parts: list[np.ndarray], cache_dir: Path
) -> Survey:
  """Surveys token files, or reads what was found in the very same files.

  Files are the same where path, size and times of the last change are.
  """
  stats = [(str(p.resolve()), p.stat()) for p in paths]
  key = digest([(p, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in stats])
  cache = cache_dir.expanduser() / 'surveys' / f'{key[:16]}.json'
  survey = _read_survey(cache)
  if survey is None:
    survey = _survey(parts)
    with contextlib.suppress(OSError):  # The next run then counts again.
      _write_survey(cache, survey)
  return survey


def _read_survey(cache: Path) -> Survey | None:
  """Returns the survey in a file, None if there is none or it is damaged."""
  try:
    survey = Survey(**json.loads(cache.read_text()))
  except (OSError, ValueError, TypeError):
    return None
  kinds = [field.type for field in dataclasses.fields(Survey)]
  fits = map(isinstance, dataclasses.astuple(survey), kinds)
  return survey if all(fits) else None


def _write_survey(cache: Path, survey: Survey) -> None:
  """Writes a file that is whole or not there."""
  cache.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.NamedTemporaryFile('w', dir=cache.parent, delete=False) as file:
    json.dump(dataclasses.asdict(survey), file)
  os.replace(file.name, cache)


def _survey(parts: list[np.ndarray]) -> Survey:
  """Reads all tokens once."""
  counts = np.zeros(np.iinfo(TOKEN_DTYPE).max + 1, np.int64)
  total = sum(map(len, parts))
  with tqdm.tqdm(total=total, desc='counting tokens', delay=2) as progress:
    for part in parts:
      for start in range(0, len(part), _TOKENS_AT_ONCE):
        chunk = part[start : start + _TOKENS_AT_ONCE]
        counts += np.bincount(chunk, minlength=len(counts))
        progress.update(len(chunk))
  return Survey(
    largest_token=int(np.flatnonzero(counts)[-1]),
    sha256=_hash(parts),
    unigram_entropy=_entropy(counts),
  )


def _hash(parts: list[np.ndarray]) -> str:
  sha256 = hashlib.sha256()
  for part in parts:
    sha256.update(f'{len(part)} tokens'.encode())
    for start in range(0, len(part), _TOKENS_AT_ONCE):
      sha256.update(part[start : start + _TOKENS_AT_ONCE])
  return sha256.hexdigest()


def _entropy(frequencies: np.ndarray) -> float:
  """Returns the entropy of a distribution given by counts, in nats."""
  probabilities = frequencies[frequencies > 0] / frequencies.sum()
  return float(-np.sum(probabilities * np.log(probabilities)))
