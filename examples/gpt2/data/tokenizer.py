"""Makes tokenizers and tokens, and the folders to write them to."""

from collections.abc import Iterator, Sequence
import contextlib
import itertools
import os
from pathlib import Path
import shutil
import tempfile

import numpy as np
import tokenizers
import tqdm

from examples.gpt2.config import UsageError
from examples.gpt2.data.corpus import END_OF_TEXT

TOKEN_DTYPE = np.dtype(np.uint16)
"""Type of a token in train.bin and val.bin."""

MAX_VOCAB_SIZE = np.iinfo(TOKEN_DTYPE).max + 1
"""Number of tokens that the type can tell apart."""

_GPT2_FILES = (('vocab.json', 'merges.txt'), ('encoder.json', 'vocab.bpe'))
_CHARACTERS_AT_ONCE = 1 << 17
# Characters of one to four bytes that together hold each byte UTF-8 has.
_PROBE = ''.join(
  chr(i)
  for i in (
    *range(0x801),
    *range(0x1000, 0x10000, 0x1000),
    *(0x10000, 0x40000, 0x80000, 0xC0000, 0x100000),
  )
)


def train_tokenizer(
  documents: Sequence[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Trains byte-level byte-pair encoding, as GPT-2's.

  Args:
    documents: Text to learn from.
    vocab_size: Number of tokens, at the most, from 257: the bytes and an
      end-of-text token.

  Returns:
    A tokenizer whose end-of-text token is ``END_OF_TEXT``.
  """
  tokenizer = byte_level(tokenizers.models.BPE())
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    special_tokens=[END_OF_TEXT],
    show_progress=False,
  )
  progress = tqdm.tqdm(
    [piece for document in documents for piece in _pieces(document)],
    'training the tokenizer',
  )
  tokenizer.train_from_iterator(progress, trainer)
  return tokenizer


def byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
  """Returns a tokenizer that sees text as GPT-2's does, with any merges."""
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  return tokenizer


def encode(
  tokenizer: tokenizers.Tokenizer, documents: Sequence[str]
) -> np.ndarray:
  """Tokenizes documents, on all cores.

  Args:
    tokenizer: Tokenizer with an end-of-text token.
    documents: Text. What is longer than 131,072 characters is tokenized in
      pieces that end with a line.

  Returns:
    Tokens of the documents, each followed by an end-of-text token: uint16,
    shape (tokens,).
  """
  end = tokenizer.token_to_id(END_OF_TEXT)
  pieces = [list(_pieces(document)) for document in documents]
  encodings = iter(
    tokenizer.encode_batch_fast(
      list(itertools.chain(*pieces)), add_special_tokens=False
    )
  )
  ids: list[int] = []
  for of_document in pieces:
    for encoding in itertools.islice(encodings, len(of_document)):
      ids.extend(encoding.ids)
    ids.append(end)
  return np.array(ids, TOKEN_DTYPE)


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
  """Reads a byte-level tokenizer whose tokens fit the files.

  Args:
    path: A ``tokenizer.json``, or a folder with it or with GPT-2's files.

  Returns:
    The tokenizer, which neither pads nor cuts, with ``END_OF_TEXT``.

  Raises:
    UsageError: If there is none, or one that would lose text or tokens.
  """
  try:
    tokenizer = _open_tokenizer(path)
  except UsageError:
    raise
  except Exception as error:  # The library raises nothing narrower.
    raise UsageError(f'--tokenizer {path} cannot be read: {error}.') from error
  tokenizer.no_padding()
  tokenizer.no_truncation()
  if tokenizer.token_to_id(END_OF_TEXT) is None:
    raise UsageError(f'--tokenizer {path} has no token {END_OF_TEXT}.')
  tokenizer.add_special_tokens([END_OF_TEXT])
  size = tokenizer.get_vocab_size()
  largest = max(tokenizer.get_vocab().values())
  if not largest < size <= MAX_VOCAB_SIZE:
    raise UsageError(
      f'--tokenizer {path} has {size} tokens, the largest {largest}: expected '
      f'tokens from 0 on without gaps, {MAX_VOCAB_SIZE} at the most.'
    )
  _check_lossless(path, tokenizer)
  return tokenizer


def read_tokenizer(
  path: Path, num_tokens: int | None = None
) -> tokenizers.Tokenizer:
  """Reads a tokenizer.

  Args:
    path: A ``tokenizer.json``.
    num_tokens: Number that all its identifiers must be below; None for any.

  Returns:
    The tokenizer, which neither pads nor cuts.

  Raises:
    UsageError: If the file is damaged or has identifiers beyond the number.
  """
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The library raises nothing narrower.
    raise UsageError(
      f'{path} is no file of the tokenizers library ({error}): delete it, or '
      'its folder if that is in --cache-dir.'
    ) from error
  count = num_identifiers(tokenizer)
  if num_tokens is not None and count > num_tokens:
    raise UsageError(
      f'{path} has token identifiers up to {count - 1}: expected fewer than '
      f'{num_tokens}, from 0 on.'
    )
  tokenizer.no_padding()
  tokenizer.no_truncation()
  return tokenizer


def num_identifiers(tokenizer: tokenizers.Tokenizer) -> int:
  """Returns the number that all identifiers of a tokenizer are below."""
  return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _open_tokenizer(path: Path) -> tokenizers.Tokenizer:
  """Opens a tokenizer.json, or a folder with it or with GPT-2's files."""
  file = path / 'tokenizer.json' if path.is_dir() else path
  if file.is_file():
    return tokenizers.Tokenizer.from_file(str(file))
  for names in _GPT2_FILES:
    vocab, merges = (path / name for name in names)
    if vocab.is_file() and merges.is_file():
      model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
      return byte_level(model)
  raise UsageError(
    f'--tokenizer {path}: expected a tokenizer.json, or a folder with it or '
    'with vocab.json and merges.txt, or encoder.json and vocab.bpe.'
  )


def _check_lossless(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
  ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
  if tokenizer.decode(ids) != _PROBE:
    raise UsageError(
      f'--tokenizer {path} does not give back each text that it takes: '
      "expected a byte-level one, as GPT-2's."
    )


def _pieces(text: str) -> Iterator[str]:
  """Cuts text to pieces that the tokenizer can take in parallel."""
  start = 0
  while start < len(text):
    end = text.find('\n', start + _CHARACTERS_AT_ONCE) + 1 or len(text)
    yield text[start:end]
    start = end


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
  """Gives a scratch folder that is renamed to ``path`` if all goes well.

  Args:
    path: Folder to make, all or nothing. One that is there must be empty.

  Yields:
    The scratch folder, beside ``path``; thrown away after an exception.

  Raises:
    OSError: If the folder cannot be made, or holds something at the end.
  """
  if path.exists() and not (path.is_dir() and not any(path.iterdir())):
    raise FileExistsError(
      f'{path} is there and not an empty folder: choose another, or delete it.'
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix='partial-'))
  try:
    yield scratch
    scratch.chmod(0o755)  # mkdtemp lets nobody else read it.
    os.replace(scratch, path)
  finally:
    shutil.rmtree(scratch, ignore_errors=True)
