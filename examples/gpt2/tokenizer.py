"""Tokenizers, trained or read, and the token that ends a document."""

from collections.abc import Iterable, Mapping
import contextlib
import json
from pathlib import Path
from typing import Any

import tokenizers

from examples.gpt2.config import UsageError
from examples.gpt2.storage import on_disk

END_OF_TEXT = '<|endoftext|>'  # Of GPT-2, and of what is trained here.
SETTINGS = 'tokenizer_config.json'  # Names the end-of-text token.
GENERATION = 'generation_config.json'
COMPANIONS = (
  SETTINGS, 'special_tokens_map.json', GENERATION, 'chat_template.jinja',
)  # fmt: skip
"""Files that say how a tokenizer is used, and stay beside it."""

_GPT2_FILES = (('vocab.json', 'merges.txt'), ('encoder.json', 'vocab.bpe'))
# Without an end, the time to train would grow with the square of a word.
_LONGEST_WORD = 256


def train_tokenizer(
  texts: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Trains byte-level byte-pair encoding as GPT-2's, of at least 257 tokens.

  Texts are streamed. Words of more than 256 bytes count as several.
  """
  tokenizer = _byte_level(tokenizers.models.BPE())
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    special_tokens=[END_OF_TEXT],
    show_progress=False,
  )
  words = tokenizer.pre_tokenizer
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [words, tokenizers.pre_tokenizers.FixedLength(_LONGEST_WORD)]
  )
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.pre_tokenizer = words
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


def has_tokenizer(folder: Path) -> bool:
  """Whether a folder holds a tokenizer that can be read."""
  names = ['tokenizer.json', *(vocab for vocab, _ in _GPT2_FILES)]
  return any((folder / name).is_file() for name in names)


def read_companions(path: Path) -> dict[str, bytes]:
  """Returns the files beside a tokenizer, or in its folder, by name."""
  found = {name: _folder(path) / name for name in COMPANIONS}
  return {name: x.read_bytes() for name, x in found.items() if x.is_file()}


def with_end_token(
  companions: Mapping[str, bytes], end_token: str | None
) -> dict[str, bytes]:
  """Returns the files beside a tokenizer, which name an end token."""
  settings = json_object(companions.get(SETTINGS))
  if end_token in (None, _content(settings.get('eos_token'))):
    return dict(companions)
  content = json.dumps(settings | {'eos_token': end_token}, indent=2)
  return {**companions, SETTINGS: content.encode()}


def _folder(path: Path) -> Path:
  return path if path.is_dir() else path.parent


def _file(path: Path) -> Path:
  return path / 'tokenizer.json' if path.is_dir() else path


def _open(path: Path) -> tokenizers.Tokenizer:
  file = _file(path)
  for vocab, merges in _GPT2_FILES:
    if not file.exists() and (path / vocab).exists():
      with on_disk(path / vocab) as first, on_disk(path / merges) as second:
        model = tokenizers.models.BPE.from_file(str(first), str(second))
      return _byte_level(model)
  return tokenizers.Tokenizer.from_buffer(file.read_bytes())


def num_identifiers(tokenizer: tokenizers.Tokenizer) -> int:
  """Returns the number that all identifiers of a tokenizer are below."""
  return 1 + max(tokenizer.get_vocab().values(), default=-1)


def find_end_token(
  path: Path, tokenizer: tokenizers.Tokenizer, wanted: str | None = None
) -> str:
  """Returns the token that ends a document: one that is wanted, or named.

  Raises ``UsageError`` if neither is, or if the vocabulary does not have it.
  """
  special = ', '.join(_special_tokens(tokenizer)) or 'its vocabulary'
  found = wanted or named_end_token(path, tokenizer)
  if found is None:
    raise UsageError(
      f'{path} does not tell which token ends a text: name it by --end-token, '
      f'out of {special}.'
    )
  if tokenizer.token_to_id(found) is None:
    raise UsageError(
      f'{path} has no token {found}: expected --end-token to be out of '
      f'{special}.'
    )
  return found


def named_end_token(path: Path, tokenizer: tokenizers.Tokenizer) -> str | None:
  """Returns the token that ends a document, None if nothing tells.

  It is that of ``tokenizer_config.json``, ``special_tokens_map.json``,
  ``generation_config.json`` or ``config.json`` beside the tokenizer, else
  GPT-2's in its own files, else the only special token that there is.
  """
  named = _named_end(_folder(path), tokenizer)
  if named is not None:
    return named
  if not _file(path).exists():
    return END_OF_TEXT
  special = _special_tokens(tokenizer)
  return special[0] if len(special) == 1 else None


def end_token_of_folder(
  path: Path, tokenizer: tokenizers.Tokenizer
) -> str | None:
  """Returns the token that ends a document in a folder of this trainer.

  Returns None if nothing tells, or the vocabulary does not have it.
  """
  named = named_end_token(path, tokenizer)
  is_known = named is not None and tokenizer.token_to_id(named) is not None
  return named if is_known else None


def _special_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
  added = tokenizer.get_added_tokens_decoder().values()
  return [token.content for token in added if token.special]


def _named_end(folder: Path, tokenizer: tokenizers.Tokenizer) -> str | None:
  """Returns the end-of-text token that files beside a tokenizer name."""
  for name in (SETTINGS, 'special_tokens_map.json'):
    token = _content(_read_json(folder / name).get('eos_token'))
    if token is not None:
      return token
  for name in (GENERATION, 'config.json'):
    number = _read_json(folder / name).get('eos_token_id')
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(number, int):
      return tokenizer.id_to_token(number)
  return None


def _read_json(path: Path) -> dict[str, Any]:
  with contextlib.suppress(FileNotFoundError):
    return json_object(path.read_bytes())
  return {}


def json_object(content: bytes | None) -> dict[str, Any]:
  """Returns the JSON object in a file, an empty one if there is none."""
  with contextlib.suppress(ValueError):
    value = json.loads(content or b'{}')
    return value if isinstance(value, dict) else {}
  return {}


def _content(token: Any) -> str | None:
  """Returns a token that is given as text or as an object."""
  content = token.get('content') if isinstance(token, dict) else token
  return content if content and isinstance(content, str) else None
