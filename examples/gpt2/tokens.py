"""Tokens of a run: tokenizer, cache, batches."""

from collections.abc import Iterator
import dataclasses
import hashlib
import os
from pathlib import Path
import shutil
import tempfile

import numpy as np
import tokenizers
import tqdm

from examples.gpt2.config import Config, UsageError, digest
from examples.gpt2.corpus import Corpus, load_corpus

_END_OF_TEXT = '<|endoftext|>'
_TOKEN_DTYPE = np.dtype(np.uint16)
_CHARACTERS_AT_ONCE = 1 << 17
_TOKENS_AT_ONCE = 1 << 24
_PARTS = ('train.bin', 'val.bin')
_CACHED = (*_PARTS, 'tokenizer.json')


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
  cache = config.cache_dir.expanduser() / _cache_key(corpus, config.vocab_size)
  if not all((cache / name).is_file() for name in _CACHED):
    shutil.rmtree(cache, ignore_errors=True)
    _fill_cache(cache, corpus, config.vocab_size)
  return dataclasses.replace(
    _open_tokens(cache, config),
    source=corpus.source,
    num_bytes=corpus.num_bytes,
    sha256=corpus.sha256,
  )


def training_batch(tokens: np.ndarray, config: Config, step: int) -> np.ndarray:
  """Returns the sequences of a step, a pure function of seed and step.

  Args:
    tokens: Tokens to draw from, shape (tokens,).
    config: Resolved settings.
    step: Number of the step.

  Returns:
    Random windows, int32, shape (batch size, context length + 1): inputs and,
    one further, targets.
  """
  generator = np.random.default_rng((config.seed, step))
  starts = generator.integers(
    len(tokens) - config.context_length, size=config.batch_size
  )
  return windows(tokens, starts, config.context_length)


def validation_sequences(tokens: np.ndarray, config: Config) -> np.ndarray:
  """Returns the sequences of an evaluation, the same at every step.

  Args:
    tokens: Tokens to take from, shape (tokens,).
    config: Resolved settings.

  Returns:
    Windows spread evenly and without overlap, int32, shape (sequences, context
    length + 1).
  """
  available = (len(tokens) - 1) // config.context_length
  count = min(available, config.eval_sequences)
  starts = np.arange(count) * available // count * config.context_length
  return windows(tokens, starts, config.context_length)


def windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
  """Returns int32 windows of ``length + 1`` tokens, a row for each start."""
  return tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _cache_key(corpus: Corpus, vocab_size: int) -> str:
  return digest(corpus.sha256, vocab_size, tokenizers.__version__)[:16]


def _fill_cache(cache: Path, corpus: Corpus, vocab_size: int) -> None:
  """Writes tokenizer and tokens of a corpus to a new folder, all or nothing."""
  cache.parent.mkdir(parents=True, exist_ok=True)
  scratch = Path(tempfile.mkdtemp(dir=cache.parent, prefix='partial-'))
  try:
    tokenizer = _train_tokenizer(corpus.train, vocab_size)
    tokenizer.save(str(scratch / 'tokenizer.json'))
    for part, documents in (
      ('train', corpus.train),
      ('val', corpus.validation),
    ):
      _encode(tokenizer, documents, part).tofile(scratch / f'{part}.bin')
    scratch.chmod(0o755)  # mkdtemp lets nobody else read it.
    if not cache.is_dir():  # Another run may have been quicker.
      os.replace(scratch, cache)
  finally:
    shutil.rmtree(scratch, ignore_errors=True)


def _train_tokenizer(
  documents: list[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Trains byte-level byte-pair encoding, as GPT-2's."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.pre_tokenizer = byte_level
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    initial_alphabet=sorted(byte_level.alphabet()),
    special_tokens=[_END_OF_TEXT],
    show_progress=False,
  )
  pieces = tqdm.tqdm(list(_pieces(documents)), 'training the tokenizer')
  tokenizer.train_from_iterator(pieces, trainer)
  return tokenizer


def _encode(
  tokenizer: tokenizers.Tokenizer, documents: list[str], part: str
) -> np.ndarray:
  """Returns the tokens of documents, each followed by an end-of-text token."""
  end = tokenizer.token_to_id(_END_OF_TEXT)
  ids: list[int] = []
  for document in tqdm.tqdm(documents, f'tokenizing the {part} text'):
    pieces = tokenizer.encode_batch_fast(list(_pieces([document])))
    for piece in pieces:
      ids.extend(piece.ids)
    ids.append(end)
  return np.array(ids, _TOKEN_DTYPE)


def _pieces(documents: list[str]) -> Iterator[str]:
  """Cuts documents to pieces that the tokenizer can take in parallel."""
  for text in documents:
    start = 0
    while start < len(text):
      end = text.find('\n', start + _CHARACTERS_AT_ONCE) + 1 or len(text)
      yield text[start:end]
      start = end


def _open_tokens(
  folder: Path, config: Config, vocab_size: int | None = None
) -> Tokens:
  """Opens a folder with train.bin, val.bin and perhaps tokenizer.json."""
  tokenizer_file = folder / 'tokenizer.json'
  tokenizer = None
  if tokenizer_file.is_file():
    tokenizer = _read_tokenizer(tokenizer_file)
    vocab_size = tokenizer.get_vocab_size()
  parts = [folder / name for name in _PARTS]
  train, validation = (_map_tokens(p, config.context_length) for p in parts)
  frequencies, sha256 = _survey([train, validation])
  if len(frequencies) > vocab_size:
    raise UsageError(
      f'--data {config.data} holds the token {len(frequencies) - 1}, but '
      f'its vocabulary has {vocab_size} tokens: give a larger --vocab-size.'
    )
  return Tokens(
    source=str(folder),
    num_bytes=sum(path.stat().st_size for path in parts),
    sha256=sha256,
    train=train,
    validation=validation,
    tokenizer=tokenizer,
    vocab_size=vocab_size,
    unigram_entropy=_entropy(frequencies),
  )


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
  try:
    return tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The library raises nothing narrower.
    raise UsageError(
      f'{path} is no file of the tokenizers library ({error}): delete it, or '
      'its folder if that is in --cache-dir.'
    ) from error


def _map_tokens(path: Path, context_length: int) -> np.ndarray:
  """Maps a file of uint16 tokens, checked to hold at least one sequence."""
  size = path.stat().st_size
  if size % _TOKEN_DTYPE.itemsize:
    raise UsageError(
      f'{path} has {size} bytes: expected uint16 tokens, an even number.'
    )
  num_tokens = size // _TOKEN_DTYPE.itemsize
  if num_tokens <= context_length:
    part = 'validation' if path.name == 'val.bin' else 'training'
    raise UsageError(
      f'The {part} part of --data has {num_tokens} tokens, too few for a '
      f'sequence of --context-length {context_length} and its last target: '
      'give more text or a shorter context.'
    )
  return np.memmap(path, _TOKEN_DTYPE, mode='r')


def _survey(parts: list[np.ndarray]) -> tuple[np.ndarray, str]:
  """Returns the frequency of each token up to the largest, and a hash."""
  counts = np.zeros(np.iinfo(_TOKEN_DTYPE).max + 1, np.int64)
  sha256 = hashlib.sha256()
  total = sum(map(len, parts))
  with tqdm.tqdm(total=total, desc='counting tokens', delay=2) as progress:
    for part in parts:
      sha256.update(f'{len(part)} tokens'.encode())
      for start in range(0, len(part), _TOKENS_AT_ONCE):
        chunk = part[start : start + _TOKENS_AT_ONCE]
        counts += np.bincount(chunk, minlength=len(counts))
        sha256.update(chunk)
        progress.update(len(chunk))
  return np.trim_zeros(counts, 'b'), sha256.hexdigest()


def _entropy(frequencies: np.ndarray) -> float:
  """Returns the entropy of a distribution given by counts, in nats."""
  probabilities = frequencies[frequencies > 0] / frequencies.sum()
  return float(-np.sum(probabilities * np.log(probabilities)))
