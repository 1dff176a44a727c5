import itertools
from pathlib import Path

import numpy as np
import pytest

from examples.gpt2.command import UsageError
from examples.gpt2.config import change
from examples.gpt2.data import load_data
from examples.gpt2.token_files import open_part, open_tokens

# Frequencies as of words: GPT-2's, and Llama 3's.
_RNG = np.random.default_rng(0)
GPT2 = np.minimum(_RNG.zipf(1.3, 20000) - 1, 50256)
LLAMA3 = np.minimum(np.minimum(_RNG.zipf(1.2, 20000), 20000) * 7 - 1, 128255)


def _llm_c(path: Path, tokens, magic=20240520, version=1, dtype=np.uint16):
  """Writes a shard as llm.c and modded-nanogpt publish the format."""
  header = np.zeros(256, np.int32)
  header[:3] = magic, version, len(tokens)
  path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())


def _raw(path: Path, tokens, dtype=np.uint16):
  np.asarray(tokens, dtype).tofile(path)


def _llama3(path: Path, tokens):
  _llm_c(path, tokens, 20240801, 7, np.uint32)


FORMATS = {
  'nanoGPT': (_raw, ['train.bin'], 'val.bin', GPT2),
  'uint32': (
    lambda x, y: _raw(x, y, np.uint32), ['train.bin'], 'val.bin', LLAMA3,
  ),
  'llm.c': (
    _llm_c, ['fw_train_000001.bin', 'fw_train_000002.bin'],
    'fw_val_000000.bin', GPT2,
  ),
  'llm.c of Llama 3': (_llama3, ['train.bin'], 'val.bin', LLAMA3),
}  # fmt: skip


@pytest.mark.parametrize('name', FORMATS)
def test_the_trainer_reads_token_files_of_others(tiny, tmp_path, name):
  write, train, val, tokens = FORMATS[name]
  folder = tmp_path / 'tokens'
  folder.mkdir()
  for path, some in zip(
    train, np.split(tokens[:16000], len(train)), strict=True
  ):
    write(folder / path, some)
  write(folder / val, tokens[16000:])
  size = 50257 if tokens is GPT2 else 128256
  config = change(tiny, data=(str(folder),), vocab_size=size)
  found = load_data(config)
  # Each sequence once; the last of a file has a target in the same file.
  count = found.train_tokens // 16
  assert count == sum((16000 // len(train) - 1) // 16 for _ in train)
  expected = np.concatenate(
    [
      np.lib.stride_tricks.sliding_window_view(some, 17)[::16]
      for some in np.split(tokens[:16000], len(train))
    ]
  )
  epoch = [*itertools.islice(found.sequences, count)]
  np.testing.assert_array_equal(
    sorted(map(tuple, epoch)), sorted(map(tuple, expected))
  )
  held_out = found.evaluations[0].sequences
  np.testing.assert_array_equal(held_out[0], tokens[16000:16017])
  assert found.vocab_size == size


@pytest.mark.parametrize(
  ('write', 'cut', 'message'),
  [
    (_llm_c, 10, r'train\.bin has 41014 bytes, expected 41024 .* damaged'),
    (_raw, 1, r'train\.bin has 39999 bytes.*uint16'),
    (lambda path, _: path.touch(), 0, r'train\.bin has 0 bytes'),
  ],
)
def test_damaged_files_are_named(tmp_path: Path, write, cut: int, message: str):
  path = tmp_path / 'train.bin'
  write(path, GPT2)
  content = path.read_bytes()
  path.write_bytes(content[: len(content) - cut])
  with pytest.raises(UsageError, match=message):
    open_tokens(path, 50257)


@pytest.mark.parametrize(
  ('dtype', 'vocab_size'),
  [('i4', 300), ('>u4', 300), ('i8', 300), ('>i8', 300), ('i8', 1 << 17)],
)
def test_tokens_that_are_wider_are_refused(tmp_path: Path, dtype, vocab_size):
  path = tmp_path / 'train.bin'
  _raw(path, GPT2 % 300, dtype)
  with pytest.raises(UsageError, match=f'has {dtype[-1]} bytes per token'):
    open_tokens(path, vocab_size)


def test_the_usual_names_go_before_others(tmp_path: Path):
  for name in ('train.bin', 'val.bin', 'old_train.bin', 'fw_val_0.bin'):
    _raw(tmp_path / name, [len(name)] * 9)
  for part in ('train', 'val'):
    [tokens] = open_part(tmp_path, part, 300)
    assert tokens[0] == len(f'{part}.bin')
