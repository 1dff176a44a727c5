from pathlib import Path

import numpy as np
import pytest
import tokenizers

from examples.gpt2.command import UsageError
from examples.gpt2.prepare import tokenize
from examples.gpt2.tokenizer import (
  read_tokenizer,
  train_tokenizer,
)

END = '<|endoftext|>'
TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(40)]


def _encode(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
  return np.concatenate(tokenize(TEXTS, tokenizer, END))


def test_a_tokenizer_neither_truncates_nor_pads(tmp_path: Path):
  tokenizer = train_tokenizer(TEXTS, 300)
  tokenizer.enable_truncation(3)
  tokenizer.enable_padding(length=100)
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  tokenizer = read_tokenizer(tmp_path / 'tokenizer.json')
  assert tokenizer.decode(_encode(tokenizer)) == ''.join(TEXTS)


@pytest.mark.parametrize('content', ['junk', None])
def test_a_damaged_or_missing_tokenizer_is_named(tmp_path: Path, content):
  if content is not None:
    (tmp_path / 'tokenizer.json').write_text(content)
  with pytest.raises(UsageError, match=f'{tmp_path} .*expected a tokenizer'):
    read_tokenizer(tmp_path)
