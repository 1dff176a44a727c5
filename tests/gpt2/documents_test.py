import bz2
import codecs
import gzip
import json
import lzma
from pathlib import Path
import re

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from examples.gpt2.command import UsageError
from examples.gpt2.documents import describe, find_files, load_documents

_MIXED = ['one\r\n', 'two é漢😀', '', 'three\n\nlines']


def _two_frames(content: bytes) -> bytes:
  middle = len(content) // 2
  parts = content[:middle], content[middle:]
  return b''.join(map(zstandard.compress, parts))


_PACK = {
  '': bytes, '.gz': gzip.compress, '.bz2': bz2.compress, '.xz': lzma.compress,
  '.zst': _two_frames,
}  # fmt: skip


def _read(data, tmp_path: Path, field: str = 'text') -> list[str]:
  found, skipped = load_documents(find_files(data), field, tmp_path / '.cache')
  assert not skipped
  return found['text'][:]


def _lines(texts, field: str = 'text') -> bytes:
  rows = [{'id': i, field: x, 'meta': {'n': i}} for i, x in enumerate(texts)]
  return ''.join(json.dumps(row) + '\n' for row in rows).encode()


@pytest.mark.parametrize(
  ('name', 'packing'),
  [
    *(('a.jsonl', packing) for packing in _PACK),
    ('a.NDJSON', ''),
    ('a.json', '.gz'),
    ('a.txt', ''),
    ('a.txt', '.zst'),
  ],
)
def test_compressed_files_are_read(tmp_path: Path, name: str, packing: str):
  content = '\n<|endoftext|>\n'.join(_MIXED).encode()
  expected = ['one\r\n\n', 'two é漢😀\n', '\n', 'three\n\nlines']
  if name != 'a.txt':
    content, expected = _lines(_MIXED), _MIXED
  if name == 'a.json':
    content = json.dumps([{'text': text} for text in _MIXED]).encode()
  path = tmp_path / (name + packing)
  for start in (b'', codecs.BOM_UTF8):
    path.write_bytes(_PACK[packing](start + content))
    assert _read([path], tmp_path) == expected


def test_parquet_of_all_kinds_and_odd_places_is_read(tmp_path: Path):
  folder = tmp_path / 'odd [1]*?'
  folder.mkdir()
  (folder / 'README.md').write_text('describes it')
  for i, column in enumerate(
    [
      pa.array(_MIXED),
      pa.array(_MIXED, pa.large_string()),
      pa.array(_MIXED).dictionary_encode(),
      pa.array(_MIXED, pa.string_view()),
      pa.array(['a', None]),
    ]
  ):
    table = pa.table({'content': column, 'other': [{'x': 1}] * len(column)})
    pa.parquet.write_table(table, folder / f'{i}.parquet')
  found = _read([folder], tmp_path, 'content')
  assert found == [*_MIXED * 4, 'a', None]


def test_an_empty_parquet_file_has_no_documents(tmp_path: Path):
  table = pa.table({'text': pa.array([], pa.string())})
  pa.parquet.write_table(table, tmp_path / 'a.parquet')
  pa.parquet.write_table(pa.table({'text': ['a']}), tmp_path / 'b.parquet')
  assert _read([tmp_path], tmp_path) == ['a']


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ([1, 2], r"'content' is of int64: expected --text-field out of url"),
    ([b'a', b'b'], r"'content' is of binary"),
    ([{'text': 'a'}] * 2, r"'content' is of struct"),
    (None, r"'content' is not there: .* --text-field out of url"),
  ],
)
def test_a_column_that_is_no_text_is_named(tmp_path: Path, values, message):
  columns = {'url': ['u', 'v']} | ({'content': values} if values else {})
  pa.parquet.write_table(pa.table(columns), tmp_path / 'a.parquet')
  with pytest.raises(UsageError, match=f'a.parquet .*the column {message}'):
    _read([tmp_path], tmp_path, 'content')


def test_fields_beside_the_text_may_be_anything(tmp_path: Path):
  # A reader of whole rows refuses what changes after its first megabytes.
  rows = [
    {'text': 'long ' * 10**6, 'x': 1},
    {'x': 'one', 'text': None},
    {'text': 'late', 'x': [2], 'y': {}},
  ]
  lines = [json.dumps(row) for row in rows]
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines * 3) + '\n\n')
  (tmp_path / 'b.jsonl').write_text('{"y": [2], "text": "b"}')
  (tmp_path / 'c.txt').write_text('c')
  expected = [row['text'] for row in rows] * 3
  assert _read([tmp_path], tmp_path) == [*expected, None, 'b', 'c']
  (tmp_path / 'b.jsonl').write_text('{"meta": {"text": "in"}}\n"x"\nnull')
  assert _read([tmp_path / 'b.jsonl'], tmp_path, 'meta.text') == [
    'in', 'x', None,
  ]  # fmt: skip


_BAD = [
  ('a.jsonl', b'{"text": "a"}\njunk\n', r'a\.jsonl, line 2 cannot be read'),
  ('a.jsonl', b'{"x": "y"}\n', "line 1 .*no 'text': --text-field may be x"),
  ('a.jsonl', b'{"text": 1}\n', "line 1 .*'text' is int, and no text"),
  ('a.jsonl', b'{"text": "\\ud83d"}\n', 'line 1 .* surrogates'),
  ('a.jsonl', b'{"text": "\xe9"}\n', "line 1 .*utf-8"),
  ('a.json', b'["x", 2]', r'a\.json, item 2 .*is int'),
  ('a.parquet', b'PAR1 junk', r'a\.parquet cannot be read'),
  ('a.txt', b'\xe9', r"a\.txt cannot be read: 'utf-8'"),
  # In the name of a test, a time would differ between workers.
  (
    'a.txt.gz', gzip.compress(b'text' * 99, mtime=0)[:-9],
    r'a\.txt\.gz cannot be read',
  ),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'content', 'message'), _BAD)
def test_what_is_bad_is_named_and_may_be_skipped(
  tmp_path: Path, name: str, content: bytes, message: str
):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UsageError, match=message):
    _read([tmp_path / name], tmp_path)
  (tmp_path / 'good.txt').write_text('good')
  if name == 'a.json':  # Beside text, it would be text.
    (tmp_path / 'good.txt').rename(tmp_path / 'good.jsonl')
    (tmp_path / 'good.jsonl').write_text('["good"]')
  found, [fault] = load_documents(
    find_files([tmp_path]), 'text', tmp_path / '.cache', skip_bad=True
  )
  assert found['text'][-1] == 'good'
  assert re.search(message, fault)


def test_changed_files_are_read_again_and_long_texts_are_cut(tmp_path: Path):
  path = tmp_path / 'a.txt'
  path.write_text('x' * 100 + '\n')
  _read([path], tmp_path)
  text = ('x' * 100 + '\n') * 30_000
  path.write_text(text)
  found = _read([path], tmp_path)
  assert ''.join(found) == text
  assert len(found) == 3
  assert all(x.endswith('\n') for x in found)
  path.write_text('x' * (1 << 21))
  assert [*map(len, _read([path], tmp_path))] == [1 << 20, 1 << 20, 0]


def test_folders_of_runs_and_caches_are_not_read_as_text(tmp_path: Path):
  (tmp_path / 'a.txt').write_text('some text\n' * 99)
  before = find_files([tmp_path])
  run = tmp_path / 'run'
  for name in ('model.json', 'checkpoints/1/x', 'hf/1/config.json', 'a.txt'):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text('of the run')
  cache = tmp_path / 'cache'
  (cache / 'x').mkdir(parents=True)
  (cache / 'x' / 'tokenizer.json').write_text('{}')
  (tmp_path / '.git').write_text('hidden')
  assert find_files([tmp_path], [cache]) == before


def test_what_is_left_out_is_told(tmp_path: Path):
  (tmp_path / 'b.png').write_bytes(b'\x89PNG\r\n\0\0')
  (tmp_path / 'c.txt').write_bytes('text'.encode('utf-16'))
  (tmp_path / 'd.jsonl').touch()
  for name, what in (('b.png', 'binary'), ('c.txt', 'UTF-16')):
    with pytest.raises(UsageError, match=f'{name} holds no UTF-8.* {what}'):
      find_files([tmp_path / name])
  with pytest.raises(UsageError, match='no files of text, but 1 binary'):
    find_files([tmp_path])
  (tmp_path / 'a.txt').write_text('text')
  assert describe(find_files([tmp_path])) == {
    'read': '1 of text',
    'left out': '1 binary (b.png); 1 UTF-16 (c.txt); 1 empty (d.jsonl)',
  }


def test_linked_folders_are_read_once(tmp_path: Path):
  for name in ('data/own', 'other'):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / 'a.txt').write_text(name)
  data = tmp_path / 'data'
  (data / 'linked').symlink_to(tmp_path / 'other')
  (data / 'own/circle').symlink_to(data)
  found = _read([data, data / 'linked', tmp_path / 'other'], tmp_path)
  assert found == ['other', 'data/own']


def test_json_of_a_data_set_is_documents_and_of_code_is_text(tmp_path: Path):
  (tmp_path / 'train.json').write_text('[{"text": "a"}]')
  (tmp_path / 'README.md').write_text('describes it')
  (tmp_path / 'dataset_info.json').write_text('{\n}')
  assert _read([tmp_path], tmp_path) == ['a']
  assert 'README.md' in describe(find_files([tmp_path]))['left out']
  (tmp_path / 'a.py').write_text('import this')
  assert _read([tmp_path], tmp_path) == [
    'describes it', 'import this', '{\n}', '[{"text": "a"}]',
  ]  # fmt: skip
