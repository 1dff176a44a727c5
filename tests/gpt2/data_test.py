import itertools
import json
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from examples.gpt2 import data as data_module, prepare as prepare_module
from examples.gpt2.command import UsageError
from examples.gpt2.config import Config, change
from examples.gpt2.data import (
  Data,
  Source,
  TokenSequences,
  batch_shape,
  batches,
  fixed_batches,
  load_data,
  mix,
  parse_sources,
  spread,
)
from examples.gpt2.prepare import PrepareConfig, prepare
from examples.gpt2.sharding import (
  batch_sharding,
  make_mesh,
  num_batch_shards,
)
from examples.gpt2.storage import as_path, write_whole
from examples.gpt2.tokenizer import read_shared, train_tokenizer
from examples.gpt2.train import train, with_tokens

ONE = make_mesh('', jax.devices()[:1])
MESHES = ['', 'fsdp=8', 'fsdp=4,tensor=2', 'tensor=8', 'fsdp=2,tensor=2']


class Counting:
  """A source that is no file: sequence i is i, i, i ..."""

  def __init__(self, size: int, first: int = 0, length: int = 20):
    self.size, self.first, self.length = size, first, length

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: int) -> np.ndarray:
    return np.full(self.length + 1, self.first + range(self.size)[index], 'i4')


def _config(**settings) -> Config:
  return change(
    Config(),
    **dict(seed=0, batch_size=48, micro_batch_size=1, context_length=20)
    | settings,
  )


def _rows(batch: jax.Array) -> np.ndarray:
  """Returns the numbers of the sequences of a batch."""
  rows = np.concatenate(batch)
  assert (rows == rows[:, :1]).all()
  return rows[:, 0]


def _numbers(sequences, start: int, count: int) -> list[int]:
  """Returns the numbers of sequences, one after the other."""
  shape = batch_shape(_config(), ONE, 1)
  found = itertools.islice(batches(sequences, shape, start), count)
  return [int(_rows(batch)[0]) for batch in found]


@hypothesis.settings(max_examples=15)
@hypothesis.given(
  text=st.sampled_from(MESHES),
  micro_batch_size=st.sampled_from([1, 2, 6]),
  seed=st.integers(0, 2**32 - 1),
  start=st.integers(0, 10**8),
)
def test_a_batch_is_the_same_on_any_mesh_and_in_any_micro_batches(
  text: str, micro_batch_size: int, seed: int, start: int
):
  mesh, sources = make_mesh(text), [Counting(500), Counting(300, 1000)]
  sequences = mix(sources, [0.7, 0.3], seed)
  expected = next(batches(sequences, batch_shape(_config(), ONE), start))
  changed = _config(micro_batch_size=micro_batch_size)
  batch = next(batches(sequences, batch_shape(changed, mesh), start))
  np.testing.assert_array_equal(_rows(batch), _rows(expected))
  rows = micro_batch_size * num_batch_shards(mesh)
  assert batch.shape == (48 // rows, rows, 21)
  assert batch.dtype == np.int32
  assert batch.sharding == batch_sharding(mesh)


@hypothesis.settings(max_examples=10)
@hypothesis.given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_batches_of_any_sizes_continue_the_same_sequences(sizes: list[int]):
  sequences, start, found = mix([Counting(300)], [1.0], 0), 0, []
  for size in sizes:
    shape = batch_shape(_config(), ONE, size)
    found += _rows(next(batches(sequences, shape, start))).tolist()
    start += size
  assert found == _numbers(sequences, 0, start)


def test_a_process_reads_only_its_rows(run_pair):
  outputs = run_pair(_READING)
  read = [json.loads(output.splitlines()[-1]) for output in outputs]
  # Half of each of the first batches, of which no more than 16 are read ahead.
  for numbers, expected in zip(read, (range(2), range(2, 4)), strict=True):
    assert {x % 4 for x in numbers} == {*expected}
    assert len(numbers) <= 2 * 18


_READING = """
import json, sys
import grain, jax, numpy as np
address, number = sys.argv[1], int(sys.argv[2])
jax.config.update('jax_num_cpu_devices', 2)
jax.distributed.initialize(address, 2, number)
from examples.gpt2.data import batches, micro_batch_shape
from examples.gpt2.sharding import make_mesh
read = []
class Source:
  def __len__(self): return 400
  def __getitem__(self, i):
    read.append(i)
    return np.full(9, i, np.int32)
shape = micro_batch_shape(4, 8, make_mesh(""))
found = batches(grain.MapDataset.source(Source()), shape)
for first in (0, 4):
  for shard in next(found).addressable_shards:
    rows = shard.index[1]
    assert np.asarray(shard.data)[0, :, 0].tolist() == [
      *range(first + rows.start, first + rows.stop)]
found.close()
print(json.dumps(read))
"""


@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data())
def test_an_epoch_has_each_sequence_once(data):
  # Grain needs milliseconds for each place of a source of few sequences.
  sizes = data.draw(st.lists(st.integers(40, 100), min_size=1, max_size=3))
  weights = [data.draw(st.floats(0.1, 9)) for _ in sizes]
  firsts = [1000 * i for i in range(len(sizes))]
  sources = [Counting(*x) for x in zip(sizes, firsts, strict=True)]
  numbers = np.array(_numbers(mix(sources, weights, 3), 0, 400))
  for first, size in zip(firsts, sizes, strict=True):
    found = numbers[(first <= numbers) & (numbers < first + 1000)] - first
    epochs = np.split(found, range(size, len(found), size))
    for epoch in epochs[:-1]:
      np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
    assert len(set(epochs[-1])) == len(epochs[-1])
    if len(epochs) > 2:
      assert (epochs[0] != epochs[1]).any()


@hypothesis.settings(max_examples=5)
@hypothesis.given(weights=st.lists(st.floats(0.02, 1), min_size=2, max_size=4))
def test_sources_have_their_shares(weights: list[float]):
  sources = [Counting(9000, 9000 * i) for i in range(len(weights))]
  shape = batch_shape(_config(batch_size=8192, micro_batch_size=64), ONE)
  numbers = _rows(next(batches(mix(sources, weights, 0), shape)))
  shares = np.bincount(numbers // 9000, minlength=len(weights)) / len(numbers)
  # Grain rounds to a hundredth of the smallest weight.
  np.testing.assert_allclose(
    shares, np.array(weights) / sum(weights), rtol=0.011, atol=0.001
  )


@hypothesis.given(data=st.data())
def test_sequences_lie_one_after_the_other_in_each_file(data):
  sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
  length = data.draw(st.integers(1, 9))
  hypothesis.assume(max(sizes) > length)
  files = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
  sequences = TokenSequences(files, length, 1000)
  expected = [
    file[i : i + length + 1]
    for file in files
    for i in range(0, len(file) - length, length)
  ]
  np.testing.assert_array_equal([*sequences], expected)
  assert sequences[0].dtype == np.int32
  with pytest.raises(UsageError, match='too few .* --context-length 40'):
    TokenSequences(files, 40, 1000)


@hypothesis.settings(max_examples=15)
@hypothesis.given(
  size=st.integers(1, 45),
  most=st.integers(1, 60),
  micro_batch_size=st.sampled_from([1, 2, 3]),
)
@hypothesis.example(size=44, most=16, micro_batch_size=2)
def test_an_evaluation_counts_each_sequence_once(size, most, micro_batch_size):
  places, at_once = spread(size, most), 8 * micro_batch_size
  found = [*fixed_batches(Counting(size), places, at_once, make_mesh(''))]
  assert {x.shape for x in found} == {(1, at_once, 21)}
  count, rows = min(most, size), np.concatenate([*map(_rows, found)])
  assert len(places) == count <= len(rows) < count + at_once
  # The rest repeats what is counted, which is spread evenly.
  assert set(rows) == set(rows[:count])
  distances = np.diff([*rows[:count], size])
  assert rows[0] == 0
  assert distances.min() >= 1
  assert np.ptp(distances) <= 1


def _with_bins(config: Config, folder: Path, train, val):
  for name, tokens in (('train.bin', train), ('val.bin', val)):
    np.array(tokens, np.uint16).tofile(folder / name)
  return change(config, data=(str(folder),))


def _load(config: Config) -> Data:
  return load_data(with_tokens(config))


def _tokenizer(data: Data) -> Any:
  return read_shared(data.folders)['tokenizer']


def _text(data, sequences) -> str:
  tokens = np.concatenate([sequences[i][:-1] for i in range(len(sequences))])
  return _tokenizer(data).decode(tokens)


def test_text_is_prepared_into_the_cache_by_its_content(tiny, monkeypatch):
  first, path = _load(tiny), Path(tiny.data[0])
  (held_out,) = first.evaluations
  assert held_out.name == 'text.txt'
  before = path.read_text()
  # One document: its last lines are held out.
  assert '\n' + _text(first, held_out.sequences)[:300] in before[-1200:]
  assert first.vocab_size == tiny.model.vocab_size
  assert first.validation_tokens < first.train_tokens / 10
  path.write_text('other text ' * 5000)
  second = _load(tiny)
  assert second.sha256 != first.sha256
  monkeypatch.setattr(prepare_module, 'train_tokenizer', None)
  assert _load(tiny).sha256 == second.sha256
  (Path(second.folders[0]) / 'val.bin').write_bytes(b'1')
  with pytest.raises(UsageError, match=r'val\.bin has 1 bytes, .* damaged'):
    _load(tiny)


def test_a_text_that_is_too_short_is_named(tiny):
  Path(tiny.data[0]).write_text('a few words\n' * 9)
  with pytest.raises(UsageError, match='^--data .*/text.txt: .* too few'):
    _load(tiny)


def test_several_texts_are_one(tiny, tmp_path: Path):
  paths = []
  for name, text in (('a', '1 2 3\n'), ('b', 'uvw xyz\n')):
    path = tmp_path / f'{name}.txt'
    path.write_text(text * 2000)
    paths.append(str(path))
  data = _load(change(tiny, data=tuple(paths)))
  assert [x.name for x in data.evaluations] == ['text']
  found = {_tokenizer(data).decode(data.sequences[i]) for i in range(200)}
  assert any('1 2 3' in x for x in found)
  assert any('uvw xyz' in x for x in found)
  weighted = tuple(f'{path}:1' for path in paths)
  with pytest.raises(UsageError, match='a.txt is text, which'):
    _load(change(tiny, data=weighted))


def test_text_and_cache_may_be_in_a_store(make_bucket, tiny, monkeypatch):
  bucket = make_bucket('gs')
  text = Path(tiny.data[0]).read_bytes()
  write_whole(as_path(bucket) / 'text.txt', text)
  there = change(
    tiny, data=(f'{bucket}/text.txt',), cache_dir=as_path(bucket) / 'cache'
  )
  expected = _load(tiny)
  for _ in range(2):  # To make the cache, and from the cache.
    found = _load(there)
    assert found.sha256 == expected.sha256
    assert _tokenizer(found).to_str() == _tokenizer(expected).to_str()
    monkeypatch.setattr(prepare_module, 'train_tokenizer', None)


def test_a_cache_folder_that_cannot_be_used_names_the_flag(tiny):
  tiny.cache_dir.write_text('a file, no folder')
  with pytest.raises(UsageError, match='--cache-dir cannot be used.* Name'):
    _load(tiny)


def test_changed_token_files_are_others(tiny: Config, tmp_path: Path):
  config = _with_bins(tiny, tmp_path, [1, 2] * 50, [2] * 100)
  first = load_data(config)
  assert read_shared(first.folders) == {'companions': {}}
  assert first.vocab_size == 288
  assert load_data(config).sha256 == first.sha256
  for parts in (([2, 1] * 50, [2] * 100), ([1, 2] * 50, [3] * 100)):
    changed = load_data(_with_bins(tiny, tmp_path, *parts))
    assert changed.sha256 != first.sha256


def test_a_token_beyond_the_vocabulary_is_named(tiny: Config, tmp_path: Path):
  tokens = np.ones(20000, np.uint16)
  config = _with_bins(tiny, tmp_path, tokens, tokens[:99])
  sequences = load_data(config).sequences
  tokens[0] = 300
  with pytest.raises(UsageError, match='token 300, .* has 288 .*--vocab-size'):
    load_data(_with_bins(tiny, tmp_path, tokens, tokens[1:99]))
  # And in a run, wherever it is.
  with pytest.raises(UsageError, match='token 300'):
    [*itertools.islice(sequences, 20000 // 16)]


@pytest.mark.parametrize(
  ('data', 'expected'),
  [
    (['tokens'], [('tokens', None)]),
    (['tokens:2'], [('tokens', 2)]),
    (['gs://bucket/x:0.7'], [('gs://bucket/x', 0.7)]),
    (['gs://bucket'], [('gs://bucket', None)]),
    (['a:0.7', 'b/c:0.3'], [('a', 0.7), ('b/c', 0.3)]),
  ],
)
def test_sources_are_parsed(data, expected):
  assert parse_sources(data) == expected


@pytest.mark.parametrize('data', [('a:1', 'b'), ('a:0', 'b:1'), ('a:-1',), ()])
def test_weights_must_be_for_all_or_none(data):
  with pytest.raises(UsageError, match='--data must name sources'):
    parse_sources(data)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A folder with token files of two texts, and the second as a text."""
  folder = tmp_path_factory.mktemp('prepared')
  texts = {
    'web': [f'the word {i} of the web\n' for i in range(300)],
    'code': [f'x[{i}] = {i * i}\n' for i in range(300)],
  }
  tokenizer = None
  for name, documents in texts.items():
    lines = [json.dumps({'text': text}) + '\n' for text in documents]
    (folder / f'{name}.jsonl').write_text(''.join(lines))
    out_dir = folder / name
    prepare(
      PrepareConfig(
        data=(str(folder / f'{name}.jsonl'),), out_dir=out_dir,
        vocab_size=None if tokenizer else 288, tokenizer=tokenizer,
        validation_share=0.2, shard_tokens=500, num_proc=1,
        cache_dir=folder / 'cache',
      )
    )  # fmt: skip
    tokenizer = out_dir
  return folder


def test_a_run_on_sources_has_a_loss_for_each(tiny: Config, prepared: Path):
  data = f'{prepared / "web"}:0.7', f'{prepared / "code"}:0.3'
  sets = f'raw={prepared / "code.jsonl"}', f'again={prepared / "code"}'
  config = change(tiny, data=data, eval_data=sets)
  folder = train(config)
  evaluated = [x for x in folder.read_metrics() if 'val_loss' in x]
  assert [x['step'] for x in evaluated] == [4, 6]
  for line in evaluated:
    losses = line['val_losses']
    assert list(losses) == ['web', 'code', 'raw', 'again']
    mean = 0.7 * losses['web'] + 0.3 * losses['code']
    assert line['val_loss'] == pytest.approx(mean, rel=1e-12)
    assert losses['again'] == losses['code']
    assert losses['raw'] != losses['code']
  train(config)  # Its own settings are accepted.
  changed = f'{prepared / "web"}:0.6', f'{prepared / "code"}:0.4'
  with pytest.raises(UsageError, match='data_sha256'):
    train(change(config, data=changed))


def test_a_source_that_is_no_file_is_mixed(tiny, prepared, monkeypatch):
  usual = data_module.open_source

  def open_source(name: str, config: Config) -> Source:
    if name == 'counting':
      return Source(Counting(60, 200, 16), Counting(3, 0, 16), 288)
    return usual(name, config)

  monkeypatch.setattr(data_module, 'open_source', open_source)
  names = f'{prepared / "web"}:0.5', 'counting:0.5'
  data = load_data(change(tiny, data=names))
  assert [x.name for x in data.evaluations] == ['web', 'counting']
  constant = [len({*data.sequences[i].tolist()}) == 1 for i in range(100)]
  assert sum(constant) == 50


def test_parts_that_are_missing_or_too_short_are_refused(tiny, tmp_path):
  load_data(_with_bins(tiny, tmp_path, [0] * 17, [0] * 17))
  config = _with_bins(tiny, tmp_path, [0] * 17, [0] * 16)
  with pytest.raises(UsageError, match='val.*16 tokens.*--context-length 16'):
    load_data(config)
  (tmp_path / 'val.bin').unlink()
  with pytest.raises(UsageError, match='no val.bin'):
    load_data(config)


def test_sources_that_cannot_be_mixed_are_refused(tiny, prepared, tmp_path):
  data = str(prepared / 'web'), *tiny.data
  with pytest.raises(UsageError, match='is text, which.* --tokenizer'):
    load_data(change(tiny, data=data))
  with pytest.raises(UsageError, match='names a source twice'):
    load_data(change(tiny, data=data[:1] * 2))
  other = tmp_path / 'other'
  other.mkdir()
  _with_bins(tiny, other, [0] * 99, [0] * 99)
  train_tokenizer(['other'], 260).save(str(other / 'tokenizer.json'))
  sources = data[0], str(other)
  with pytest.raises(UsageError, match='must have the same tokenizer'):
    read_shared(sources)
  (other / 'tokenizer.json').unlink()
  assert read_shared(sources[::-1])['end_token'] == '<|endoftext|>'
  with pytest.raises(UsageError, match=r'vocabularies of \[288, 300\] tokens'):
    load_data(change(tiny, data=sources, vocab_size=300))


@pytest.mark.parametrize(
  ('eval_data', 'message'),
  [
    ('web=code.jsonl', r'a name that no other set has \(web\)'),
    ('=code.jsonl', '--eval-data =code.jsonl: it must be a path'),
    ('x=nothing', 'x=nothing: nothing has no val.bin'),
    ('x=short.txt', r'--eval-data x=.*short\.txt\.bin: .* 2 tokens'),
    ('x=large.bin', 'holds the token 300.* --vocab-size'),
  ],
)
def test_evaluation_sets_that_cannot_be_used_are_refused(
  tiny: Config, prepared: Path, monkeypatch, eval_data: str, message: str
):
  monkeypatch.chdir(prepared)
  Path('short.txt').write_text('x')
  np.full(99, 300, np.uint16).tofile('large.bin')
  config = change(tiny, data=('web',), eval_data=(eval_data,))
  with pytest.raises(UsageError, match=message):
    _load(config)
