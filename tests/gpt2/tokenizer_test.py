import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from examples.gpt2.config import UsageError
from examples.gpt2.prepare import tokenize
from examples.gpt2.tokenizer import (
  num_identifiers,
  read_tokenizer,
  train_tokenizer,
)

END = '<|endoftext|>'
TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(40)]


def _encode(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
  return np.concatenate(tokenize(TEXTS, tokenizer, END))


@pytest.mark.parametrize(
  'names', [('vocab.json', 'merges.txt'), ('encoder.json', 'vocab.bpe')]
)
def test_the_files_of_gpt2_are_read(tmp_path: Path, names: tuple[str, str]):
  model = json.loads(train_tokenizer(TEXTS, 300).to_str())['model']
  # As GPT-2's, with the end-of-text token at the end.
  others = [token for token in model['vocab'] if token != END]
  vocab = {token: i for i, token in enumerate([*others, END])}
  (tmp_path / names[0]).write_text(json.dumps(vocab))
  merges = ['#version: 0.2', *map(' '.join, model['merges'])]
  (tmp_path / names[1]).write_text('\n'.join(merges) + '\n')
  tokenizer = read_tokenizer(tmp_path)
  tokenizer.add_special_tokens([END])
  ids = _encode(tokenizer)
  assert tokenizer.decode(ids) == ''.join(TEXTS)
  assert tokenizer.get_vocab() == vocab
  assert ids[-1] == num_identifiers(tokenizer) - 1 == 299
  # No space is put before the first word.
  assert tokenizer.encode('the').tokens == ['the']
  # A tokenizer.json beside them is preferred, as it tells more.
  train_tokenizer(TEXTS, 257).save(str(tmp_path / 'tokenizer.json'))
  assert num_identifiers(read_tokenizer(tmp_path)) == 257


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
