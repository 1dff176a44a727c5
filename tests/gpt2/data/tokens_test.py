import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data import corpus as corpus_module, tokens as tokens_module
from examples.gpt2.data.tokenizer import END_OF_TEXT, train_tokenizer
from examples.gpt2.data.tokens import (
  Source,
  load_evaluation,
  load_tokens,
  parse_sources,
)
from examples.gpt2.prepare import PrepareConfig, prepare
from examples.gpt2.train import train


def _with_bins(config: Config, folder: Path, train, val):
  for name, tokens in (('train.bin', train), ('val.bin', val)):
    np.array(tokens, np.uint16).tofile(folder / name)
  return dataclasses.replace(config, data=(str(folder),))


def test_tokens_decode_to_the_text(tiny: Config):
  tokens = load_tokens(tiny)
  text = Path(tiny.data[0]).read_text()
  decode = tokens.tokenizer.decode
  found = decode(tokens.train[:]), decode(tokens.validation[:])
  assert sorted(''.join(found)) == sorted(text)
  assert text.startswith(found[0][:1000])
  assert found[1][:30] in text
  assert tokens.vocab_size == tiny.vocab_size
  assert tokens.num_bytes == len(text.encode())
  assert len(tokens.validation) < len(tokens.train) / 10
  assert tokens.order == {'sampling': 'without-replacement'}


def test_the_cache_is_used_and_keyed_by_content(tiny: Config, monkeypatch):
  first, path = load_tokens(tiny), Path(tiny.data[0])
  before = path.read_text()
  path.write_text('other text ' * 500)
  second = load_tokens(tiny)
  assert second.sha256 != first.sha256
  assert second.tokenizer.decode(second.train[:]).startswith('other text')
  smaller = dataclasses.replace(tiny, vocab_size=257)
  assert load_tokens(smaller).vocab_size == 257
  monkeypatch.setattr(corpus_module, 'train_tokenizer', None)
  path.write_text(before)
  assert load_tokens(tiny).sha256 == first.sha256
  (cached,) = {x.path.parent for x in load_tokens(tiny).train.shards}
  (cached / 'val.bin').write_bytes(b'1')
  with pytest.raises(UsageError, match=r'val\.bin has 1 bytes: .* damaged'):
    load_tokens(tiny)


def test_of_two_runs_at_once_the_quicker_fills_the_cache(tiny, monkeypatch):
  def train(*args):
    with monkeypatch.context() as patch:
      patch.setattr(corpus_module, 'train_tokenizer', train_tokenizer)
      load_tokens(tiny)
    return train_tokenizer(*args)

  monkeypatch.setattr(corpus_module, 'train_tokenizer', train)
  assert len(load_tokens(tiny).train) > 0
  assert not list(tiny.cache_dir.glob('partial-*'))


@pytest.mark.parametrize(
  ('train', 'val', 'part'), [(16, 17, 'train'), (17, 16, 'val')]
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


def test_changed_token_files_are_others(tiny: Config, tmp_path: Path):
  config = _with_bins(tiny, tmp_path, [0, 1] * 50, [2] * 100)
  first = load_tokens(config)
  assert first.unigram_entropy == pytest.approx(math.log(2))
  assert (first.tokenizer, first.vocab_size) == (None, 288)
  assert load_tokens(config).sha256 == first.sha256
  for parts in (([1, 0] * 50, [2] * 100), ([0, 1] * 50, [3] * 100)):
    changed = load_tokens(_with_bins(tiny, tmp_path, *parts))
    assert changed.sha256 != first.sha256


@pytest.fixture
def two_processes(monkeypatch):
  """Has the tests' process be the second of two, with all that it needs."""

  def on_process_0(function):
    result = json.loads(json.dumps(function()))
    monkeypatch.setattr(corpus_module, 'train_tokenizer', None)
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
  train(config)  # Its own settings are accepted.
  changed = f'{prepared / "web"}:0.6', f'{prepared / "code"}:0.4'
  with pytest.raises(UsageError, match='weights.*0.7.*0.6'):
    train(dataclasses.replace(config, data=changed))


def test_weights_are_by_default_those_of_the_tokens(tiny, prepared: Path):
  data = str(prepared / 'web'), str(prepared / 'code')
  tokens = load_tokens(dataclasses.replace(tiny, data=data))
  alone = [load_tokens(dataclasses.replace(tiny, data=(x,))) for x in data]
  sizes = [len(x.train) for x in alone]
  assert tokens.order['weights'] == [x / sum(sizes) for x in sizes]
  assert len(tokens.train) == sum(sizes)
  np.testing.assert_array_equal(
    tokens.train[:], np.concatenate([x.train[:] for x in alone])
  )


def test_sources_that_cannot_be_mixed_are_refused(tiny, prepared, tmp_path):
  data = str(prepared / 'web'), *tiny.data
  with pytest.raises(UsageError, match='holds no token files.* --tokenizer'):
    load_tokens(dataclasses.replace(tiny, data=data))
  other = tmp_path / 'other'
  other.mkdir()
  _with_bins(tiny, other, [0] * 99, [0] * 99)
  train_tokenizer(['other'], 260).save(str(other / 'tokenizer.json'))
  with pytest.raises(UsageError, match='must have the same tokenizer'):
    load_tokens(dataclasses.replace(tiny, data=(data[0], str(other))))


def test_text_to_evaluate_on_may_spell_special_tokens_out(tiny, tmp_path):
  tokenizer = load_tokens(tiny).tokenizer
  path, text = tmp_path / 'a.jsonl', f'one {END_OF_TEXT} two'
  path.write_text(json.dumps({'text': text}))
  found = load_evaluation(str(path), 288, tokenizer, END_OF_TEXT)
  assert found.num_bytes == len(text)
  assert tokenizer.decode(found.tokens[:-1].tolist()) == text
  assert found.tokens[-1] == tokenizer.token_to_id(END_OF_TEXT)
  assert not tokenizer.encode_special_tokens  # That of the run is as it was.


@pytest.mark.parametrize(
  ('eval_data', 'message'),
  [
    ('web=code.jsonl', 'has the name of another set, web'),
    ('name=', "must be a path or name=path, got 'name='"),
    ('=code.jsonl', "must be a path or name=path, got '=code.jsonl'"),
    ('x=nothing', 'nothing does not exist'),
    ('x=short.txt', '--eval-data x=short.txt: The val part .* has 2 tokens'),
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
  config = dataclasses.replace(tiny, data=('web',), eval_data=(eval_data,))
  with pytest.raises(UsageError, match=message):
    load_tokens(config)
