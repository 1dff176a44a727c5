import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from examples.gpt2 import tokens as tokens_module
from examples.gpt2.config import Config, UsageError
from examples.gpt2.tokens import (
  load_tokens,
  training_batch,
  validation_sequences,
)


def _with_bins(config: Config, folder: Path, train, val, dtype=np.uint16):
  np.array(train, dtype).tofile(folder / 'train.bin')
  np.array(val, dtype).tofile(folder / 'val.bin')
  return dataclasses.replace(config, data=str(folder))


def test_tokens_decode_to_the_text(tiny: Config):
  tokens = load_tokens(tiny)
  text = Path(tiny.data).read_text()
  ids = tokens.train.tolist() + tokens.validation.tolist()
  assert tokens.tokenizer.decode(ids) == text
  assert tokens.vocab_size == tiny.vocab_size
  assert tokens.num_bytes == len(text.encode())


def test_the_smallest_vocabulary_gives_bytes(tiny: Config):
  tokens = load_tokens(dataclasses.replace(tiny, vocab_size=257))
  text = Path(tiny.data).read_bytes()
  # An end-of-text token follows each part.
  assert len(tokens.train) + len(tokens.validation) == len(text) + 2


def test_the_cache_is_used_and_keyed_by_content(tiny: Config, monkeypatch):
  first = load_tokens(tiny)
  Path(tiny.data).write_text('other text ' * 500)
  assert load_tokens(tiny).sha256 != first.sha256
  monkeypatch.setattr(tokens_module, '_fill_cache', None)
  load_tokens(tiny)


def test_an_interrupted_tokenization_leaves_no_cache(tiny: Config, monkeypatch):
  def fail(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(tokens_module, '_encode', fail)
    with pytest.raises(KeyboardInterrupt):
      load_tokens(tiny)
  assert not list(tiny.cache_dir.iterdir())
  load_tokens(tiny)


def test_training_the_tokenizer_twice_gives_the_same(tiny: Config, tmp_path):
  again = dataclasses.replace(tiny, cache_dir=tmp_path / 'another')
  first, second = load_tokens(tiny), load_tokens(again)
  np.testing.assert_array_equal(first.train, second.train)
  assert first.tokenizer.to_str() == second.tokenizer.to_str()


def test_unigram_entropy(tiny: Config, tmp_path: Path):
  config = _with_bins(tiny, tmp_path, [0, 1] * 50, [2] * 100)
  entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
  assert load_tokens(config).unigram_entropy == pytest.approx(entropy)


def test_nanogpt_files_are_read(tiny: Config, tmp_path: Path):
  train = np.arange(200) % 288
  tokens = load_tokens(_with_bins(tiny, tmp_path, train, train[:50]))
  np.testing.assert_array_equal(tokens.train, train)
  assert tokens.validation.dtype == np.uint16
  assert tokens.tokenizer is None
  assert tokens.vocab_size == 288


def test_a_token_outside_the_vocabulary_is_refused(tiny: Config, tmp_path):
  config = _with_bins(tiny, tmp_path, [288] * 100, [0] * 100)
  with pytest.raises(UsageError, match='288.*--vocab-size'):
    load_tokens(config)


@pytest.mark.parametrize(
  ('train', 'val', 'part'), [(9, 99, 'training'), (99, 9, 'validation')]
)
def test_too_short_a_part_is_refused(tiny, tmp_path, train, val, part):
  config = _with_bins(tiny, tmp_path, [0] * train, [0] * val)
  with pytest.raises(
    UsageError, match=f'{part}.*9 tokens.*--context-length 16'
  ):
    load_tokens(config)


def test_a_torn_token_file_is_refused(tiny: Config, tmp_path: Path):
  config = _with_bins(tiny, tmp_path, [0] * 99, [0] * 99, np.uint8)
  with pytest.raises(UsageError, match=r'train\.bin has 99 bytes.*uint16'):
    load_tokens(config)


def test_a_batch_is_a_pure_function_of_seed_and_step(tiny: Config):
  tokens = np.arange(1000, dtype=np.uint16)
  batch = training_batch(tokens, tiny, 3)
  np.testing.assert_array_equal(batch, training_batch(tokens, tiny, 3))
  assert batch.shape == (16, 17)
  np.testing.assert_array_equal(np.diff(batch), 1)
  assert (batch != training_batch(tokens, tiny, 4)).any()
  other = dataclasses.replace(tiny, seed=1)
  assert (batch != training_batch(tokens, other, 3)).any()


def test_batches_reach_both_ends_of_the_text(tiny: Config):
  config = dataclasses.replace(tiny, batch_size=2000)
  batch = training_batch(np.arange(40, dtype=np.uint16), config, 0)
  assert batch.min() == 0
  assert batch.max() == 39


def test_validation_sequences_do_not_overlap(tiny: Config):
  sequences = validation_sequences(np.arange(2000, dtype=np.uint16), tiny)
  assert sequences.shape == (24, 17)
  assert (np.diff(sequences[:, 0]) >= 16).all()
  assert sequences[-1, -1] > 1800


def test_a_short_validation_text_gives_what_it_has(tiny: Config):
  sequences = validation_sequences(np.arange(35, dtype=np.uint16), tiny)
  np.testing.assert_array_equal(sequences[:, 0], [0, 16])


@pytest.mark.parametrize('name', ['train.bin', 'val.bin'])
def test_half_of_the_token_files_is_refused(tiny, tmp_path, name: str):
  config = _with_bins(tiny, tmp_path, [0] * 99, [0] * 99)
  (tmp_path / name).unlink()
  with pytest.raises(UsageError, match=f'no {name}'):
    load_tokens(config)


def test_a_cache_with_a_lost_file_is_filled_again(tiny: Config):
  first = load_tokens(tiny)
  (entry,) = tiny.cache_dir.iterdir()
  (entry / 'val.bin').unlink()
  np.testing.assert_array_equal(load_tokens(tiny).validation, first.validation)


def test_a_damaged_tokenizer_is_named(tiny: Config):
  load_tokens(tiny)
  (entry,) = tiny.cache_dir.iterdir()
  (entry / 'tokenizer.json').write_text('junk')
  with pytest.raises(UsageError, match=r'tokenizer\.json.*delete it'):
    load_tokens(tiny)
