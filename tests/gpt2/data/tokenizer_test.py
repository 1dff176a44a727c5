import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import encode, load_tokenizer, train_tokenizer

END = '<|endoftext|>'
TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(40)]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
  monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'true')


def _gpt2_folder(folder: Path, names: tuple[str, str]) -> dict[str, int]:
  """Writes a vocabulary as GPT-2's, with the end-of-text token at the end."""
  model = json.loads(train_tokenizer(TEXTS, 300).to_str())['model']
  others = [token for token in model['vocab'] if token != END]
  vocab = {token: i for i, token in enumerate([*others, END])}
  folder.mkdir()
  (folder / names[0]).write_text(json.dumps(vocab))
  merges = ['#version: 0.2', *map(' '.join, model['merges'])]
  (folder / names[1]).write_text('\n'.join(merges) + '\n')
  return vocab


@pytest.mark.parametrize(
  'names', [('vocab.json', 'merges.txt'), ('encoder.json', 'vocab.bpe')]
)
def test_the_files_of_gpt2_are_read(tmp_path: Path, names: tuple[str, str]):
  vocab = _gpt2_folder(tmp_path / 'gpt2', names)
  tokenizer = load_tokenizer(tmp_path / 'gpt2')
  ids = encode(tokenizer, TEXTS)
  saved = tokenizers.Tokenizer.from_str(tokenizer.to_str())
  assert saved.decode(ids) == ''.join(TEXTS)
  assert saved.get_vocab() == vocab
  assert ids[-1] == 299
  assert saved.decode([299]) == ''
  # No space is put before the first word.
  assert saved.encode('the').tokens == ['the']


def test_a_tokenizer_that_truncates_or_pads_is_mended(tmp_path: Path):
  tokenizer = train_tokenizer(TEXTS, 300)
  tokenizer.enable_truncation(3)
  tokenizer.enable_padding(length=100)
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  tokenizer = load_tokenizer(tmp_path / 'tokenizer.json')
  assert tokenizer.decode(encode(tokenizer, TEXTS)) == ''.join(TEXTS)


def test_tokens_that_a_tokenizer_puts_around_a_text_are_left_out():
  tokenizer = train_tokenizer(TEXTS, 300)
  expected = encode(tokenizer, TEXTS)
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single=f'{END} $A', special_tokens=[(END, tokenizer.token_to_id(END))]
  )
  np.testing.assert_array_equal(encode(tokenizer, TEXTS), expected)


def _save(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
  tokenizer.save(str(path))


def _without_end(path: Path) -> None:
  tokenizer = train_tokenizer(TEXTS, 300)
  path.write_text(tokenizer.to_str().replace(END, '<|end|>'))


def _too_large(path: Path) -> None:
  tokenizer = train_tokenizer(TEXTS, 300)
  tokenizer.add_tokens([f'token{i}' for i in range(65237)])
  _save(tokenizer, path)


def _with_a_gap(path: Path) -> None:
  content = json.loads(train_tokenizer(TEXTS, 300).to_str())
  content['model']['vocab'][' gap'] = 301
  path.write_text(json.dumps(content))


def _lower_case(path: Path) -> None:
  tokenizer = train_tokenizer(TEXTS, 300)
  tokenizer.normalizer = tokenizers.normalizers.Lowercase()
  _save(tokenizer, path)


def _without_a_byte(path: Path) -> None:
  content = json.loads(train_tokenizer(TEXTS, 257).to_str())
  content['model']['vocab']['gone'] = content['model']['vocab'].pop('Ń')
  path.write_text(json.dumps(content))


@pytest.mark.parametrize(
  ('write', 'message'),
  [
    (lambda path: path.write_text('junk'), 'cannot be read'),
    (lambda path: path.mkdir(), 'expected a tokenizer.json, or a folder'),
    (lambda path: None, 'expected a tokenizer.json, or a folder'),
    (_without_end, r'has no token <\|endoftext\|>'),
    (_too_large, 'has 65537 tokens.*65536 at the most'),
    (_with_a_gap, 'has 301 tokens, the largest 301: .*without gaps'),
    (_lower_case, 'expected a byte-level one'),
    (_without_a_byte, 'expected a byte-level one'),
  ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(
  tmp_path: Path, write, message: str
):
  path = tmp_path / 'given.json'
  write(path)
  with pytest.raises(UsageError, match=f'--tokenizer .*given.json.*{message}'):
    load_tokenizer(path)


def test_a_vocabulary_of_the_largest_size_is_taken(tmp_path: Path):
  tokenizer = train_tokenizer(TEXTS, 300)
  tokenizer.add_tokens([f'token{i}' for i in range(65236)])
  _save(tokenizer, tmp_path / 'large.json')
  tokenizer = load_tokenizer(tmp_path / 'large.json')
  ids = encode(tokenizer, [*TEXTS, 'token65235'])
  assert ids[-2] == 65535
  assert tokenizer.decode(ids) == ''.join(TEXTS) + 'token65235'
