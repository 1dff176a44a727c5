"""Tokens to evaluate on: of files, or of a text that the run did not split."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from examples.gpt2.config import Config, UsageError, digest
from examples.gpt2.data.counts import cached_statistics, check_largest
from examples.gpt2.data.documents import DocumentReader
from examples.gpt2.data.shards import (
  TOKEN_SUFFIXES,
  TokenFiles,
  open_files,
  open_parts,
  read_index,
)
from examples.gpt2.data.tokenizer import Encoder
from examples.gpt2.devices.processes import print_once
from examples.gpt2.storage import as_path


class EvaluationTokens(NamedTuple):
  """Tokens of a text or of files that none are trained on."""

  tokens: TokenFiles | np.ndarray
  num_bytes: int  # Of their text, 0 where that is not known.
  sha256: str  # Hash of the tokens, or of what the index of their files says.


def load_evaluation(
  data: str,
  vocab_size: int,
  tokenizer: tokenizers.Tokenizer | None,
  end_token: str | None,
  config: Config,
) -> EvaluationTokens:
  """Opens token files, or tokenizes text as examples.gpt2.prepare does.

  Args:
    data: Token file, folder with those to validate on, or text.
    vocab_size: Number that all tokens have to be below.
    tokenizer: Of text.
    end_token: Follows each document of text.
    config: Settings, of which the length of the context, the field of the text
      and the folder of the cache count.

  Raises:
    UsageError: If there is no such data, or it does not fit the vocabulary.
  """
  path, index = as_path(data), None
  if path.suffix in TOKEN_SUFFIXES and path.is_file():
    found: TokenFiles | None = open_files([path], vocab_size)
  else:
    index = read_index(path)
    parts = open_parts(path, vocab_size, index)
    found = parts.get('val')
    if parts and found is None:
      raise UsageError(f'{path} holds token files, but no val.bin.')
  if found is None:
    return _tokenize(path, tokenizer, end_token, config)
  statistics = index or cached_statistics([found], vocab_size, config)
  check_largest(statistics['largest_token'], vocab_size, data)
  sha256 = digest(index['shards']) if index else statistics['sha256']
  return EvaluationTokens(found, 0, sha256)


def _tokenize(
  path: Path,
  tokenizer: tokenizers.Tokenizer | None,
  end_token: str | None,
  config: Config,
) -> EvaluationTokens:
  """Returns the tokens of a whole text."""
  if tokenizer is None or end_token is None:
    raise UsageError(
      f'{path} holds no token files to validate on, and there is no tokenizer '
      'for text that names the token after each document: expected a token '
      'file, or a folder with val.bin.'
    )
  # A document that spells a special token out does not get that token. The
  # tokenizer of the run stays as it is.
  tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
  tokenizer.encode_special_tokens = True
  reader = DocumentReader([path], config.text_field, skip_bad=True)
  tokens = Encoder(tokenizer, end_token)(reader.read(f'reading {path}'))
  print_once(f'{path}: {len(tokens):,} tokens{reader.describe_left_out()}')
  sha256 = hashlib.sha256(tokens.data).hexdigest()
  return EvaluationTokens(tokens, reader.num_bytes, sha256)
