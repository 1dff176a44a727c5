from collections.abc import Iterable
import dataclasses
import gzip
import hashlib
import json
import os
from pathlib import Path
import string
import subprocess
import sys

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers

from examples.gpt2 import prepare as prepare_module
from examples.gpt2.config import Config, UsageError
from examples.gpt2.data import tokenizer as tokenizer_module
from examples.gpt2.data.counts import entropy
from examples.gpt2.data.tokenizer import Encoder, train_tokenizer
from examples.gpt2.data.tokens import Tokens, load_tokens
from examples.gpt2.prepare import PrepareConfig, main, prepare
from examples.gpt2.presets import resolve
from tests.gpt2.runs import contents

END = '<|endoftext|>'
# With this share of 0.5, some of these fall into each part.
TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(40)]


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
  path = _write_json(tmp_path / 'text.jsonl', TEXTS)
  return PrepareConfig(
    data=(path,), out_dir=tmp_path / 'out', vocab_size=300, validation_share=0.5
  )


def _write_json(path: Path, texts: Iterable[str]) -> Path:
  content = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
  path.write_text(content)
  return path


def _arguments(config: PrepareConfig) -> list[str]:
  args = ['--data', str(config.data[0]), '--out-dir', str(config.out_dir)]
  return [*args, '--vocab-size=300', '--validation-share=0.5']


def _load(config: PrepareConfig, **settings) -> Tokens:
  data = dict(data=str(config.out_dir), context_length=16)
  return load_tokens(resolve(Config(**data, **settings)))


def _index(config: PrepareConfig) -> dict:
  return json.loads((config.out_dir / 'index.json').read_text())


def _documents(tokens: Tokens) -> list[list[list[int]]]:
  """Returns the tokens of the documents of both parts."""
  parts = []
  for ids in (tokens.train[:], tokens.validation[:]):
    ends = np.flatnonzero(ids == tokens.tokenizer.token_to_id(tokens.end_token))
    assert ends[-1] == len(ids) - 1
    *documents, _ = np.split(ids, ends + 1)
    parts.append([document[:-1].tolist() for document in documents])
  return parts


def _is_held_out(text: str) -> bool:
  digest = hashlib.sha256(text.encode()).hexdigest()
  return int(digest[:16], 16) / 2**64 < 0.5


@hypothesis.settings(max_examples=15)
@hypothesis.given(
  texts=st.lists(
    st.text(st.characters(exclude_categories=['Cs']), max_size=30)
    | st.sampled_from([END, f'a{END}b', ' \n ', '\r\n']),
    max_size=12,
  ),
  kind=st.sampled_from(['jsonl', 'jsonl.gz', 'txt', 'txt.gz']),
  vocab_size=st.sampled_from([257, 300]),
  shard_tokens=st.sampled_from([99, 10**8]),
)
def test_documents_come_back_from_their_tokens(
  tmp_path_factory, texts, kind, **settings
):
  folder = tmp_path_factory.mktemp('round_trip')
  texts = [*texts, *TEXTS]
  if kind.startswith('txt'):
    texts = [text + '\n' for text in texts if text.strip() != END]
    content = f'{END}\n'.join(texts)
  else:
    content = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
  write = gzip.compress if kind.endswith('.gz') else bytes
  path, out = folder / f'a.{kind}', folder / 'out'
  path.write_bytes(write(content.encode()))
  config = PrepareConfig((path,), out, validation_share=0.5, **settings)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tokenizer_module, '_CHARACTERS_AT_ONCE', 70)
    prepare(config)
  tokens, index = _load(config), _index(config)
  found = [
    [tokens.tokenizer.decode(ids, skip_special_tokens=False) for ids in part]
    for part in _documents(tokens)
  ]
  assert sorted(sum(found, [])) == sorted(filter(None, texts))
  assert [{*map(_is_held_out, part)} for part in found] == [{False}, {True}]
  assert index['text_bytes'] == sum(len(text.encode()) for text in texts)
  assert index['end_token'] == END
  counts = np.bincount(np.concatenate([tokens.train[:], tokens.validation[:]]))
  assert index['unigram_entropy'] == pytest.approx(entropy(counts))
  for part, entries in zip(
    _documents(tokens), index['shards'].values(), strict=True
  ):
    _assert_described(out, entries, [len(ids) + 1 for ids in part])
    sizes = [entry['tokens'] for entry in entries[:-1]]
    assert all(size >= config.shard_tokens for size in sizes)
    assert bool(sizes) == (config.shard_tokens == 99)


def _assert_described(folder: Path, entries: list[dict], expected: list[int]):
  """Checks what the index says of shards, by the lengths of documents."""
  found: list[int] = []
  for entry in entries:
    path = folder / entry['file']
    content = path.read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry['sha256']
    assert len(content) == 2 * entry['tokens']
    lengths = np.load(folder / 'documents' / f'{path.stem}.npy')
    assert len(lengths) == entry['documents']
    assert lengths.sum() == entry['tokens']
    found.extend(lengths)
  assert found == expected


def test_the_number_of_cores_changes_nothing(config: PrepareConfig, tmp_path):
  sizes = np.random.default_rng(0).integers(1, 40, size=500)
  words = np.random.default_rng(1).integers(10**4, size=10**4)
  texts = [' '.join(map(str, words[i : i * i])) for i in sizes]
  _write_json(config.data[0], texts)
  prepare(config)
  alone = {'RAYON_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false'}
  args = _arguments(dataclasses.replace(config, out_dir=tmp_path / 'alone'))
  subprocess.run(
    [sys.executable, '-m', 'examples.gpt2.prepare', *args],
    check=True, env=os.environ | alone, capture_output=True,
  )  # fmt: skip
  assert contents(tmp_path / 'alone') == contents(config.out_dir)
  assert set(contents(config.out_dir)) == {
    'train.bin', 'val.bin', 'documents/train.npy', 'documents/val.npy',
    'index.json', 'tokenizer.json', 'tokenizer_config.json',
  }  # fmt: skip


def test_the_vocabulary_is_trained_on_the_smallest_hashes(config, monkeypatch):
  sampled: list[str] = []

  def train(documents, vocab_size):
    sampled.extend(documents)
    return train_tokenizer(documents, vocab_size)

  monkeypatch.setattr(prepare_module, 'train_tokenizer', train)
  size = len(TEXTS[0]) * 5
  prepare(dataclasses.replace(config, sample_bytes=size))
  candidates = sorted(
    (text for text in TEXTS if not _is_held_out(text)),
    key=lambda text: hashlib.sha256(text.encode()).digest()[8:],
  )
  assert 2 < len(sampled) < len(candidates)
  assert sampled == candidates[: len(sampled)]
  assert len(''.join(sampled)) <= size
  assert len(''.join(candidates[: len(sampled) + 1])) > size


def _with_tokenizer(config: PrepareConfig, path: Path) -> PrepareConfig:
  return dataclasses.replace(config, tokenizer=path, vocab_size=None)


def _lower_case(tokenizer: tokenizers.Tokenizer) -> str:
  tokenizer.normalizer = tokenizers.normalizers.Lowercase()
  return tokenizer.to_str()


def _without_a_byte(tokenizer: tokenizers.Tokenizer) -> str:
  content = json.loads(tokenizer.to_str())
  content['model']['vocab']['gone'] = content['model']['vocab'].pop('Ń')
  return json.dumps(content)


@pytest.mark.parametrize('change', [_lower_case, _without_a_byte])
def test_a_tokenizer_that_would_lose_text_is_refused(config, tmp_path, change):
  path = tmp_path / 'given.json'
  path.write_text(change(train_tokenizer(TEXTS, 300)))
  with pytest.raises(UsageError, match='given.json .*expected a byte-level'):
    prepare(_with_tokenizer(config, path))


# The options of published tokenizers; their vocabularies would be too large.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def _llama_2() -> tokenizers.Tokenizer:
  """SentencePiece with bytes to fall back on, as transformers converts it."""
  space = '\u2581'
  names = ['<unk>', '<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256))]
  names += [space, *string.ascii_lowercase, space + 't', 'he', space + 'the']
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      {name: i for i, name in enumerate(names)},
      [(space, 't'), ('h', 'e'), (space + 't', 'he')],
      unk_token='<unk>', fuse_unk=True, byte_fallback=True,
    )
  )  # fmt: skip
  normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Prepend(space), normalizers.Replace(' ', space)]
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace(space, ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(' ', 1, 0),
    ]
  )
  tokenizer.add_special_tokens(['<unk>', '<s>', '</s>'])
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 1)]
  )
  return tokenizer


def _byte_level(*special: str, split: str = '', nfc: bool = False):
  model = json.loads(train_tokenizer(TEXTS, 300).to_str())['model']
  merges = [tuple(x) for x in model['merges']]
  vocab = [x for x in model['vocab'] if x != END]
  vocab = {name: i for i, name in enumerate(vocab)}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
  level = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=not split)
  tokenizer.pre_tokenizer = level
  if split:
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), 'isolated')
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, level])
  if nfc:
    tokenizer.normalizer = tokenizers.normalizers.NFC()
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(list(special))
  return tokenizer


def _llama_3():
  special = '<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>'
  return _byte_level(*special, split=_SPLIT)


def _qwen():
  special = END, '<|im_start|>', '<|im_end|>'
  return _byte_level(*special, split=_SPLIT.replace('{1,3}', ''), nfc=True)


# Tokenizers, the file that names the end of a text, what it says, and the end.
PUBLISHED = {
  'Llama 2': (_llama_2, 'tokenizer_config.json', {'eos_token': '</s>'}, '</s>'),
  'Llama 3': (
    _llama_3, 'config.json', {'eos_token_id': 300}, '<|end_of_text|>',
  ),
  'Llama 3, instruct': (
    _llama_3, 'generation_config.json', {'eos_token_id': [300, 301]},
    '<|end_of_text|>',
  ),
  'Qwen': (
    _qwen, 'special_tokens_map.json', {'eos_token': {'content': END}}, END,
  ),
}  # fmt: skip
_HARD = [
  ' two  spaces first', 'and\n\n  lines\r\n\tof code\n',
  'e\u0301 and caf\u00e9', '\u6f22\u5b57 \U0001f600',
  '<s> </s> <|endoftext|> <|end_of_text|>', '\n',
  'the end of the line\n' * 8000,
]  # fmt: skip


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_tokenizers_are_taken(config, tmp_path: Path, name: str):
  make, file, content, end = PUBLISHED[name]
  folder, tokenizer = tmp_path / 'published', make()
  folder.mkdir()
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / file).write_text(json.dumps(content))
  texts = TEXTS + _HARD
  pa.parquet.write_table(pa.table({'text': texts}), tmp_path / 'a.parquet')
  config = dataclasses.replace(config, data=(tmp_path / 'a.parquet',))
  prepare(_with_tokenizer(config, folder))
  tokens = _load(config)
  assert tokens.end_token == end
  # As the library itself has them, text that spells special tokens out too.
  tokenizer.encode_special_tokens = True
  expected = [tokenizer.encode(x, add_special_tokens=False).ids for x in texts]
  assert sorted(sum(_documents(tokens), [])) == sorted(expected)


def test_an_end_token_is_never_assumed(config, tmp_path: Path):
  path = tmp_path / 'given.json'
  _qwen().save(str(path))
  given = _with_tokenizer(config, path)
  with pytest.raises(UsageError, match=r'--end-token, out of .*<\|im_end\|>'):
    prepare(given)
  with pytest.raises(UsageError, match='given.json has no token <end>'):
    prepare(dataclasses.replace(given, end_token='<end>'))
  prepare(dataclasses.replace(given, end_token='<|im_end|>'))
  assert _index(config)['end_token'] == '<|im_end|>'


def test_an_end_token_that_text_becomes_too_is_refused(config, tmp_path: Path):
  path = tmp_path / 'given.json'
  tokenizer = _byte_level(END)
  tokenizer.save(str(path))
  given = _with_tokenizer(config, path)
  for end in ('n', max(tokenizer.get_vocab(with_added_tokens=False), key=len)):
    with pytest.raises(UsageError, match='does not (give back|tell where)'):
      prepare(dataclasses.replace(given, end_token=end))


@pytest.mark.parametrize(
  ('size', 'dtype'), [(65536, 'uint16'), (65537, 'uint32')]
)
def test_the_size_of_the_vocabulary_decides_the_type(
  config, tmp_path, size: int, dtype: str
):
  content = json.loads(train_tokenizer(TEXTS, 300).to_str())
  # No merge makes it, but it counts.
  content['model']['vocab']['never'] = size - 1
  path = tmp_path / 'large.json'
  path.write_text(json.dumps(content))
  prepare(_with_tokenizer(config, path))
  tokens = _load(config, cache_dir=tmp_path / 'cache')
  assert tokens.vocab_size == size
  assert _index(config)['shards']['train'][0]['dtype'] == dtype
  assert tokens.tokenizer.decode(tokens.train[:]).startswith('the number')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'vocab_size': 256}, '--vocab-size must be at least 257, got 256'),
    ({'shard_tokens': 0}, '--shard-tokens must be at least 1, got 0'),
    ({'end_token': 'x'}, '--end-token x is for a --tokenizer'),
    ({'tokenizer': Path('x')}, '--vocab-size 300 .*--tokenizer'),
    ({'tokenizer': Path('/no'), 'vocab_size': None}, '/no is no tokenizer'),
    ({'validation_share': 0.0}, r'--validation-share .*\(0, 1\), got 0'),
    ({'validation_share': 1.0}, '--validation-share .* got 1'),
    ({'sample_bytes': 0}, '--sample-bytes must be at least 1, got 0'),
    ({'data': (Path('/nothing'),)}, '^/nothing does not exist'),
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
  precious = config.out_dir / 'precious'
  precious.write_text('data')
  with pytest.raises(OSError, match='out is there and not empty'):
    prepare(config)
  assert contents(config.out_dir) == {'precious': b'data'}
  precious.unlink()
  prepare(config)
  assert 'index.json' in contents(config.out_dir)


def test_a_second_run_is_refused_and_changes_nothing(
  config, tmp_path, monkeypatch
):
  expected = dataclasses.replace(config, out_dir=tmp_path / 'alone')
  prepare(expected)

  def train_beside_another(*args):
    with pytest.raises(UsageError, match='in use by a run that goes on'):
      prepare(config)
    return train_tokenizer(*args)

  monkeypatch.setattr(prepare_module, 'train_tokenizer', train_beside_another)
  prepare(config)
  assert contents(config.out_dir) == contents(expected.out_dir)


@pytest.mark.parametrize('names', [[], ['precious']])
def test_a_stopped_run_without_a_shard_leaves_only_what_others_wrote(
  config, monkeypatch, names: list[str]
):
  def stop(*_):
    for name in names:
      (config.out_dir / name).write_text('data')
    raise KeyboardInterrupt

  monkeypatch.setattr(Encoder, 'documents', stop)
  with pytest.raises(KeyboardInterrupt):
    prepare(config)
  assert config.out_dir.exists() == bool(names)
  assert [*contents(config.out_dir)] == names


_DIE = """
import os, signal, sys
from examples.gpt2 import prepare, storage
from examples.gpt2.data import tokenizer, writer
tokenizer._CHARACTERS_AT_ONCE = 70
function, calls = getattr(writer, sys.argv[1]), []
def die(*args):
  calls.append(args)
  if len(calls) == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)
  return function(*args)
setattr(writer, sys.argv[1], die)
prepare.main(sys.argv[3:])
"""


@pytest.mark.parametrize(
  ('function', 'call'),
  [
    ('write_whole', 1), ('write_whole', 2), ('write_whole', 5),
    ('whole_file', 2), ('entropy', 1),
  ],
)  # fmt: skip
def test_a_killed_run_goes_on_to_the_same_files(
  config, tmp_path, monkeypatch, function: str, call: int
):
  monkeypatch.setattr(tokenizer_module, '_CHARACTERS_AT_ONCE', 70)
  with config.data[0].open('a') as file:
    file.write('junk\n')
  made = dataclasses.replace(config, shard_tokens=99, skip_bad=True)
  expected = dataclasses.replace(made, out_dir=tmp_path / 'whole')
  report = prepare(expected)
  args = [*_arguments(config), '--shard-tokens=99', '--skip-bad']
  done = subprocess.run(
    [sys.executable, '-c', _DIE, function, str(call), *args],
    check=False, capture_output=True,
  )  # fmt: skip
  assert done.returncode == -9, done.stderr
  if (config.out_dir / 'progress.json').exists():
    with pytest.raises(UsageError, match='has not finished: give its command'):
      _load(config)
    with pytest.raises(UsageError, match='shard_tokens: 99 -> 98'):
      prepare(dataclasses.replace(made, shard_tokens=98))
  again = prepare(made)
  assert contents(config.out_dir) == contents(expected.out_dir)
  assert len(contents(config.out_dir)) > 10
  assert report.pop('results') != again.pop('results')
  assert report == again


@pytest.mark.parametrize('damage', ['lost', 'cut off'])
def test_shards_that_were_not_copied_whole_are_named(config, damage: str):
  prepare(config)
  path = config.out_dir / 'val.bin'
  content = path.read_bytes()
  path.unlink()
  if damage == 'cut off':
    path.write_bytes(content[:-2])
  with pytest.raises(UsageError, match=r'val\.bin has .* expected .* by index'):
    _load(config)


def test_the_command_reports_what_it_made_or_a_mistake(
  config, monkeypatch, capsys
):
  monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'false')
  main(_arguments(config))
  captured, tokens = capsys.readouterr(), _load(config)
  sizes = f'{len(tokens.train):,} to train on, {len(tokens.validation):,} held'
  assert sizes in captured.out
  assert 'tokenizing: 40 documents' in captured.err
  assert os.environ['TOKENIZERS_PARALLELISM'] == 'true'
  with pytest.raises(SystemExit) as exit_info:
    main(_arguments(config))
  assert exit_info.value.code == 2
  assert 'error: ' in capsys.readouterr().err
