import functools
import itertools
import json
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import pytest
import tokenizers

from examples.gpt2.config import UsageError
from examples.gpt2.data import tokenizer as data_tokenizer
from examples.gpt2.data.tokenizer import (
  Encoder,
  end_token_of_folder,
  num_identifiers,
  read_tokenizer,
  train_tokenizer,
)

END = '<|endoftext|>'
TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(40)]


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
  ids = Encoder(tokenizer, END)(TEXTS)
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
  assert tokenizer.decode(Encoder(tokenizer, END)(TEXTS)) == ''.join(TEXTS)


def test_identifiers_beyond_the_number_of_tokens_are_refused(tmp_path: Path):
  content = json.loads(train_tokenizer(TEXTS, 300).to_str())
  content['model']['vocab'][' gap'] = 301
  path = tmp_path / 'tokenizer.json'
  path.write_text(json.dumps(content))
  assert num_identifiers(read_tokenizer(path, 302)) == 302
  with pytest.raises(UsageError, match=r'tokenizer\.json .* up to 301.* 301'):
    read_tokenizer(path, 301)


def test_a_folder_that_names_no_end_has_that_of_gpt2(tmp_path: Path):
  tokenizer = train_tokenizer(TEXTS, 300)
  tokenizer.add_special_tokens(['<|pad|>'])
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  assert end_token_of_folder(tmp_path / 'tokenizer.json', tokenizer) == END


@pytest.mark.parametrize('name', ['tokenizer.json', 'vocab.json', ''])
def test_a_damaged_or_missing_tokenizer_is_named(tmp_path: Path, name: str):
  if name:
    (tmp_path / name).write_text('junk')
  with pytest.raises(UsageError, match=f'{tmp_path} .*expected a tokenizer'):
    read_tokenizer(tmp_path)


# How vocabularies split text before they merge: GPT-2's, and those of tiktoken
# with these names, of Llama 3 and Qwen and of GPT-4o.
_PATTERNS = {
  'gpt2': r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r'|\s+(?!\S)|\s+',
  'cl100k': r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+',
  'o200k': r'[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}'
  r'| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+',
}


@functools.cache
def _with_pattern(name: str) -> tokenizers.Tokenizer:
  """Returns a tokenizer that has merges of spaces, ends of lines and signs."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  pre = tokenizers.pre_tokenizers
  tokenizer.pre_tokenizer = pre.Sequence(
    [
      pre.Split(tokenizers.Regex(_PATTERNS[name]), 'isolated'),
      pre.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=600,
    initial_alphabet=sorted(pre.ByteLevel.alphabet()),
    special_tokens=[END],
    show_progress=False,
  )
  ends = itertools.product(['', '!', ';', ' ', 'a'], ['\n', '\r\n'], 'b/ \n\t')
  texts = [''.join(parts) * n for parts in ends for n in (1, 2, 3)]
  tokenizer.train_from_iterator(texts * 9, trainer)
  return tokenizer


@pytest.mark.parametrize('name', _PATTERNS)
@hypothesis.given(text=st.text('ab!;/1 \n\t\r\u2028\xa0', max_size=40))
def test_a_long_document_has_the_tokens_of_an_uncut_one(name: str, text: str):
  tokenizer = _with_pattern(name)
  encode = Encoder(tokenizer, END)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data_tokenizer, '_CHARACTERS_IN_PIECE', 3)
    ids = encode([text])
  expected = tokenizer.encode(text).ids
  assert ids.tolist() == [*expected, tokenizer.token_to_id(END)]


@pytest.mark.parametrize('name', _PATTERNS)
def test_lines_and_paragraphs_are_pieces(name: str):
  encode = Encoder(_with_pattern(name), END)
  for text in ('word\n' * 9, 'word\r\n' * 9, 'word\n\n' * 9):
    assert len(list(data_tokenizer._pieces(text, encode._cut, 1))) == 10
