import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from examples.gpt2.config import UsageError
from examples.gpt2.data.documents import load_documents
from examples.gpt2.data.files import find_files

TEXTS = ['one\r\n', 'two é漢😀', '', 'three\n\nlines']
_PACK = {
  '': bytes, '.gz': gzip.compress, '.bz2': bz2.compress, '.xz': lzma.compress,
  '.zst': zstandard.compress,
}  # fmt: skip


def _read(paths: list[Path], tmp_path: Path, field: str = 'text') -> list[str]:
  return load_documents(paths, field, tmp_path / 'cache')['text'][:]


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
  content = '\n<|endoftext|>\n'.join(TEXTS).encode()
  expected = ['one\r\n\n', 'two é漢😀\n', '\n', 'three\n\nlines']
  if name != 'a.txt':
    content, expected = _lines(TEXTS), TEXTS
  if name == 'a.json':
    content = json.dumps([{'text': text} for text in TEXTS]).encode()
  path = tmp_path / (name + packing)
  path.write_bytes(_PACK[packing](content))
  assert _read([path], tmp_path) == expected


def test_parquet_of_all_kinds_and_odd_places_is_read(tmp_path: Path):
  folder = tmp_path / 'odd [1]*?'
  folder.mkdir()
  (folder / 'README.md').write_text('describes it')
  for i, column in enumerate(
    [
      pa.array(TEXTS),
      pa.array(TEXTS, pa.large_string()),
      pa.array(TEXTS).dictionary_encode(),
      pa.array(['a', None]),
    ]
  ):
    table = pa.table({'content': column, 'other': [{'x': 1}] * len(column)})
    pa.parquet.write_table(table, folder / f'{i}.parquet')
  found = _read(find_files([folder]), tmp_path, 'content')
  assert found == [*TEXTS * 3, 'a', None]


def test_files_of_other_fields_are_read_together(tmp_path: Path):
  (tmp_path / 'a.jsonl').write_bytes(b'{"text": "a", "x": 1}\n{"text": null}\n')
  (tmp_path / 'b.jsonl').write_bytes(b'{"y": [2], "text": "b"}\n')
  (tmp_path / 'c.txt').write_text('c')
  paths = [tmp_path / x for x in ('a.jsonl', 'b.jsonl', 'c.txt')]
  assert _read(paths, tmp_path) == ['a', None, 'b', 'c']


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.jsonl', b'{"text": "a"}\njunk\n', r'a\.jsonl cannot be read: JSON'),
    ('a.jsonl', b'{"x": "y"}\n', "a.jsonl: .*'text' is missing.* another: x"),
    ('a.parquet', b'PAR1 junk', r'a\.parquet cannot be read'),
    ('a.txt', 'é'.encode('latin-1'), r'a\.txt is no UTF-8 text'),
    # In the name of a test, a time would differ between workers.
    ('a.txt.gz', gzip.compress(b'text' * 99, mtime=0)[:-9], 'cannot be read'),
  ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UsageError, match=message):
    _read([tmp_path / name], tmp_path)


def test_a_cache_of_the_hub_is_read_once(tmp_path: Path):
  folder = tmp_path / 'datasets--me--mine'
  for name in ('blobs', 'refs', 'snapshots/1a2b'):
    (folder / name).mkdir(parents=True)
  (folder / 'refs/main').write_text('1a2b')
  (folder / 'blobs/77ff').write_bytes(_lines(TEXTS))
  (folder / 'snapshots/1a2b/train.jsonl').symlink_to('../../blobs/77ff')
  assert _read(find_files([folder]), tmp_path) == TEXTS


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
