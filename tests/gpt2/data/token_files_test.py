import functools
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError, change
from examples.gpt2.data import token_files
from examples.gpt2.data.token_files import (
  Shard,
  TokenFiles,
  open_files,
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
  'llm.c of Llama 3': (_llama3, 'train.bin', 'val.bin', LLAMA3),
  'NumPy': (_numpy, 'edu_train_000001.npy', 'edu_val_000000.npy', GPT2),
  'NumPy, int64': (
    lambda x, y: _numpy(x, y, np.int64), 'train.npy', 'val.npy', LLAMA3,
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
  config = change(tiny, data=(str(folder),), vocab_size=size)
  found = load_tokens(config)
  np.testing.assert_array_equal(found.train[:], tokens[:15000])
  np.testing.assert_array_equal(found.validation[:], tokens[15000:])
  assert found.vocab_size == size
  _, counts = np.unique(tokens[:15000], return_counts=True)
  p = counts / 15000
  assert found.unigram_entropy == pytest.approx(-np.sum(p * np.log(p)))


@pytest.mark.parametrize(
  ('dtype', 'tokens', 'vocab_size'),
  [
    (np.uint32, LLAMA3, 50257),
    (np.int64, LLAMA3, 128256),
  ],
)
def test_tokens_of_another_width_are_refused(
  tmp_path: Path, dtype, tokens: np.ndarray, vocab_size: int
):
  _raw(tmp_path / 'train.bin', tokens, dtype)
  with pytest.raises(UsageError, match=r'train\.bin holds no uint.*int64 tok'):
    open_files([tmp_path / 'train.bin'], vocab_size)


@hypothesis.given(
  tokens=st.lists(st.integers(0, 60), min_size=2, max_size=50),
  times=st.integers(100, 200),
)
def test_any_text_of_uint16_tokens_is_read(tmp_path_factory, tokens, times):
  path = tmp_path_factory.mktemp('text') / 'train.bin'
  text = _RNG.choice(tokens, times * len(tokens))
  _raw(path, text)
  np.testing.assert_array_equal(open_files([path], 61)[:], text)


@pytest.mark.parametrize(
  ('write', 'cut', 'message'),
  [
    (_llm_c, 10, r'train\.bin is .*damaged'),
    (_numpy, 10, r'train\.bin is .*damaged'),
    (_raw, 1, r'train\.bin has 39999 bytes.*uint16'),
    (functools.partial(_llm_c, version=2), 0, 'version 2: expected version 1'),
    (functools.partial(_numpy, dtype=float), 0, 'array of float64 .*integers'),
  ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path: Path, write, cut: int, message: str):
  path = tmp_path / 'train.bin'
  write(path, GPT2)
  content = path.read_bytes()
  path.write_bytes(content[: len(content) - cut])
  with pytest.raises(UsageError, match=message):
    open_files([path], 50257)


@hypothesis.given(data=st.data())
def test_windows_are_those_of_one_array(tmp_path_factory, data):
  folder = tmp_path_factory.mktemp('shards')
  sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
  tokens, shards = np.arange(sum(sizes)), []
  for i, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
    dtype = data.draw(st.sampled_from([np.uint16, np.uint32, np.int64]))
    path = folder / f'{i}.bin'
    path.write_bytes(b'head' + part.astype(dtype).tobytes())
    shards.append(Shard(path, np.dtype(dtype), len(part), 4))
  files = TokenFiles(shards, 1000)
  length = data.draw(st.integers(0, len(tokens)))
  starts = data.draw(st.lists(st.integers(0, len(tokens) - length), min_size=1))
  found = files.windows(starts, length)
  np.testing.assert_array_equal(found, [tokens[i : i + length] for i in starts])
  np.testing.assert_array_equal(files[3:-2:2], tokens[3:-2:2])
  assert found.dtype == np.int32


def test_a_token_beyond_the_vocabulary_is_named_before_and_within_a_run(
  tiny: Config, tmp_path: Path, monkeypatch
):
  tokens = np.zeros(3000, np.uint16)
  tokens[1515] = 300
  for name in ('train.bin', 'val.bin'):
    _raw(tmp_path / name, tokens if name == 'train.bin' else tokens[:99])
  config = change(tiny, data=(str(tmp_path),))
  with pytest.raises(UsageError, match='token 300, but .* has 288 .*--vocab-s'):
    load_tokens(config)
  # Of a very large file, a part is counted.
  monkeypatch.setattr(token_files, '_COUNTED', 1000)
  monkeypatch.setattr(token_files, '_TOKENS_AT_ONCE', 10)
  found = load_tokens(config)
  counts, sha256 = found.train.count()
  assert counts.sum() == 1000
  assert sha256 != load_tokens(config).validation.count()[1]
  with pytest.raises(UsageError, match='token 300'):
    found.train.windows([1500], 20)
