import dataclasses
import functools
import os
from pathlib import Path
import struct

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data.shards import (
  Shard,
  TokenFiles,
  find_files,
  open_files,
  read_index,
  read_windows,
)
from examples.gpt2.data.tokens import load_tokens

# Frequencies as of words: GPT-2's, and Llama 3's.
_RNG = np.random.default_rng(0)
GPT2 = np.minimum(_RNG.zipf(1.3, 20000) - 1, 50256)
LLAMA3 = np.minimum(np.minimum(_RNG.zipf(1.2, 20000), 20000) * 7 - 1, 128255)


def _llm_c(path: Path, tokens, magic=20240520, version=1, dtype=np.uint16):
  """Writes a shard as llm.c and modded-nanogpt publish the format."""
  header = np.zeros(256, np.int32)
  header[:3] = magic, version, len(tokens)
  path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())


def _megatron(path: Path, tokens, dtype=np.int32, code=4):
  """Writes a file and its index as Megatron's IndexedDataset does."""
  np.asarray(tokens, dtype).tofile(path)
  head = b'MMIDIDX\0\0' + struct.pack('<QBQQ', 1, code, 1, 2)
  index = struct.pack('<iqqq', len(tokens), 0, 0, 1)
  path.with_suffix('.idx').write_bytes(head + index)


def _fairseq(path: Path, tokens):
  """Writes a file and its index as fairseq's MMapIndexedDataset does."""
  np.asarray(tokens, np.uint16).tofile(path)
  head = b'MMIDIDX\0\0' + struct.pack('<QBQ', 1, 8, 2)
  index = struct.pack('<iiqq', 5, len(tokens) - 5, 0, 10)
  path.with_suffix('.idx').write_bytes(head + index)


def _numpy(path: Path, tokens, dtype=np.uint16):
  with path.open('wb') as file:
    np.save(file, np.asarray(tokens, dtype))


def _raw(path: Path, tokens, dtype=np.uint16):
  np.asarray(tokens, dtype).tofile(path)


def _llama3(path: Path, tokens):
  _llm_c(path, tokens, 20240801, 7, np.uint32)


FORMATS = {
  'nanoGPT': (_raw, 'train.bin', 'val.bin', GPT2),
  'uint32': (
    lambda x, y: _raw(x, y, np.uint32), 'train.bin', 'val.bin', LLAMA3,
  ),
  'llm.c': (_llm_c, 'fw_train_000001.bin', 'fw_val_000000.bin', GPT2),
  'llm.c, renamed': (_llm_c, 'train.bin', 'val.bin', GPT2),
  'llm.c of Llama 3': (_llama3, 'train.bin', 'val.bin', LLAMA3),
  'NumPy': (_numpy, 'edu_train_000001.npy', 'edu_val_000000.npy', GPT2),
  'NumPy, renamed': (_numpy, 'train.bin', 'val.bin', GPT2),
  'NumPy, int64': (
    lambda x, y: _numpy(x, y, np.int64), 'train.npy', 'val.npy', LLAMA3,
  ),
  'Megatron': (
    _megatron, 'my-gpt2_train_document.bin', 'my-gpt2_valid_document.bin', GPT2,
  ),
  'fairseq': (_fairseq, 'train.bin', 'val.bin', GPT2),
  'Megatron, uint16': (
    lambda x, y: _megatron(x, y, np.uint16, 8), 'train.bin', 'val.bin', GPT2,
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', FORMATS)
def test_the_trainer_reads_token_files_of_others(tiny, tmp_path, name):
  write, train, val, tokens = FORMATS[name]
  folder = tmp_path / 'tokens'
  folder.mkdir()
  write(folder / train, tokens[:15000])
  write(folder / val, tokens[15000:])
  size = 50257 if tokens is GPT2 else 128256
  found = load_tokens(
    dataclasses.replace(tiny, data=str(folder), vocab_size=size)
  )
  np.testing.assert_array_equal(found.train[:], tokens[:15000])
  np.testing.assert_array_equal(found.validation[:], tokens[15000:])
  assert found.vocab_size == size


@pytest.mark.parametrize(
  ('dtype', 'tokens', 'vocab_size'),
  [
    (np.uint32, LLAMA3, 50257),
    (np.int64, GPT2, 50257),
    (np.int64, LLAMA3, 128256),
  ],
)
def test_tokens_of_another_width_are_refused(
  tiny: Config, tmp_path: Path, dtype, tokens: np.ndarray, vocab_size: int
):
  for name in ('train.bin', 'val.bin'):
    _raw(tmp_path / name, tokens, dtype)
  config = dataclasses.replace(tiny, data=str(tmp_path), vocab_size=vocab_size)
  with pytest.raises(UsageError, match=r'train\.bin holds no uint.*int64 tok'):
    load_tokens(config)


@hypothesis.given(
  tokens=st.lists(st.integers(0, 60), min_size=2, max_size=50),
  times=st.integers(100, 200),
)
def test_no_text_of_uint16_tokens_is_refused(tmp_path_factory, tokens, times):
  path = tmp_path_factory.mktemp('text') / 'train.bin'
  text = _RNG.choice(tokens, times * len(tokens))
  _raw(path, text)
  np.testing.assert_array_equal(open_files([path], 61)[:], text)


def _junk_index(path: Path, tokens):
  _megatron(path, tokens)
  path.with_suffix('.idx').write_bytes(b'junk' * 20)


def _cut_index(path: Path, tokens, size):
  _megatron(path, tokens)
  os.truncate(path.with_suffix('.idx'), size)


@pytest.mark.parametrize(
  ('write', 'cut', 'message'),
  [
    (_llm_c, 10, r'train\.bin is .*damaged'),
    (_llama3, 10, r'train\.bin is .*damaged'),
    (_numpy, 10, r'train\.bin is .*damaged'),
    (_raw, 1, r'train\.bin has 39999 bytes.*uint16'),
    (_raw, 40000, r'train\.bin has 0 bytes.*uint16'),
    (functools.partial(_llm_c, version=2), 0, 'version 2: expected version 1'),
    (
      lambda path, _: _numpy(path, [[1], [2]]), 0,
      r'array of uint16 and shape \(2, 1\): expected integers on one axis',
    ),
    (functools.partial(_numpy, dtype=float), 0, 'array of float64 .*integers'),
    (lambda path, _: _numpy(path, []), 0, 'holds no tokens'),
    (functools.partial(_megatron, code=6), 0, r'train\.idx is no index of Meg'),
    (_junk_index, 0, r'train\.idx is no index of Megatron'),
    (_megatron, 40000, r'train\.bin is cut off'),
    (functools.partial(_cut_index, size=10), 0, 'idx is no index of Megatron'),
    (functools.partial(_cut_index, size=36), 0, 'idx is cut off'),
  ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_named(tmp_path, write, cut, message):
  path = tmp_path / 'train.bin'
  write(path, GPT2)
  path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
  with pytest.raises(UsageError, match=message):
    open_files([path], 50257)


def test_files_are_found_by_a_word_of_their_name(tmp_path: Path):
  names = {
    'train': ['a_train_000001.bin', 'a_train_000002.bin', 'train.npy'],
    'val': ['a-valid-1.bin', 'val.bin', 'x.validation.npy'],
    'neither': ['training.bin', 'a_val.idx', 'medieval.bin', '._a_train_0.bin'],
  }

  def find():
    found = find_files(tmp_path)
    return {part: [x.name for x in paths] for part, paths in found.items()}

  for name in sum(names.values(), []):
    (tmp_path / name).write_bytes(b'')
  assert find() == {part: names[part] for part in ('train', 'val')}
  # Beside the usual two, others are copies.
  (tmp_path / 'train.bin').write_bytes(b'')
  assert find() == {'train': ['train.bin'], 'val': ['val.bin']}


@pytest.mark.parametrize('content', ['{"shards": [1, 2]}', '[]', '{}\n{}\n'])
def test_an_index_of_another_program_is_no_index(tmp_path: Path, content: str):
  (tmp_path / 'index.json').write_text(content)
  assert read_index(tmp_path) is None


def test_a_torn_index_beside_tokens_is_damaged(tmp_path: Path):
  _raw(tmp_path / 'train.bin', GPT2)
  (tmp_path / 'index.json').write_text('{"shards": {}')
  with pytest.raises(UsageError, match='is damaged'):
    read_index(tmp_path)


@hypothesis.given(data=st.data())
def test_windows_are_those_of_one_array(tmp_path_factory, data):
  folder = tmp_path_factory.mktemp('shards')
  sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
  shards = []
  for i, size in enumerate(sizes):
    dtype = data.draw(st.sampled_from([np.uint16, np.uint32, np.int64]))
    path = folder / f'{i}.bin'
    path.write_bytes(
      b'head' + _RNG.integers(99, size=size, dtype=dtype).tobytes()
    )
    shards.append(Shard(path, np.dtype(dtype), size, offset=4))
  files = TokenFiles(shards)
  tokens = np.concatenate(
    [np.fromfile(x.path, x.dtype, offset=4) for x in shards]
  )
  np.testing.assert_array_equal(files[:], tokens)
  np.testing.assert_array_equal(np.concatenate([*files.chunks()]), tokens)
  assert len(files) == len(tokens)
  length = data.draw(st.integers(1, len(tokens)))
  starts = data.draw(
    st.lists(st.integers(0, len(tokens) - length), min_size=2, max_size=6)
  )
  starts = np.array(starts)[: len(starts) // 2 * 2].reshape(-1, 2)
  found = read_windows(files, starts, length)
  assert found.dtype == np.int32
  np.testing.assert_array_equal(found, read_windows(tokens, starts, length))
  cut = data.draw(st.slices(len(tokens)).filter(lambda x: (x.step or 1) > 0))
  np.testing.assert_array_equal(files[cut], tokens[cut])
