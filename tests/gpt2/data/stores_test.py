"""Text and tokens in object stores: the same as on a disk."""

import dataclasses
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from examples.gpt2 import prepare as prepare_module
from examples.gpt2.config import Config
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
  write, calls = prepare_module._write, []

  def stop(*args):
    calls.append(args)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return write(*args)

  with monkeypatch.context() as patch:
    patch.setattr(prepare_module, '_write', stop)
    with pytest.raises(KeyboardInterrupt):
      prepare(remote)
    assert (remote.out_dir / 'progress.json').exists()
    patch.setattr(prepare_module, 'train_tokenizer', None)
    prepare(remote)
  # What was done is not done again.
  numbers = [args[1] for args in calls]
  assert numbers == [0, 1, 2, *range(2, max(numbers) + 1)]
  assert contents(remote.out_dir) == contents(local.out_dir)
  assert len(contents(local.out_dir)) > 8

  found, expected = (
    load_tokens(dataclasses.replace(tiny, data=(os.fspath(x.out_dir),)))
    for x in (remote, local)
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
    load_tokens(dataclasses.replace(tiny, data=(os.fspath(root),)))
    for root in (as_path(bucket) / 'tokens', tmp_path / 'tokens')
  )
  assert found.sha256 == expected.sha256
  np.testing.assert_array_equal(found.train[:], tokens)
  np.testing.assert_array_equal(found.validation[:], tokens)


def test_text_and_cache_may_be_in_a_store(bucket, tiny, monkeypatch):
  text = Path(tiny.data[0]).read_bytes()
  write_whole(as_path(bucket) / 'text.txt', text)
  there = dataclasses.replace(
    tiny, data=(f'{bucket}/text.txt',), cache_dir=as_path(bucket) / 'cache'
  )
  expected = load_tokens(tiny)
  for _ in range(2):  # To make the cache, and from the cache.
    found = load_tokens(there)
    assert found.sha256 == expected.sha256
    np.testing.assert_array_equal(found.train[:], expected.train[:])
    assert found.tokenizer.to_str() == expected.tokenizer.to_str()
    monkeypatch.setattr(corpus_module, 'train_tokenizer', None)
