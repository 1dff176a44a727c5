import dataclasses
import errno
import functools
import json
import math
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data import tokens as tokens_module
from examples.gpt2.data.evaluation import load_evaluation
from examples.gpt2.data.tokenizer import END_OF_TEXT, train_tokenizer
from examples.gpt2.data.tokens import load_tokens


def _with_bins(config: Config, folder: Path, train, val):
  for name, tokens in (('train.bin', train), ('val.bin', val)):
    np.array(tokens, np.uint16).tofile(folder / name)
  return dataclasses.replace(config, data=str(folder))


def test_tokens_decode_to_the_text(tiny: Config):
  tokens = load_tokens(tiny)
  text = Path(tiny.data).read_text()
  ids = [*tokens.train[:], *tokens.validation[:]]
  assert tokens.tokenizer.decode(ids) == text
  assert tokens.vocab_size == tiny.vocab_size
  assert tokens.num_bytes == len(text.encode())
  assert len(tokens.validation) < len(tokens.train) / 10


def test_text_to_evaluate_on_may_spell_special_tokens_out(tiny, tmp_path):
  tokenizer = load_tokens(tiny).tokenizer
  path, text = tmp_path / 'a.jsonl', f'one {END_OF_TEXT} two'
  path.write_text(json.dumps({'text': text}))
  found = load_evaluation(str(path), 288, tokenizer, END_OF_TEXT, tiny).tokens
  assert tokenizer.decode(found[:-1].tolist()) == text
  assert found[-1] == tokenizer.token_to_id(END_OF_TEXT)
  assert not tokenizer.encode_special_tokens  # That of the run is as it was.


def test_the_cache_is_used_and_keyed_by_content(tiny: Config, monkeypatch):
  first = load_tokens(tiny)
  Path(tiny.data).write_text('other text ' * 500)
  second = load_tokens(tiny)
  assert second.sha256 != first.sha256
  assert second.tokenizer.decode(second.train[:]).startswith('other text')
  smaller = dataclasses.replace(tiny, vocab_size=257)
  assert load_tokens(smaller).vocab_size == 257
  monkeypatch.setattr(tokens_module, 'train_tokenizer', None)
  load_tokens(tiny)


def test_of_two_runs_at_once_the_quicker_fills_the_cache(tiny, monkeypatch):
  def train(*args):
    with monkeypatch.context() as patch:
      patch.setattr(tokens_module, 'train_tokenizer', train_tokenizer)
      load_tokens(tiny)
    return train_tokenizer(*args)

  monkeypatch.setattr(tokens_module, 'train_tokenizer', train)
  assert len(load_tokens(tiny).train) > 0
  assert not list(tiny.cache_dir.glob('partial-*'))


@pytest.mark.parametrize(
  ('train', 'val', 'part'), [(16, 17, 'training'), (17, 16, 'validation')]
)
def test_too_short_a_part_is_refused(tiny, tmp_path, train, val, part):
  load_tokens(_with_bins(tiny, tmp_path, [0] * 17, [0] * 17))
  config = _with_bins(tiny, tmp_path, [0] * train, [0] * val)
  message = f'{part}.*16 tokens.*--context-length 16'
  with pytest.raises(UsageError, match=message):
    load_tokens(config)


@pytest.mark.parametrize('name', ['train.bin', 'val.bin'])
def test_half_of_the_token_files_is_refused(tiny, tmp_path, name: str):
  config = _with_bins(tiny, tmp_path, [0] * 99, [0] * 99)
  (tmp_path / name).unlink()
  with pytest.raises(UsageError, match=f'no {name}'):
    load_tokens(config)


def test_token_files_are_counted_once(tiny: Config, tmp_path, monkeypatch):
  config = _with_bins(tiny, tmp_path, [0, 1] * 50, [2] * 100)
  first = load_tokens(config)
  monkeypatch.setattr(np, 'bincount', None)
  second = load_tokens(config)
  assert second.sha256 == first.sha256
  for tokens in (first, second):
    entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert tokens.unigram_entropy == pytest.approx(entropy)
    assert (tokens.tokenizer, tokens.vocab_size) == (None, 288)


@pytest.mark.parametrize('name', ['train.bin', 'val.bin'])
def test_changed_token_files_are_counted_again(tiny, tmp_path, name: str):
  config = _with_bins(tiny, tmp_path, [0] * 100, [1] * 100)
  before = load_tokens(config)
  path = tmp_path / name
  stat = path.stat()
  while path.stat().st_ctime_ns == stat.st_ctime_ns:
    path.touch()
  np.full(100, 7, np.uint16).tofile(path)
  # As cp --preserve does it.
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  assert load_tokens(config).sha256 != before.sha256


def test_token_files_of_another_type_are_counted_again(tiny, tmp_path):
  config = _with_bins(tiny, tmp_path, [0, 2] * 50, [2] * 100)
  load_tokens(config)
  with pytest.raises(UsageError, match='holds the token 131072'):
    load_tokens(dataclasses.replace(config, vocab_size=100_000))


@pytest.mark.parametrize(
  'content', [b'\xff', b'{"largest_to', b'{"largest_token": 2}']
)
def test_damaged_counts_are_made_again(tiny, tmp_path, content: bytes):
  config = _with_bins(tiny, tmp_path, [0, 1] * 50, [2] * 100)
  first = load_tokens(config)
  (path,) = (config.cache_dir / 'statistics').iterdir()
  whole = path.read_bytes()
  path.write_bytes(content)
  assert load_tokens(config).sha256 == first.sha256
  assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_stops_runs_on_text_alone(
  tiny: Config, tmp_path: Path
):
  tiny.cache_dir.write_text('a file, no folder')
  with pytest.raises(OSError, match='cache'):
    load_tokens(tiny)
  config = _with_bins(tiny, tmp_path, [0] * 100, [2] * 100)
  assert load_tokens(config).unigram_entropy == pytest.approx(math.log(2))


@pytest.mark.parametrize(
  ('name', 'damage'),
  [
    ('train.bin', 'cut oddly'),
    ('train.bin', 'flipped'),
    ('val.bin', 'cut'),
    ('val.bin', 'lost'),
    ('tokenizer.json', 'flipped'),
    ('tokenizer.json', 'lost'),
  ],
)
def test_a_damaged_cache_is_made_again(tiny: Config, name: str, damage: str):
  before = load_tokens(tiny)
  expected = before.train[:], before.tokenizer.to_str()
  (path,) = tiny.cache_dir.glob(f'*/{name}')
  content = bytearray(path.read_bytes())
  content[20] ^= 1
  size = {'flipped': None, 'cut': -10, 'cut oddly': -9, 'lost': 0}[damage]
  path.unlink()
  if size != 0:
    path.write_bytes(content[:size])
  with pytest.warns(UserWarning, match='damaged'):
    after = load_tokens(tiny)
  np.testing.assert_array_equal(after.train[:], expected[0])
  assert after.tokenizer.to_str() == expected[1]


@pytest.mark.parametrize('name', ['tokenizer.json', 'val.bin'])
def test_an_error_of_the_disk_is_not_taken_for_damage(tiny, monkeypatch, name):
  load_tokens(tiny)
  (folder,) = (path.parent for path in tiny.cache_dir.glob('*/val.bin'))
  before = {path: path.read_bytes() for path in folder.iterdir()}
  original = Path.read_bytes, Path.stat

  def fail(path, *args, of=0, **named):
    if path.name == name and path.parent == folder:
      raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return original[of](path, *args, **named)

  with monkeypatch.context() as patch:
    patch.setattr(Path, 'read_bytes', fail)
    if name == 'val.bin':
      patch.setattr(Path, 'stat', functools.partialmethod(fail, of=1))
    with pytest.raises(OSError, match=name) as caught:
      load_tokens(tiny)
  assert caught.value.errno == errno.EIO
  assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.fixture
def two_processes(monkeypatch):
  """Has the tests' process be the second of two, with all that it needs."""

  def on_process_0(function):
    result = json.loads(json.dumps(function()))
    monkeypatch.setattr(tokens_module, 'train_tokenizer', None)
    return result

  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(tokens_module, 'on_process_0', on_process_0)
  compared: list[dict[str, str]] = []
  monkeypatch.setattr(tokens_module, 'check_same', compared.append)
  return compared


def test_of_several_processes_the_first_makes_the_tokens(tiny, two_processes):
  assert load_tokens(tiny).vocab_size == 288


def test_processes_compare_all_that_they_read(tiny, tmp_path, two_processes):
  held = tmp_path / 'held.bin'
  config = _with_bins(tiny, tmp_path, [0] * 100, [1] * 100)
  config = dataclasses.replace(config, eval_data=(f'x={held}',))
  for size, val in ((100, 100), (99, 100), (99, 99)):
    np.full(size, 2, np.uint16).tofile(held)
    _with_bins(tiny, tmp_path, [0] * 100, [1] * val)
    load_tokens(config)
  trained_on, evaluated_on = (
    [x[name] for x in two_processes]
    for name in ('the hash of --data', '--eval-data x')
  )
  assert trained_on[0] == trained_on[1] != trained_on[2]
  assert evaluated_on[0] != evaluated_on[1] == evaluated_on[2]


def test_processes_may_have_their_data_in_other_places(
  tiny, tmp_path, two_processes
):
  for name, weights in (('a', '12'), ('b', '12'), ('b', '21')):
    places = [tmp_path / f'{name}{i}' for i in (0, 1)]
    for i, place in enumerate(places):
      place.mkdir(exist_ok=True)
      _with_bins(tiny, place, [i] * 100, [i] * 100)
    data = tuple(f'{x}:{y}' for x, y in zip(places, weights, strict=True))
    load_tokens(dataclasses.replace(tiny, data=data))
  assert two_processes[0] == two_processes[1] != two_processes[2]
