"""Text and tokens in object stores: the same as on a disk."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from examples.gpt2 import prepare as prepare_module
from examples.gpt2.config import Config, change
from examples.gpt2.data import corpus as corpus_module
from examples.gpt2.data.tokens import load_tokens
from examples.gpt2.prepare import PrepareConfig, prepare
from examples.gpt2.storage import as_path, make_folder, write_whole
from tests.gpt2.runs import contents

_TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(300)]


def _write_text(folder: Path) -> str:
  make_folder(folder)
  lines = ''.join(json.dumps({'text': text}) + '\n' for text in _TEXTS[:100])
  write_whole(folder / 'a.jsonl.gz', gzip.compress(lines.encode(), mtime=0))
  table = pa.BufferOutputStream()
  pa.parquet.write_table(pa.table({'text': _TEXTS[100:200]}), table)
  write_whole(folder / 'b.parquet', table.getvalue().to_pybytes())
  write_whole(folder / 'c.txt', '<|endoftext|>\n'.join(_TEXTS[200:]).encode())
  return os.fspath(folder)


def test_tokens_are_made_and_read_in_a_store(
  bucket: str, tiny: Config, tmp_path: Path, monkeypatch
):
  settings = dict(vocab_size=300, validation_share=0.2, shard_tokens=500)
  settings |= dict(num_proc=1, cache_dir=tmp_path / 'cache')
  local, remote = (
    PrepareConfig(
      data=(_write_text(root / 'text'),), out_dir=root / 'tokens', **settings
    )
    for root in (tmp_path, as_path(bucket))
  )
  prepare(local)
  write, numbers = prepare_module._write, []

  def stop(*args):
    numbers.append(args[1])
    if len(numbers) == 3:
      raise KeyboardInterrupt
    return write(*args)

  monkeypatch.setattr(prepare_module, '_write', stop)
  with pytest.raises(KeyboardInterrupt):
    prepare(remote)
  # What was done is not done again.
  monkeypatch.setattr(prepare_module, 'train_tokenizer', None)
  prepare(remote)
  assert numbers == [0, 1, 2, *range(2, max(numbers) + 1)]
  assert contents(remote.out_dir) == contents(local.out_dir)
  assert len(contents(local.out_dir)) > 8

  found, expected = (
    load_tokens(change(tiny, data=(os.fspath(x.out_dir),)))
    for x in (remote, local)
  )
  assert found.sha256 == expected.sha256
  np.testing.assert_array_equal(found.train[:], expected.train[:])
  np.testing.assert_array_equal(found.validation[:], expected.validation[:])


def test_text_and_cache_may_be_in_a_store(make_bucket, tiny, monkeypatch):
  bucket = make_bucket('gs')
  text = Path(tiny.data[0]).read_bytes()
  write_whole(as_path(bucket) / 'text.txt', text)
  there = change(
    tiny, data=(f'{bucket}/text.txt',), cache_dir=as_path(bucket) / 'cache'
  )
  expected = load_tokens(tiny)
  for _ in range(2):  # To make the cache, and from the cache.
    found = load_tokens(there)
    assert found.sha256 == expected.sha256
    np.testing.assert_array_equal(found.train[:], expected.train[:])
    assert found.tokenizer.to_str() == expected.tokenizer.to_str()
    monkeypatch.setattr(corpus_module, 'train_tokenizer', None)
