import json
import math
from pathlib import Path

import numpy as np
import pytest

from examples.gpt2.config import Config, UsageError, change
from examples.gpt2.data import corpus as corpus_module
from examples.gpt2.data.tokenizer import train_tokenizer
from examples.gpt2.data.tokens import (
  Source,
  load_tokens,
  parse_sources,
)
from examples.gpt2.prepare import PrepareConfig, prepare
from examples.gpt2.train import train


def _with_bins(config: Config, folder: Path, train, val):
  for name, tokens in (('train.bin', train), ('val.bin', val)):
    np.array(tokens, np.uint16).tofile(folder / name)
  return change(config, data=(str(folder),))


def test_tokens_decode_to_the_text(tiny: Config):
  tokens = load_tokens(tiny)
  text = Path(tiny.data[0]).read_text()
  decode = tokens.tokenizer.decode
  found = decode(tokens.train[:]), decode(tokens.validation[:])
  assert sorted(''.join(found)) == sorted(text)
  assert text.startswith(found[0][:1000])
  assert found[1][:30] in text
  assert tokens.vocab_size == tiny.model.vocab_size
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
  monkeypatch.setattr(corpus_module, 'train_tokenizer', None)
  path.write_text(before)
  assert load_tokens(tiny).sha256 == first.sha256
  (cached,) = {x.path.parent for x in load_tokens(tiny).train.shards}
  (cached / 'val.bin').write_bytes(b'1')
  with pytest.raises(UsageError, match=r'val\.bin has 1 bytes: .* damaged'):
    load_tokens(tiny)


def test_changed_token_files_are_others(tiny: Config, tmp_path: Path):
  config = _with_bins(tiny, tmp_path, [0, 1] * 50, [2] * 100)
  first = load_tokens(config)
  assert first.unigram_entropy == pytest.approx(math.log(2))
  assert (first.tokenizer, first.vocab_size) == (None, 288)
  assert load_tokens(config).sha256 == first.sha256
  for parts in (([1, 0] * 50, [2] * 100), ([0, 1] * 50, [3] * 100)):
    changed = load_tokens(_with_bins(tiny, tmp_path, *parts))
    assert changed.sha256 != first.sha256


@pytest.mark.parametrize(
  ('data', 'expected'),
  [
    ('tokens', [('tokens', None)]),
    ('tokens:2', [('tokens', 2)]),
    ('gs://bucket/x:0.7', [('gs://bucket/x', 0.7)]),
    ('gs://bucket', [('gs://bucket', None)]),
    (('a:0.7', 'b/c:0.3'), [('a', 0.7), ('b/c', 0.3)]),
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
  with pytest.raises(UsageError, match='weights.*0.7.*0.6'):
    train(change(config, data=changed))


def test_parts_that_are_missing_or_too_short_are_refused(tiny, tmp_path):
  load_tokens(_with_bins(tiny, tmp_path, [0] * 17, [0] * 17))
  message = 'val.*16 tokens.*--context-length 16'
  config = _with_bins(tiny, tmp_path, [0] * 17, [0] * 16)
  with pytest.raises(UsageError, match=message):
    load_tokens(config)
  (tmp_path / 'val.bin').unlink()
  with pytest.raises(UsageError, match='no val.bin'):
    load_tokens(config)


def test_sources_that_cannot_be_mixed_are_refused(tiny, prepared, tmp_path):
  data = str(prepared / 'web'), *tiny.data
  with pytest.raises(UsageError, match='holds no token files.* --tokenizer'):
    load_tokens(change(tiny, data=data))
  other = tmp_path / 'other'
  other.mkdir()
  _with_bins(tiny, other, [0] * 99, [0] * 99)
  train_tokenizer(['other'], 260).save(str(other / 'tokenizer.json'))
  with pytest.raises(UsageError, match='must have the same tokenizer'):
    load_tokens(change(tiny, data=(data[0], str(other))))


@pytest.mark.parametrize(
  ('eval_data', 'message'),
  [
    ('web=code.jsonl', 'has the name of another set, web'),
    ('=code.jsonl', "must be a path or name=path, got '=code.jsonl'"),
    ('x=nothing', 'nothing does not exist'),
    ('x=short.txt', '--eval-data x=short.txt: The val part .* has 2 tokens'),
    ('x=large.npy', 'holds the token 300.* --vocab-size'),
  ],
)
def test_evaluation_sets_that_cannot_be_used_are_refused(
  tiny: Config, prepared: Path, monkeypatch, eval_data: str, message: str
):
  monkeypatch.chdir(prepared)
  Path('short.txt').write_text('x')
  np.save('large.npy', np.full(99, 300))
  config = change(tiny, data=('web',), eval_data=(eval_data,))
  with pytest.raises(UsageError, match=message):
    load_tokens(config)
