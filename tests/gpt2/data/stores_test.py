"""Text and tokens in object stores: the same as on a disk."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from examples.gpt2 import prepare as prepare_module
from examples.gpt2.config import Config
from examples.gpt2.data import (
  shards,
  tokenizer as tokenizer_module,
  tokens as tokens_module,
)
from examples.gpt2.data.tokenizer import Encoder, train_tokenizer
from examples.gpt2.data.tokens import load_tokens
from examples.gpt2.prepare import PrepareConfig, prepare
from examples.gpt2.storage import as_path, make_folder, write_whole
from tests.gpt2.runs import contents

_TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(200)]


def _write_text(folder: Path) -> Path:
  make_folder(folder)
  half = len(_TEXTS) // 2
  for i in range(2):
    texts = _TEXTS[half * i :][:half]
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
    write_whole(folder / f'{i}.jsonl', lines.encode())
  return folder


def test_tokens_are_made_and_read_in_a_store(
  bucket: str, tiny: Config, tmp_path: Path, monkeypatch
):
  monkeypatch.setattr(tokenizer_module, '_CHARACTERS_AT_ONCE', 500)
  settings = dict(vocab_size=300, validation_share=0.2, shard_tokens=400)
  local, remote = (
    PrepareConfig(
      data=(_write_text(root / 'text'),), out_dir=root / 'tokens', **settings
    )
    for root in (tmp_path, as_path(bucket))
  )
  prepare(local)

  encode, texts = Encoder.documents, []

  def count(self, group):
    texts.extend(group)
    return encode(self, group)

  def stop(self, group):
    if len(texts) > 150:
      raise KeyboardInterrupt
    return count(self, group)

  with monkeypatch.context() as patch:
    patch.setattr(Encoder, 'documents', stop)
    with pytest.raises(KeyboardInterrupt):
      prepare(remote)
    assert (remote.out_dir / 'progress.json').exists()
    patch.setattr(Encoder, 'documents', count)
    patch.setattr(prepare_module, 'train_tokenizer', None)
    before = len(texts)
    prepare(remote)
  # What was done is not done again.
  assert len(texts) - before < len(_TEXTS)
  assert contents(remote.out_dir) == contents(local.out_dir)
  assert len(contents(local.out_dir)) > 12

  config = dataclasses.replace(tiny, data=os.fspath(remote.out_dir))
  with monkeypatch.context() as patch:
    # Nothing is read to know what there is.
    patch.setattr(shards, 'read_ranges', None)
    found = load_tokens(config)
  expected = load_tokens(
    dataclasses.replace(tiny, data=os.fspath(local.out_dir))
  )
  assert found.sha256 == expected.sha256
  np.testing.assert_array_equal(found.train[:], expected.train[:])
  np.testing.assert_array_equal(found.validation[:], expected.validation[:])


def test_files_of_others_and_text_are_read_in_a_store(bucket, tiny, tmp_path):
  tokens = np.random.default_rng(0).integers(288, size=3000)
  for root in (tmp_path / 'tokens', as_path(bucket) / 'tokens'):
    make_folder(root)
    write_whole(root / 'train.bin', tokens.astype(np.uint16).tobytes())
    header = np.array([20240520, 1, 3000, *[0] * 253], np.int32).tobytes()
    content = header + tokens.astype(np.uint16).tobytes()
    write_whole(root / 'val.bin', content)
  found, expected = (
    load_tokens(dataclasses.replace(tiny, data=os.fspath(root)))
    for root in (as_path(bucket) / 'tokens', tmp_path / 'tokens')
  )
  assert found.sha256 == expected.sha256
  np.testing.assert_array_equal(found.train[:], tokens)
  np.testing.assert_array_equal(found.validation[:], tokens)

  write_whole(as_path(bucket) / 'text.txt', Path(tiny.data).read_bytes())
  there = dataclasses.replace(
    tiny, data=f'{bucket}/text.txt', cache_dir=as_path(bucket) / 'cache'
  )
  for _ in range(2):  # To make the cache, and from the cache.
    found, expected = load_tokens(there), load_tokens(tiny)
    assert found.sha256 == expected.sha256
    np.testing.assert_array_equal(found.train[:], expected.train[:])
    assert found.tokenizer.to_str() == expected.tokenizer.to_str()


def test_a_cache_that_another_run_is_writing_stays(bucket, tiny, monkeypatch):
  config = dataclasses.replace(tiny, cache_dir=as_path(bucket) / 'cache')
  load_tokens(config)
  (last,) = config.cache_dir.glob('*/statistics.json')
  last.unlink()  # The smallest file is uploaded last.
  first = last.parent / 'train.bin'
  content = first.read_bytes()

  def train(*args):
    assert first.exists()
    return train_tokenizer(*args)

  monkeypatch.setattr(tokens_module, 'train_tokenizer', train)
  load_tokens(config)
  assert last.exists()
  assert first.read_bytes() == content
