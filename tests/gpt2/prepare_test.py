import collections
from collections.abc import Iterable
import dataclasses
import gzip
import hashlib
import json
import os
from pathlib import Path
import subprocess
import sys

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tokenizers

from examples.gpt2 import prepare as prepare_module
from examples.gpt2.config import Config, UsageError
from examples.gpt2.data import tokens as tokens_module
from examples.gpt2.data.tokenizer import encode, train_tokenizer
from examples.gpt2.data.tokens import load_tokens
from examples.gpt2.prepare import PrepareConfig, main, prepare
from examples.gpt2.presets import resolve

END = '<|endoftext|>'
# With this share of 0.5, some of these fall into each part.
TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(40)]


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
  path = _write_json(tmp_path / 'text.jsonl', TEXTS)
  return PrepareConfig(
    data=(path,),
    out_dir=tmp_path / 'out',
    vocab_size=300,
    validation_share=0.5,
  )


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
  monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'true')


def _write_json(path: Path, texts: Iterable[str]) -> Path:
  content = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
  path.write_text(content)
  return path


def _documents(folder: Path) -> list[collections.Counter[str]]:
  """Returns the documents of both parts as they are in the token files."""
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  return [
    collections.Counter(
      tokenizer.decode(ids, skip_special_tokens=False)
      for ids in _split(folder / name, tokenizer.token_to_id(END))
    )
    for name in ('train.bin', 'val.bin')
  ]


def _split(path: Path, end: int) -> list[list[int]]:
  ids = np.fromfile(path, np.uint16)
  assert ids[-1] == end
  parts = np.split(ids, np.flatnonzero(ids == end) + 1)
  return [part[:-1].tolist() for part in parts[:-1]]


def _is_held_out(text: str, share: float) -> bool:
  digest = hashlib.sha256(text.encode()).hexdigest()
  return int(digest[:16], 16) / 2**64 < share


@hypothesis.settings(max_examples=15)
@hypothesis.given(
  texts=st.lists(
    st.text(st.characters(exclude_categories=['Cs']), max_size=30)
    | st.sampled_from([END, f'a{END}b', ' \n ', '\r\n', 'x' * 70_000]),
    max_size=12,
  ),
  kind=st.sampled_from(['jsonl', 'jsonl.gz', 'txt', 'txt.gz']),
  vocab_size=st.sampled_from([257, 300]),
)
def test_documents_come_back_from_their_tokens(
  tmp_path_factory, texts: list[str], kind: str, vocab_size: int
):
  folder = tmp_path_factory.mktemp('round_trip')
  texts = [*texts, *TEXTS]
  if kind.startswith('txt'):
    texts = [text + '\n' for text in texts if text.strip() != END]
    content = f'{END}\n'.join(texts)
  else:
    content = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
  write = gzip.compress if kind.endswith('.gz') else bytes
  (folder / f'a.{kind}').write_bytes(write(content.encode()))
  config = PrepareConfig(
    data=(folder / f'a.{kind}',),
    out_dir=folder / 'out',
    vocab_size=vocab_size,
    validation_share=0.5,
  )
  prepare(config)
  train, validation = _documents(config.out_dir)
  assert train + validation == collections.Counter(filter(None, texts))
  assert all(_is_held_out(text, 0.5) for text in validation)
  assert not any(_is_held_out(text, 0.5) for text in train)


def test_the_trainer_reads_the_result(config: PrepareConfig, tmp_path: Path):
  prepare(config)
  settings = Config(
    data=str(config.out_dir), context_length=16, cache_dir=tmp_path / 'cache'
  )
  tokens = load_tokens(resolve(settings))
  assert tokens.vocab_size == 300
  assert tokens.tokenizer.decode(tokens.train[:]).startswith('the number')


def test_what_was_made_is_counted(config: PrepareConfig):
  with config.data[0].open('a') as file:
    file.write('junk\n')
  made = prepare(dataclasses.replace(config, skip_bad=True, vocab_size=257))
  size = len(''.join(TEXTS))
  held_out = [text for text in TEXTS if _is_held_out(text, 0.5)]
  # Each byte is a token, and an end-of-text token follows each document.
  tokens = len(''.join(held_out)) + len(held_out)
  assert made == {
    'documents': f'{40 - len(held_out)} to train on, {len(held_out)} held out, '
    '1 left out as not readable',
    'tokens': f'{size + 40 - tokens:,} to train on, {tokens:,} held out',
    'text': f'{size:,} bytes, {size / (size + 40):.2f} bytes per token',
    'vocabulary': '257 tokens',
    'results': str(config.out_dir),
  }


def test_documents_are_grouped_without_a_change(config, tmp_path, monkeypatch):
  prepare(config)
  monkeypatch.setattr(tokens_module, '_DOCUMENTS_AT_ONCE', 3)
  again = dataclasses.replace(config, out_dir=tmp_path / 'again')
  prepare(again)
  assert _contents(config.out_dir) == _contents(again.out_dir)


def test_long_documents_are_whole(config: PrepareConfig):
  text = ''.join(TEXTS) * 300
  _write_json(config.data[0], [*TEXTS, text])
  prepare(config)
  train, validation = _documents(config.out_dir)
  assert (train + validation)[text] == 1


def _contents(folder: Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_number_of_cores_changes_nothing(config: PrepareConfig, tmp_path):
  sizes = np.random.default_rng(0).integers(1, 40, size=500)
  words = np.random.default_rng(1).integers(10**4, size=10**4)
  texts = [' '.join(map(str, words[i : i * i])) for i in sizes]
  _write_json(config.data[0], texts)
  results = []
  for cores in ('1', '2'):
    out_dir = tmp_path / cores
    env = os.environ | {
      'RAYON_NUM_THREADS': cores,
      'TOKENIZERS_PARALLELISM': 'false',
    }
    subprocess.run(
      [sys.executable, '-m', 'examples.gpt2.prepare', '--data', config.data[0],
       '--out-dir', out_dir, '--vocab-size=300', '--validation-share=0.5'],
      check=True, env=env, capture_output=True,
    )  # fmt: skip
    results.append(_contents(out_dir))
  assert results[0] == results[1]
  assert set(results[0]) == {'train.bin', 'val.bin', 'tokenizer.json'}


def test_the_vocabulary_is_trained_on_the_smallest_hashes(config, monkeypatch):
  sampled: list[str] = []

  def train(documents, vocab_size):
    sampled.extend(documents)
    return train_tokenizer(documents, vocab_size)

  monkeypatch.setattr(prepare_module, 'train_tokenizer', train)
  size = len(TEXTS[0]) * 5
  prepare(dataclasses.replace(config, sample_bytes=size))
  candidates = sorted(
    (text for text in TEXTS if not _is_held_out(text, 0.5)),
    key=lambda text: hashlib.sha256(text.encode()).digest()[8:],
  )
  assert 2 < len(sampled) < len(candidates)
  assert sampled == candidates[: len(sampled)]
  assert len(''.join(sampled)) <= size
  assert len(''.join(candidates[: len(sampled) + 1])) > size


def _with_tokenizer(config: PrepareConfig, path: Path) -> PrepareConfig:
  return dataclasses.replace(config, tokenizer=path, vocab_size=None)


@pytest.mark.parametrize('name', ['out', 'out/tokenizer.json'])
def test_a_tokenizer_can_be_used_again(config, tmp_path, name: str):
  prepare(config)
  again = _with_tokenizer(config, tmp_path / name)
  again = dataclasses.replace(again, out_dir=tmp_path / 'again')
  prepare(again)
  assert _contents(again.out_dir) == _contents(config.out_dir)


def _without_end(tokenizer: tokenizers.Tokenizer) -> str:
  return tokenizer.to_str().replace(END, '<|end|>')


def _too_large(tokenizer: tokenizers.Tokenizer) -> str:
  tokenizer.add_tokens([f'token{i}' for i in range(65237)])
  return tokenizer.to_str()


def _lower_case(tokenizer: tokenizers.Tokenizer) -> str:
  tokenizer.normalizer = tokenizers.normalizers.Lowercase()
  return tokenizer.to_str()


def _without_a_byte(tokenizer: tokenizers.Tokenizer) -> str:
  content = json.loads(tokenizer.to_str())
  content['model']['vocab']['gone'] = content['model']['vocab'].pop('Ń')
  return json.dumps(content)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda _: 'junk', 'is no tokenizer'),
    (_without_end, r'has no token <\|endoftext\|>'),
    (_too_large, 'identifiers up to 65536: expected all to be below 65536'),
    (_lower_case, 'expected a byte-level one'),
    (_without_a_byte, 'expected a byte-level one'),
  ],
)
def test_a_tokenizer_that_would_lose_text_is_refused(
  config, tmp_path: Path, change, message: str
):
  path = tmp_path / 'given.json'
  path.write_text(change(train_tokenizer(TEXTS, 300)))
  with pytest.raises(UsageError, match=f'given.json .*{message}'):
    prepare(_with_tokenizer(config, path))


def test_a_vocabulary_of_the_largest_size_with_a_gap_is_taken(config, tmp_path):
  content = json.loads(train_tokenizer(TEXTS, 300).to_str())
  # No merge makes it, but it counts.
  content['model']['vocab']['never'] = 65535
  (tmp_path / 'large.json').write_text(json.dumps(content))
  prepare(_with_tokenizer(config, tmp_path / 'large.json'))
  settings = Config(
    data=str(config.out_dir), context_length=16, cache_dir=tmp_path / 'cache'
  )
  tokens = load_tokens(resolve(settings))
  assert tokens.vocab_size == 65536
  assert tokens.tokenizer.decode(tokens.train[:]).startswith('the number')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'vocab_size': 256}, r'--vocab-size must be in \[257, 65536\], got 256'),
    ({'vocab_size': 65537}, r'--vocab-size .* got 65537'),
    ({'tokenizer': Path('x')}, '--vocab-size 300 .*--tokenizer'),
    (
      {'tokenizer': Path('/nothing'), 'vocab_size': None},
      '/nothing is no tokenizer.*: expected a tokenizer.json',
    ),
    ({'validation_share': 0.0}, r'--validation-share .*\(0, 1\), got 0'),
    ({'validation_share': 1.0}, '--validation-share .* got 1'),
    ({'validation_share': float('nan')}, '--validation-share .* got nan'),
    ({'sample_bytes': 0}, '--sample-bytes must be at least 1, got 0'),
    ({'data': (Path('/nothing'),)}, '--data /nothing does not exist'),
    ({'validation_share': 1e-9}, '40 .* and 0 .*--validation-share than 1e-09'),
    ({'validation_share': 1 - 1e-9}, '0 documents to train on and 40 to'),
  ],
)
def test_a_setting_out_of_its_range_is_refused(config, changes, message: str):
  with pytest.raises(UsageError, match=message):
    prepare(dataclasses.replace(config, **changes))
  assert [p.name for p in config.out_dir.parent.iterdir()] == ['text.jsonl']


def test_a_folder_that_holds_something_is_refused_and_kept(config):
  config.out_dir.mkdir()
  (config.out_dir / 'precious').write_text('data')
  with pytest.raises(OSError, match='out is there and not empty'):
    prepare(config)
  assert _contents(config.out_dir) == {'precious': b'data'}


def test_an_empty_folder_is_filled(config: PrepareConfig):
  config.out_dir.mkdir()
  prepare(config)
  assert len(_contents(config.out_dir)) == 3
  assert config.out_dir.stat().st_mode & 0o777 == 0o755


def test_what_another_wrote_in_the_meantime_is_kept(config, monkeypatch):
  def train(*args):
    config.out_dir.mkdir()
    (config.out_dir / 'precious').write_text('data')
    return train_tokenizer(*args)

  monkeypatch.setattr(prepare_module, 'train_tokenizer', train)
  with pytest.raises(OSError, match='not empty'):
    prepare(config)
  assert _contents(config.out_dir) == {'precious': b'data'}


@pytest.mark.parametrize('error', [KeyboardInterrupt, OSError])
def test_a_stopped_run_leaves_nothing(config, tmp_path, monkeypatch, error):
  calls = []

  def fail(*args):
    if calls:
      raise error
    calls.append(args)
    return encode(*args)

  monkeypatch.setattr(tokens_module, 'encode', fail)
  with pytest.raises(error):
    prepare(config)
  assert [path.name for path in tmp_path.iterdir()] == ['text.jsonl']


def test_a_killed_run_leaves_no_result_and_can_be_repeated(config, tmp_path):
  code = '\n'.join(
    [
      'import os, signal, sys',
      'from examples.gpt2 import prepare',
      'from examples.gpt2.data import tokens',
      'encode, calls = tokens.encode, []',
      'def die(*args):',
      '  if calls: os.kill(os.getpid(), signal.SIGKILL)',
      '  calls.append(args)',
      '  return encode(*args)',
      'tokens.encode = die',
      'prepare.main(sys.argv[1:])',
    ]
  )
  args = ['--data', str(config.data[0]), '--out-dir', str(config.out_dir)]
  args += ['--vocab-size=300', '--validation-share=0.5']
  done = subprocess.run(
    [sys.executable, '-c', code, *args], check=False, capture_output=True
  )
  assert done.returncode == -9
  assert not config.out_dir.exists()
  assert list(tmp_path.glob('partial-*/train.bin'))
  main(args)
  assert len(_contents(config.out_dir)) == 3


def test_the_command_reports_what_it_made(config, monkeypatch, capsys):
  monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'false')
  args = ['--data', str(config.data[0]), '--out-dir', str(config.out_dir)]
  main([*args, '--vocab-size=257', '--validation-share=0.5'])
  captured = capsys.readouterr()
  assert '257 tokens' in captured.out
  assert 'tokenizing: 40 documents' in captured.err
  assert os.environ['TOKENIZERS_PARALLELISM'] == 'true'


def test_the_command_names_a_mistake(config: PrepareConfig, capsys):
  config.data[0].write_text('junk\n')
  args = ['--data', str(config.data[0]), '--out-dir', str(config.out_dir)]
  with pytest.raises(SystemExit) as exit_info:
    main(args)
  assert exit_info.value.code == 2
  assert 'error: ' in capsys.readouterr().err


def test_control_c_has_its_own_status(config, monkeypatch, capsys):
  def interrupt(_):
    raise KeyboardInterrupt

  monkeypatch.setattr(prepare_module, 'prepare', interrupt)
  with pytest.raises(SystemExit) as exit_info:
    main(['--data', 'x', '--out-dir', 'y'])
  assert exit_info.value.code == 130
  assert 'interrupted' in capsys.readouterr().err
