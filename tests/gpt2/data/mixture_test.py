import dataclasses
import json
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data.batches import training_batch
from examples.gpt2.data.mixture import Mixture, Source, parse_sources, permute
from examples.gpt2.data.shards import open_files
from examples.gpt2.data.tokens import load_tokens
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.prepare import PrepareConfig, prepare
from examples.gpt2.presets import identity
from examples.gpt2.train import train


@hypothesis.given(
  size=st.integers(1, 3000),
  key=st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 9)),
)
def test_a_permutation_has_each_place_once(size: int, key: tuple[int, int]):
  found = permute(np.arange(size), size, key)
  np.testing.assert_array_equal(np.sort(found), np.arange(size))
  # The same for any group of places.
  np.testing.assert_array_equal(
    permute(np.arange(size)[::3], size, key), found[::3]
  )


def test_a_large_permutation_needs_no_memory():
  size = 10**12
  found = permute(np.arange(size - 1000, size), size, (3,))
  assert len(set(found.tolist())) == 1000
  assert 0 <= found.min() < size / 100
  assert size * 0.99 < found.max() < size


def _sources(folder: Path, *sizes: int):
  """Makes token files, of which each token tells its source and its place."""
  sources = []
  for i, size in enumerate(sizes):
    path = folder / f'{i}.npy'
    np.save(path, np.arange(size, dtype=np.uint32) + i * 1_000_000)
    sources.append(open_files([path], 1 << 24))
  return sources


def _starts(mixture: Mixture, steps: range, count: int, length: int):
  found = [mixture.starts(5, step, count, length) for step in steps]
  return np.concatenate(found)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=st.data())
def test_an_epoch_has_each_sequence_once(tmp_path_factory, data):
  folder = tmp_path_factory.mktemp('sources')
  length = data.draw(st.integers(1, 9))
  sizes = data.draw(st.lists(st.integers(10, 200), min_size=1, max_size=3))
  weights = [data.draw(st.floats(0.1, 9)) for _ in sizes]
  count = data.draw(st.integers(1, 40))
  mixture = Mixture(_sources(folder, *sizes), weights, False)
  steps = -(-600 // count)
  starts = _starts(mixture, range(1, steps + 1), count, length)
  bounds = np.cumsum([0, *sizes])
  for first, size in zip(bounds, sizes, strict=False):
    of_source = starts[(first <= starts) & (starts < first + size)] - first
    windows = (size - 1) // length
    expected = np.arange(windows) * length
    epochs = np.split(of_source, range(windows, len(of_source), windows))
    for epoch in epochs[:-1]:
      np.testing.assert_array_equal(np.sort(epoch), expected)
    assert len(set(epochs[-1])) == len(epochs[-1])
    assert set(epochs[-1]) <= set(expected)
    if windows > 10 and len(epochs) > 2:
      assert (epochs[0] != epochs[1]).any()


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
  weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=4),
  with_replacement=st.booleans(),
)
def test_sources_have_their_shares(tmp_path_factory, weights, with_replacement):
  folder = tmp_path_factory.mktemp('sources')
  size = 900_000
  sources = _sources(folder, *[size] * len(weights))
  mixture = Mixture(sources, weights, with_replacement)
  starts = _starts(mixture, range(1, 17), 1 << 12, 10)
  shares = np.bincount(starts // size, minlength=len(weights)) / (1 << 16)
  expected = np.array(weights) / sum(weights)
  np.testing.assert_allclose(shares, expected, atol=1 / (1 << 16))
  # In any part of it nearly so.
  early = np.bincount(starts[:4096] // size, minlength=len(weights)) / 4096
  np.testing.assert_allclose(early, expected, atol=0.05)


@pytest.mark.parametrize(
  ('with_replacement', 'expected'),
  [
    (False, [2320, 1940, 2840, 1000020, 2080, 3160, 4620, 1000660, 440]),
    (True, [4855, 4405, 1155, 1000497, 2018, 4006, 4896, 1000289, 4535]),
  ],
)
def test_mixtures_do_not_change_between_versions(
  tmp_path: Path, with_replacement: bool, expected: list[int]
):
  sources = _sources(tmp_path, 5000, 700)
  mixture = Mixture(sources, (0.7, 0.3), with_replacement)
  config = Config(seed=7, batch_size=9, micro_batch_size=1, context_length=20)
  mesh = make_mesh('', jax.devices()[:1])
  batch = np.concatenate(training_batch(mixture, config, 3, mesh))
  np.testing.assert_array_equal(batch[:, 0], expected)
  np.testing.assert_array_equal(np.diff(batch), 1)


@pytest.mark.parametrize(
  ('data', 'expected'),
  [
    ('tokens', [('tokens', None)]),
    ('tokens:2', [('tokens', 2)]),
    ('gs://bucket/x:0.7', [('gs://bucket/x', 0.7)]),
    ('gs://bucket', [('gs://bucket', None)]),
    (('a:0.7', 'b/c:0.3'), [('a', 0.7), ('b/c', 0.3)]),
    (('a', 'b'), [('a', None), ('b', None)]),
  ],
)
def test_sources_are_parsed(data, expected):
  assert parse_sources(data) == [Source(*x) for x in expected]


def test_weights_must_be_for_all_or_none_and_not_tiny(tmp_path: Path):
  for data in (('a:1', 'b'), ('a:0', 'b:1'), ('a:-1',), ()):
    with pytest.raises(UsageError, match='--data must'):
      parse_sources(data)
  with pytest.raises(UsageError, match='less than one part in 65536'):
    Mixture(_sources(tmp_path, 99, 99), (1, 1e-9), False)


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
    size = None if tokenizer else 288
    prepare(
      PrepareConfig(
        data=(folder / f'{name}.jsonl',), out_dir=out_dir, vocab_size=size,
        tokenizer=tokenizer, validation_share=0.2, shard_tokens=500,
      )
    )  # fmt: skip
    tokenizer = out_dir
  return folder


def test_a_run_on_sources_has_a_loss_for_each(tiny: Config, prepared: Path):
  data = f'{prepared / "web"}:0.7', f'{prepared / "code"}:0.3'
  sets = f'raw={prepared / "code.jsonl"}', f'again={prepared / "code"}'
  config = dataclasses.replace(tiny, data=data, eval_data=sets)
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
  settings = folder.read_settings()['config']
  assert settings['sampling'] == 'without-replacement'
  assert settings['weights'] == pytest.approx([0.7, 0.3])
  train(config)  # Its own settings are accepted.
  changed = f'{prepared / "web"}:0.6', f'{prepared / "code"}:0.4'
  with pytest.raises(UsageError, match='weights: .*0.7.* -> .*0.6'):
    train(dataclasses.replace(config, data=changed))


def test_weights_are_by_default_those_of_the_tokens(tiny, prepared: Path):
  data = str(prepared / 'web'), str(prepared / 'code')
  tokens = load_tokens(dataclasses.replace(tiny, data=data))
  alone = [load_tokens(dataclasses.replace(tiny, data=x)) for x in data]
  sizes = [len(x.train) for x in alone]
  assert tokens.order['weights'] == [x / sum(sizes) for x in sizes]
  assert len(tokens.train) == sum(sizes)


def test_the_order_of_former_releases_is_kept_where_it_was(tiny, prepared):
  # Text, and what nanoGPT and 0.2.0 wrote.
  old = prepared / 'old'
  old.mkdir(exist_ok=True)
  tokens = load_tokens(dataclasses.replace(tiny, data=str(prepared / 'web')))
  assert tokens.order == {'sampling': 'without-replacement'}
  for name, part in (('train', tokens.train), ('val', tokens.validation)):
    part[:].astype(np.uint16).tofile(old / f'{name}.bin')
  for data in (tiny.data, str(old)):
    config = dataclasses.replace(tiny, data=data)
    assert load_tokens(config).order == {}
    config = dataclasses.replace(config, sampling='with-replacement')
    assert load_tokens(config).order == {}
    config = dataclasses.replace(config, sampling='without-replacement')
    assert load_tokens(config).order == {'sampling': 'without-replacement'}
  assert not {'data', 'sampling', 'eval_data', 'text_field'} & set(
    identity(dataclasses.replace(tiny, sampling='with-replacement'))
  )


def test_sources_of_different_tokenizers_are_refused(tiny, prepared: Path):
  data = str(prepared / 'web'), tiny.data
  with pytest.raises(UsageError, match='must have the same tokenizer'):
    load_tokens(dataclasses.replace(tiny, data=data))


@pytest.mark.parametrize(
  ('eval_data', 'message'),
  [
    ('web=code.jsonl', 'has the name of another set, web'),
    ('name=', "must be a path or name=path, got 'name='"),
    ('=code.jsonl', "must be a path or name=path, got '=code.jsonl'"),
    ('x=nothing', 'nothing does not exist'),
    (
      'x=short.txt',
      '--eval-data x=short.txt: The validation part of the data has 2 tokens',
    ),
    ('x=negative.npy', 'holds the token -1'),
    ('x=large.npy', 'holds the token 300.* --vocab-size'),
  ],
)
def test_evaluation_sets_that_cannot_be_used_are_refused(
  tiny: Config, prepared: Path, monkeypatch, eval_data: str, message: str
):
  monkeypatch.chdir(prepared)
  Path('short.txt').write_text('x')
  np.save('negative.npy', np.full(99, -1))
  np.save('large.npy', np.full(99, 300))
  config = dataclasses.replace(tiny, data='web', eval_data=(eval_data,))
  with pytest.raises(UsageError, match=message):
    load_tokens(config)
