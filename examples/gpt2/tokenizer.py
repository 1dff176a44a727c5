"""Tokenizers, trained or read, and the token that ends a document."""

from collections.abc import Iterable, Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import tokenizers

from examples.gpt2.command import UsageError
from examples.gpt2.storage import as_path, read

TOKENIZER = 'tokenizer.json'
END_OF_TEXT = '<|endoftext|>'  # Of GPT-2, and of what is trained here.
SETTINGS = 'tokenizer_config.json'  # Names the end-of-text token.
GENERATION = 'generation_config.json'
COMPANIONS = (
  SETTINGS, 'special_tokens_map.json', GENERATION, 'chat_template.jinja',
)  # fmt: skip
"""Files that say how a tokenizer is used, and stay beside it."""

# Without an end, the time to train would grow with the square of a word.
_LONGEST_WORD = 256


def train_tokenizer(
  texts: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Trains byte-level byte-pair encoding as GPT-2's, of at least 257 tokens.

  Texts are streamed. Words of more than 256 bytes count as several.
  """
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    special_tokens=[END_OF_TEXT],
    show_progress=False,
  )
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [words, tokenizers.pre_tokenizers.FixedLength(_LONGEST_WORD)]
  )
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.pre_tokenizer = words
  return tokenizer


def read_tokenizer(
  path: Path, num_tokens: int | None = None
) -> tokenizers.Tokenizer:
  """Reads a ``tokenizer.json``, or a folder with it.

  What it gives neither pads nor cuts. Raises ``UsageError`` if there is none, a
  damaged one, or one with identifiers that are not below the number of tokens.
  """
  try:
    file = path / TOKENIZER if path.is_dir() else path
    tokenizer = tokenizers.Tokenizer.from_buffer(read(file))
  except Exception as error:  # The library raises nothing narrower.
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
      raise
    raise UsageError(
      f'{path} is no tokenizer, or a damaged one ({error}): expected a '
      'tokenizer.json, or a folder with it.'
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


def num_identifiers(tokenizer: tokenizers.Tokenizer) -> int:
  """Returns the number that all identifiers of a tokenizer are below."""
  return 1 + max(tokenizer.get_vocab().values(), default=-1)


def find_begin(tokenizer: tokenizers.Tokenizer) -> list[int]:
  """Returns what a tokenizer begins each text with, often nothing.

  Llama 3's begins it with ``<|begin_of_text|>``.
  """
  text = tokenizer.encode('a', add_special_tokens=False).ids
  whole = tokenizer.encode('a').ids
  starts = range(len(whole))
  return whole[: next(i for i in starts if whole[i : i + len(text)] == text)]


def vocabulary(tokenizer: tokenizers.Tokenizer) -> str:
  """Returns what decides the tokens of a text, to compare.

  Of the post-processor only what it begins a text with: transformers writes one
  of its own.
  """
  whole = json.loads(tokenizer.to_str())
  begin = {'post_processor': find_begin(tokenizer)}
  return json.dumps(whole | begin, sort_keys=True)


def read_companions(path: Path) -> dict[str, bytes]:
  """Returns the files beside a tokenizer, or in its folder, by name."""
  folder = path if path.is_dir() else path.parent
  found = {name: folder / name for name in COMPANIONS}
  return {name: read(x) for name, x in found.items() if x.is_file()}


def with_end_token(
  companions: Mapping[str, bytes], end_token: str | None
) -> dict[str, bytes]:
  """Returns the files beside a tokenizer, which name an end token."""
  if end_token in (None, _named(companions)):
    return dict(companions)
  settings = json.loads(companions.get(SETTINGS, b'{}'))
  content = json.dumps(settings | {'eos_token': end_token}, indent=2)
  return {**companions, SETTINGS: content.encode()}


def _named(companions: Mapping[str, bytes]) -> str | None:
  """Returns the ``eos_token`` of ``tokenizer_config.json``."""
  token = json.loads(companions.get(SETTINGS, b'{}')).get('eos_token')
  return token['content'] if isinstance(token, dict) else token


def end_token(path: Path, tokenizer: tokenizers.Tokenizer) -> str | None:
  """Returns the token that ends a document, None if nothing tells.

  It is the one that ``tokenizer_config.json`` beside the tokenizer names, else
  the only special token. Raises ``UsageError`` if that file is damaged.
  """
  try:
    named = _named(read_companions(path))
  except (ValueError, AttributeError, KeyError) as error:
    raise UsageError(f'The {SETTINGS} of {path} is damaged: {error}') from error
  special = _special_tokens(tokenizer)
  found = special[0] if named is None and len(special) == 1 else named
  is_known = found is not None and tokenizer.token_to_id(found) is not None
  return found if is_known else None


def read_vocabulary(
  folder: Path, num_tokens: int | None = None
) -> dict[str, Any]:
  """Returns what a folder has of a tokenizer, its end token and companions.

  Raises ``UsageError`` as ``read_tokenizer`` does, but if there is none.
  """
  found: dict[str, Any] = {'companions': read_companions(folder)}
  if (folder / TOKENIZER).is_file():
    found['tokenizer'] = read_tokenizer(folder / TOKENIZER, num_tokens)
    found['end_token'] = end_token(folder, found['tokenizer'])
  return found


def read_shared(
  folders: Sequence[str], num_tokens: int | None = None
) -> dict[str, Any]:
  """Returns what folders of token files have of their tokenizer.

  Raises ``UsageError`` if they have several.
  """
  found = [read_vocabulary(as_path(folder), num_tokens) for folder in folders]
  known = [x for x in found if 'tokenizer' in x]
  if len({vocabulary(x['tokenizer']) for x in known}) > 1:
    raise UsageError(
      f'{" ".join(folders)} must have the same tokenizer: make token files of '
      'the others by python -m examples.gpt2.prepare --tokenizer with the '
      'folder of the first.'
    )
  return (known or found)[0]


def find_end_token(
  path: Path, tokenizer: tokenizers.Tokenizer, wanted: str | None = None
) -> str:
  """Returns the token that ends a document: one that is wanted, or named.

  Raises ``UsageError`` if neither is, or if the vocabulary does not have it.
  """
  found = wanted or end_token(path, tokenizer)
  if found is None or tokenizer.token_to_id(found) is None:
    special = ', '.join(_special_tokens(tokenizer)) or 'its vocabulary'
    fault = f'has no token {found}' if found else 'names no end of a text'
    raise UsageError(f'{path} {fault}: give --end-token, out of {special}.')
  return found


def _special_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
  added = tokenizer.get_added_tokens_decoder().values()
  return [token.content for token in added if token.special]
