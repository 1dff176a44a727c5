from collections.abc import Iterable
import dataclasses
import functools
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

from examples.gpt2 import train
from examples.gpt2.command import UsageError
from examples.gpt2.config import Config, change
from examples.gpt2.data import Data, load_data
from examples.gpt2.prepare import (
  PrepareConfig,
  main,
  prepare,
)
from examples.gpt2.resolve import resolve
from examples.gpt2.token_files import open_part
from examples.gpt2.tokenizer import (
  find_end_token,
  read_shared,
  read_tokenizer,
  train_tokenizer,
)
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
    if name != 'data' and value not in (None, False)
  ]
  return ['--data', *config.data, *flags]


def _load(config: PrepareConfig) -> Data:
  return load_data(
    resolve(change(Config(), data=(str(config.out_dir),), context_length=16))
  )


def _index(config: PrepareConfig) -> dict:
  return json.loads((config.out_dir / 'index.json').read_text())


def _documents(folder: Path) -> list[list[list[int]]]:
  """Returns the tokens of the documents of both parts."""
  tokenizer, parts = read_tokenizer(folder), []
  end = tokenizer.token_to_id(find_end_token(folder, tokenizer))
  for part in ('train', 'val'):
    ids = np.concatenate(open_part(folder, part, 1 << 31))
    ends = np.flatnonzero(ids == end)
    assert ends[-1] == len(ids) - 1
    *documents, _ = np.split(ids, ends + 1)
    parts.append([document[:-1].tolist() for document in documents])
  return parts


def _hash(text: str) -> int:
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'little')


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
  texts = [*texts, *TEXTS, *TEXTS[:9]]
  path = _write_json(folder / 'a.jsonl', texts)
  config = PrepareConfig(
    (str(path),), folder / 'out', validation_share=0.5, num_proc=1,
    cache_dir=folder / 'cache', **settings,
  )  # fmt: skip
  prepare(config)
  tokenizer, index = read_tokenizer(config.out_dir), _index(config)
  train, held_out = (
    [tokenizer.decode(ids, skip_special_tokens=False) for ids in part]
    for part in _documents(config.out_dir)
  )
  kept = [text for text in texts if text]
  # Those of the lowest hashes are held out, up to the share of the bytes.
  border = max(map(_hash, held_out))
  assert held_out == [x for x in kept if _hash(x) <= border]
  assert train == [x for x in kept if _hash(x) > border]
  size = sum(len(text.encode()) for text in kept)
  assert size / 4 < sum(len(text.encode()) for text in held_out) <= size / 2
  assert index['end_token'] == END
  for entries in index['shards'].values():
    for name, count in entries.items():
      assert (config.out_dir / name).stat().st_size == 2 * count
    assert (len(entries) > 1) == (config.shard_tokens == 99)


@pytest.mark.parametrize('sizes', [[5000], [9000, *[26] * 45], [26] * 300])
def test_a_small_text_has_a_twentieth_held_out(tmp_path: Path, sizes):
  texts = tmp_path / 'texts'
  texts.mkdir()
  for i, size in enumerate(sizes):
    lines = ''.join(f'{i} {number}\n' for number in range(size))
    (texts / f'{i:03}.txt').write_text(lines)
  config = PrepareConfig(
    (str(texts),), tmp_path / 'out', vocab_size=300, num_proc=1,
    cache_dir=tmp_path / 'cache',
  )  # fmt: skip
  prepare(config)
  tokenizer = read_tokenizer(config.out_dir)
  train, held_out = (
    [tokenizer.decode(ids) for ids in part]
    for part in _documents(config.out_dir)
  )
  files = [path.read_text() for path in sorted(texts.iterdir())]
  # All text is in one of the parts, whose pieces end with a line.
  whole = sorted(''.join((*train, *held_out)).splitlines())
  assert whole == sorted(''.join(files).splitlines())
  assert all(text.endswith('\n') for text in (*train, *held_out))
  share = sum(map(len, held_out)) / sum(map(len, files))
  assert 0.02 < share < 0.06
  # No more than one document is in both.
  assert len(train) + len(held_out) <= len(files) + 1


def test_it_starts_without_jax():
  program = "import sys, examples.gpt2.prepare; sys.exit('jax' in sys.modules)"
  assert subprocess.call([sys.executable, '-c', program]) == 0


def test_a_text_too_short_to_split_is_refused(tmp_path: Path):
  (tmp_path / 'a.txt').write_text('\n')
  config = PrepareConfig((str(tmp_path / 'a.txt'),), tmp_path / 'out')
  config = dataclasses.replace(config, num_proc=1, cache_dir=tmp_path / 'cache')
  with pytest.raises(UsageError, match=r'a\.txt is too short'):
    prepare(config)
  assert not config.out_dir.exists()


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
  tokenizer = _byte_level(*special, split=_SPLIT)
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single=f'{special[0]} $A',
    special_tokens=[(special[0], tokenizer.token_to_id(special[0]))],
  )
  return tokenizer


def _qwen():
  special = END, '<|im_start|>', '<|im_end|>'
  return _byte_level(*special, split=_SPLIT.replace('{1,3}', ''), nfc=True)


# Tokenizers, the token that is named as the end of a text, and the end.
PUBLISHED = {
  'Llama 2': (_llama_2, '</s>', '</s>'),
  'Llama 3': (
    _llama_3, {'content': '<|end_of_text|>'}, '<|end_of_text|>',
  ),
  'Qwen': (_qwen, END, END),
  'GPT-2': (functools.partial(_byte_level, END), None, END),
}  # fmt: skip
_HARD = [
  ' two  spaces first', 'and\n\n  lines\r\n\tof code\n',
  'e\u0301 and caf\u00e9', '\u6f22\u5b57 \U0001f600',
  '<s> </s> <|endoftext|> <|end_of_text|>', '\n',
  'the end of the line\n' * 8000,
]  # fmt: skip


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_tokenizers_are_taken(config, tmp_path: Path, name: str):
  make, named, end = PUBLISHED[name]
  folder, tokenizer = tmp_path / 'published', make()
  folder.mkdir()
  tokenizer.save(str(folder / 'tokenizer.json'))
  settings = {'eos_token': named}
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  texts = TEXTS + _HARD
  pa.parquet.write_table(pa.table({'text': texts}), tmp_path / 'a.parquet')
  config = dataclasses.replace(config, data=(str(tmp_path / 'a.parquet'),))
  # A share that needs no part of the long one.
  config = dataclasses.replace(config, validation_share=0.002)
  prepare(_with_tokenizer(config, folder))
  assert read_shared([config.out_dir])['end_token'] == end
  # As the library itself has them, text that spells special tokens out too.
  tokenizer.encode_special_tokens = True
  expected = [tokenizer.encode(x).ids for x in texts]
  assert sorted(sum(_documents(config.out_dir), [])) == sorted(expected)


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
  data = _load(config)
  assert data.vocab_size == size
  assert _index(config)['dtype'] == dtype
  tokenizer = read_tokenizer(config.out_dir)
  start = tokenizer.decode(data.evaluations[0].sequences[0])
  assert start.startswith('the number')


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


def test_bad_documents_are_skipped_and_named_in_the_index(config):
  path = Path(config.data[0])
  path.write_text(path.read_text() + 'junk\n')
  with pytest.raises(UsageError, match=r'line 41 cannot .*\(--skip-bad'):
    prepare(config)
  config = dataclasses.replace(config, skip_bad=True)
  assert '1 that cannot be read' in prepare(config)['skipped']
  [skipped] = _index(config)['skipped']
  assert f'{path}, line 41' in skipped


def test_a_repeated_flag_is_refused(capsys):
  for command in (main, train.main):
    with pytest.raises(SystemExit, match='2'):
      command(['--data', 'a', '--data=b', '--out-dir', 'c'])
    assert '--data is given 2 times' in capsys.readouterr().err


def test_a_killed_command_goes_on_to_the_files_of_one_process(
  config, tmp_path: Path
):
  texts = [f'{i} ' * (100 + i % 7) for i in range(4000)]
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
  for wanted in ('index.json', 'train-00003.bin'):
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
  for name, content in contents(others / 'out').items():
    if name != 'index.json':
      assert (config.out_dir / name).read_bytes() == content
  index, expected = (
    json.loads((x / 'index.json').read_text())
    for x in (config.out_dir, others / 'out')
  )
  assert index == expected
  assert len(index['shards']['train']) > 4
  counts = [sum(x.values()) for x in index['shards'].values()]
  assert '{:,} to train on, {:,} held'.format(*counts) in done.stdout
  # What is there is kept.
  again = subprocess.run(command, check=False, capture_output=True, text=True)
  assert again.returncode == 2
  assert 'out is there and not empty' in again.stderr
