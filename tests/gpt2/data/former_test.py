"""Folders of former releases, and what else lies in folders."""

import json
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.data.documents import DocumentReader
from examples.gpt2.data.shards import find_files, read_index
from examples.gpt2.data.tokenizer import (
  END_OF_TEXT,
  end_token_of_folder,
  train_tokenizer,
)


def _write(folder: Path, *names: str):
  for name in names:
    np.arange(9, dtype=np.uint16).tofile(folder / name)


def test_copies_beside_the_usual_files_are_not_read(tmp_path: Path):
  _write(tmp_path, 'train.bin', 'val.bin', 'train_old.bin', 'my_val.bin')
  found = find_files(tmp_path)
  assert [x.name for part in found.values() for x in part] == [
    'train.bin',
    'val.bin',
  ]


def test_hidden_files_are_no_tokens(tmp_path: Path):
  _write(tmp_path, 'a_train_0.bin', '._a_train_0.bin', 'a_val_0.bin')
  found = find_files(tmp_path)
  assert [x.name for x in found['train']] == ['a_train_0.bin']


@pytest.mark.parametrize('content', ['{"shards": [1, 2]}', '[]', '{}\n{}\n'])
def test_an_index_of_another_program_is_no_index(tmp_path: Path, content: str):
  (tmp_path / 'index.json').write_text(content)
  assert read_index(tmp_path) is None


def test_a_torn_index_beside_tokens_is_damaged(tmp_path: Path):
  _write(tmp_path, 'train.bin', 'val.bin')
  (tmp_path / 'index.json').write_text(json.dumps({'shards': {}})[:-1])
  with pytest.raises(UsageError, match='is damaged'):
    read_index(tmp_path)


def test_a_folder_that_names_no_end_has_that_of_gpt2(tmp_path: Path):
  tokenizer = train_tokenizer(['some text'], 300)
  tokenizer.add_special_tokens(['<|pad|>'])
  path = tmp_path / 'tokenizer.json'
  tokenizer.save(str(path))
  assert end_token_of_folder(path, tokenizer) == END_OF_TEXT


@hypothesis.given(
  text=st.text(st.characters(codec='utf-8', categories=['L']), min_size=40),
  place=st.integers(0, 40),
)
def test_a_zero_byte_does_not_change_the_encoding(
  tmp_path_factory, text, place
):
  path = tmp_path_factory.mktemp('text') / 'a.txt'
  text = text[:place] + '\0' + text[place:]
  path.write_bytes(text.encode())
  reader = DocumentReader([path], is_cut=False)
  assert list(reader.read('reading')) == [text]
