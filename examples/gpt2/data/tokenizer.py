"""Tokenizers: trained, read, and applied to documents."""

from collections.abc import Iterable, Iterator
import itertools
from pathlib import Path

import numpy as np
import tokenizers
import tqdm

from examples.gpt2.config import UsageError

END_OF_TEXT = '<|endoftext|>'  # Follows each document.
TOKEN_DTYPE = np.dtype(np.uint16)  # Of a token in a file.
MAX_VOCAB_SIZE = np.iinfo(TOKEN_DTYPE).max + 1

_GPT2_FILES = (('vocab.json', 'merges.txt'), ('encoder.json', 'vocab.bpe'))
_CHARACTERS_AT_ONCE = 1 << 17


def train_tokenizer(
  documents: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Trains byte-level byte-pair encoding as GPT-2's, of at least 257 tokens."""
  tokenizer = _byte_level(tokenizers.models.BPE())
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    special_tokens=[END_OF_TEXT],
    show_progress=False,
  )
  pieces = [piece for document in documents for piece in _pieces(document)]
  progress = tqdm.tqdm(pieces, 'training the tokenizer')
  tokenizer.train_from_iterator(progress, trainer)
  return tokenizer


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
  """Returns a tokenizer that sees text as GPT-2's does, with any merges."""
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  return tokenizer


def read_tokenizer(
  path: Path, num_tokens: int | None = None
) -> tokenizers.Tokenizer:
  """Reads a ``tokenizer.json``, or a folder with it or with GPT-2's files.

  What it gives neither pads nor cuts. Raises ``UsageError`` if there is none, a
  damaged one, or one with identifiers that are not below the number of tokens.
  """
  try:
    tokenizer = _open(path)
  except Exception as error:  # The library raises nothing narrower.
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
      raise
    raise UsageError(
      f'{path} is no tokenizer, or a damaged one ({error}): expected a '
      'tokenizer.json, or a folder with it or with vocab.json and merges.txt, '
      'or encoder.json and vocab.bpe.'
    ) from error
  count = num_identifiers(tokenizer)
  if num_tokens is not None and count > num_tokens:
    raise UsageError(
      f'{path} has token identifiers up to {count - 1}: expected all to be '
      f'below {num_tokens}.'
    )
  tokenizer.no_padding()
  tokenizer.no_truncation()
  return tokenizer


def _open(path: Path) -> tokenizers.Tokenizer:
  file = path / 'tokenizer.json' if path.is_dir() else path
  for vocab, merges in _GPT2_FILES:
    if not file.exists() and (path / vocab).exists():
      files = str(path / vocab), str(path / merges)
      return _byte_level(tokenizers.models.BPE.from_file(*files))
  return tokenizers.Tokenizer.from_buffer(file.read_bytes())


def num_identifiers(tokenizer: tokenizers.Tokenizer) -> int:
  """Returns the number that all identifiers of a tokenizer are below."""
  return 1 + max(tokenizer.get_vocab().values(), default=-1)


def encode(
  tokenizer: tokenizers.Tokenizer, documents: Iterable[str]
) -> np.ndarray:
  """Tokenizes documents on all cores, long ones in pieces that end with a line.

  Returns the tokens, uint16 on one axis, with an end-of-text token after those
  of each document.
  """
  end = tokenizer.token_to_id(END_OF_TEXT)
  # An empty piece marks the end of a document.
  pieces = [piece for text in documents for piece in (*_pieces(text), '')]
  encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
  ids = (
    encoding.ids if piece else [end]
    for piece, encoding in zip(pieces, encodings, strict=True)
  )
  return np.fromiter(itertools.chain.from_iterable(ids), TOKEN_DTYPE)


def _pieces(text: str) -> Iterator[str]:
  """Cuts text to pieces that the tokenizer can take in parallel."""
  start = 0
  while start < len(text):
    end = text.find('\n', start + _CHARACTERS_AT_ONCE) + 1 or len(text)
    yield text[start:end]
    start = end
