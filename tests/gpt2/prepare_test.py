from collections.abc import Iterable
import dataclasses
import hashlib
import json
import os
from pathlib import Path
import signal
import string
import subprocess
import sys
import time

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers

from examples.gpt2 import prepare as prepare_module
from examples.gpt2.config import Config, UsageError, change, resolve
from examples.gpt2.data.tokenizer import train_tokenizer
from examples.gpt2.data.tokens import Tokens, load_tokens
from examples.gpt2.prepare import PrepareConfig, prepare
from tests.gpt2.runs import contents

END = '<|endoftext|>'
# With this share of 0.5, some of these fall into each part.
TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(40)]


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
  path = _write_json(tmp_path / 'text.jsonl', TEXTS)
  return PrepareConfig(
    data=(str(path),), out_dir=tmp_path / 'out', vocab_size=300,
    validation_share=0.5, num_proc=1, cache_dir=tmp_path / 'cache',
  )  # fmt: skip


def _write_json(path: Path, texts: Iterable[str]) -> Path:
  content = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
  path.write_text(content)
  return path


def _arguments(config: PrepareConfig, **settings) -> list[str]:
  config = dataclasses.replace(config, **settings)
  flags = [
    f'--{name.replace("_", "-")}={value}'
    for name, value in vars(config).items()
    if name != 'data' and value is not None
  ]
  return ['--data', *config.data, *flags]


def _load(config: PrepareConfig, **settings) -> Tokens:
  data = dict(data=(str(config.out_dir),), context_length=16)
  return load_tokens(resolve(change(Config(), **data, **settings)))


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


@hypothesis.settings(max_examples=5)
@hypothesis.given(
  texts=st.lists(
    st.text(st.characters(exclude_categories=['Cs']), max_size=30)
    | st.sampled_from([END, f'a{END}b', ' \n ', '\r\n']),
    max_size=12,
  ),
  vocab_size=st.sampled_from([257, 300]),
  shard_tokens=st.sampled_from([99, 10**8]),
)
def test_documents_come_back_from_their_tokens(
  tmp_path_factory, texts, **settings
):
  folder = tmp_path_factory.mktemp('round_trip')
  texts = [*texts, *TEXTS]
  path = _write_json(folder / 'a.jsonl', texts)
  config = PrepareConfig(
    (str(path),), folder / 'out', validation_share=0.5, num_proc=1,
    cache_dir=folder / 'cache', **settings,
  )  # fmt: skip
  prepare(config)
  tokens, index = _load(config), _index(config)
  found = [
    [tokens.tokenizer.decode(ids, skip_special_tokens=False) for ids in part]
    for part in _documents(tokens)
  ]
  expected = [[x for x in texts if x and _is_held_out(x) == y] for y in (0, 1)]
  assert found == expected
  assert index['text_bytes'] == sum(len(text.encode()) for text in texts)
  assert index['end_token'] == END
  p = np.unique(tokens.train[:], return_counts=True)[1] / len(tokens.train)
  assert index['unigram_entropy'] == pytest.approx(-np.sum(p * np.log(p)))
  shards = index['shards'].values()
  for part, entries in zip(_documents(tokens), shards, strict=True):
    assert sum(entry['documents'] for entry in entries) == len(part)
    for entry in entries:
      content = (config.out_dir / entry['file']).read_bytes()
      assert hashlib.sha256(content).hexdigest() == entry['sha256']
      assert len(content) == 2 * entry['tokens']
    assert (len(entries) > 1) == (config.shard_tokens == 99)


def _with_tokenizer(config: PrepareConfig, path: Path) -> PrepareConfig:
  return dataclasses.replace(config, tokenizer=path, vocab_size=None)


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
  config = dataclasses.replace(config, data=(str(tmp_path / 'a.parquet'),))
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
  tokens = _load(config)
  assert tokens.vocab_size == size
  assert _index(config)['shards']['train'][0]['dtype'] == dtype
  assert tokens.tokenizer.decode(tokens.train[:]).startswith('the number')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'vocab_size': 256}, '--vocab-size must be at least 257, got 256'),
    ({'end_token': 'x'}, '--end-token x is for a --tokenizer'),
    ({'tokenizer': Path('x')}, '--vocab-size 300 .*--tokenizer'),
    ({'tokenizer': Path('/no'), 'vocab_size': None}, '/no is no tokenizer'),
    ({'validation_share': 0.0}, r'--validation-share .*\(0, 1\), got 0'),
    ({'data': ('/nothing',)}, '^/nothing does not exist'),
  ],
)
def test_a_setting_out_of_its_range_is_refused(config, changes, message: str):
  with pytest.raises(UsageError, match=message):
    prepare(dataclasses.replace(config, **changes))
  assert not config.out_dir.exists()


def test_shards_that_were_not_copied_whole_are_named(config):
  prepare(config)
  path = config.out_dir / 'val.bin'
  path.write_bytes(path.read_bytes()[:-2])
  with pytest.raises(UsageError, match=r'val\.bin has .* expected .* by index'):
    _load(config)


def test_a_killed_command_goes_on_to_the_files_of_one_process(
  config, tmp_path: Path
):
  texts = [f'{i} ' * (200 + i % 7) for i in range(2000)]
  _write_json(Path(config.data[0]), texts)
  # Beside the data are the results and the cache of a killed command.
  config = dataclasses.replace(
    config, data=(str(tmp_path),), shard_tokens=50_000
  )
  others = tmp_path / '.others'  # Hidden.
  prepare(
    dataclasses.replace(
      config, out_dir=others / 'out', cache_dir=others / 'cache'
    )
  )
  command = [sys.executable, '-m', 'examples.gpt2.prepare']
  command += _arguments(config, num_proc=2)
  for wanted in ('progress.json', 'progress-00003.json'):
    running = subprocess.Popen(
      command, start_new_session=True,
      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (config.out_dir / wanted).exists() and running.poll() is None:
      time.sleep(0.002)
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
  with pytest.raises(UsageError, match='has not finished: give its command'):
    _load(config)
  with pytest.raises(UsageError, match='shard_tokens: 50000 -> 98'):
    prepare(dataclasses.replace(config, shard_tokens=98))
  before = {
    x: x.stat().st_mtime_ns for x in config.out_dir.glob('train-0000[0-3].bin')
  }
  assert len(before) == 4
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  assert {x: x.stat().st_mtime_ns for x in before} == before
  assert contents(config.out_dir) == contents(others / 'out')
  assert len(contents(config.out_dir)) > 10
  tokens = _load(config)
  sizes = f'{len(tokens.train):,} to train on, {len(tokens.validation):,} held'
  assert sizes in done.stdout
  # What is there is kept.
  again = subprocess.run(command, check=False, capture_output=True, text=True)
  assert again.returncode == 2
  assert 'out is there and not empty' in again.stderr


def test_an_error_after_a_kill_deletes_nothing(config, monkeypatch):
  def kill(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(prepare_module, 'write_index', kill)
    prepare(config)
  tokenizer = config.out_dir / 'tokenizer.json'
  whole = tokenizer.read_bytes()
  tokenizer.write_bytes(whole[:100])
  with pytest.raises(UsageError, match='damaged'):
    prepare(config)
  assert (config.out_dir / 'train.bin').exists()
  tokenizer.write_bytes(whole)
  prepare(config)
  assert (config.out_dir / 'index.json').exists()
