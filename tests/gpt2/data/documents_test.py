from collections.abc import Iterable
import gzip
import json
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
import pyarrow as pa
import pyarrow.parquet
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.data.corpus import load_corpus
from examples.gpt2.data.documents import DocumentReader
from examples.gpt2.data.files import zstd

TEXTS = [f'the number {i} and its square {i * i}\n' for i in range(100)]


def _json_lines(texts: Iterable[str]) -> bytes:
  return b''.join(json.dumps({'text': x}).encode() + b'\n' for x in texts)


def _read(*paths: Path, **options) -> list[str]:
  return list(DocumentReader(paths, **options).read('reading'))


def test_json_lines_are_documents(tmp_path: Path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "one"}\n\n{"id": 2, "text": "t\\u0077o\\n"}')
  assert _read(path) == ['one', 'two\n']
  path.write_text('{"body": {}, "text": "one", "content": "two"}')
  assert _read(path, text_field='content') == ['two']


def test_the_items_of_an_array_are_documents(tmp_path: Path):
  path = tmp_path / 'a.json'
  records = [{'text': text} for text in TEXTS]
  path.write_text('\n ' + json.dumps(records, indent=2))
  assert _read(path) == TEXTS
  # A line that begins like an array does not take the others with it.
  path.write_bytes(b'[1, 2\n' + _json_lines(TEXTS))
  reader = DocumentReader([path], skip_bad=True)
  assert list(reader.read('reading')) == TEXTS
  assert reader.num_skipped == 1
  path.write_text(json.dumps([*records, 3]))
  with pytest.raises(UsageError, match=r'a\.json, line 101: .* JSON object'):
    _read(path)


def test_lines_with_the_end_of_text_token_part_documents(tmp_path: Path):
  path = tmp_path / 'a.txt'
  path.write_bytes(
    b'<|endoftext|>\none\ntwo\n<|endoftext|>\r\n\n'
    b'x = "<|endoftext|>"\n <|endoftext|> \n<|endoftext|>\nlast <|endoftext|>'
  )
  assert _read(path) == [
    'one\ntwo\n',
    '\nx = "<|endoftext|>"\n',
    'last <|endoftext|>',
  ]


@hypothesis.given(
  words=st.lists(
    st.sampled_from(['w' * 99, '\n' * 3, 'ä' * 7, '漢' * 999, 'b' * 200_000]),
    max_size=99,
  ),
  separator=st.sampled_from(['', ' ', '\n']),
)
@hypothesis.example(words=['a' * (1 << 14)], separator='')
def test_long_texts_are_cut_and_nothing_is_lost(
  tmp_path_factory, words: list[str], separator: str
):
  path = tmp_path_factory.mktemp('long') / 'a.txt'
  text = separator.join(words)
  path.write_bytes(text.encode())
  assert ''.join(_read(path)) == text


@pytest.mark.parametrize('end', ['\n', ' '])
def test_long_texts_are_cut_at_the_end_of_a_line_or_word(tmp_path: Path, end):
  path = tmp_path / 'a.txt'
  path.write_text(('ninety nine' + end) * 50_000)
  documents = _read(path)
  assert len(documents) == 5
  assert all(x.startswith('ninety') and x.endswith(end) for x in documents)


def test_compressed_and_encoded_files_are_read_alike(tmp_path: Path):
  contents = [_json_lines(TEXTS[i : i + 20]) for i in range(0, 100, 20)]
  mark = b'\xef\xbb\xbf'
  files = {
    '0.jsonl.gz': gzip.compress(contents[0]),
    '1.jsonl.zst': zstd.compress(contents[1]),
    '2.JSONLINES': contents[2].decode().encode('utf-16-le'),
    # Two files with marks, one after the other.
    '3.ndjson': mark + contents[3] + mark + contents[4],
    '.env': b'secret',
  }
  for name, content in files.items():
    (tmp_path / name).write_bytes(content)
  assert _read(tmp_path) == TEXTS
  corpus = load_corpus(str(tmp_path))
  assert sorted(corpus.train + corpus.validation) == sorted(TEXTS)
  assert corpus.validation


def test_files_are_read_in_order_and_without_hidden_ones(tmp_path: Path):
  for name in ('b', 'a/z', '.git/c', '.d', 'a/.e'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name)
  assert _read(tmp_path) == ['a/z', 'b']
  assert _read(tmp_path / 'b', tmp_path / 'a') == ['b', 'a/z']
  assert _read(tmp_path / '.d') == ['.d']


def test_documents_are_streamed(tmp_path: Path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{"text": "word"}\n' * 10_000 + b'junk')
  documents = DocumentReader([path]).read('reading')
  assert next(documents) == 'word'
  with pytest.raises(UsageError, match='line 10001'):
    list(documents)


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.txt', b'a\nb\ncaf\xe9\n', 'a.txt, line 3: .*UTF-8 text.*0xe9'),
    ('a.txt', b'a\n<|endoftext|>\nb\n\xff', 'line 4: '),
    ('a.txt', b'long ' * 50_000 + b'\n\xff', 'line 2: '),
    ('a.jsonl', b'{"text": ""}\n\n{"text": 1', 'a.jsonl, line 3: .*JSON obj'),
    ('a.jsonl', b'{"text": ""}\n{"txt": "a"}', "line 2: .*field 'text'.*txt"),
    ('a.jsonl', b'{"text": 1}', "line 1: .*field 'text'"),
    ('a.jsonl', b'\n{"text": "\xe9"}', 'line 2: .*0xe9'),
    ('a.jsonl', b'{"text": "\\ud800"}', 'line 1: .*surrogates'),
    ('a.jsonl', b'[' * 100_000, 'line 1: .*recursion'),
  ],
)
def test_a_document_that_cannot_be_read_is_named(
  tmp_path: Path, name: str, content: bytes, message: str
):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UsageError, match=message + '.*--skip-bad'):
    _read(tmp_path)


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path: Path):
  packed = zstd.compress(_json_lines(TEXTS))
  files = {
    'a.jsonl': _json_lines(TEXTS) + b'\xff\n{}\n',
    'b.txt': b'x\xff\ny\n<|endoftext|>\ntwo',
    'c.parquet': b'junk',
    'd.zstd': packed,
  }
  for name, content in files.items():
    (tmp_path / name).write_bytes(content)
  message = r'd\.zstd is .* \(Zstandard\).*--skip-bad'
  with pytest.raises(UsageError, match=message):
    _read(tmp_path / 'd.zstd')
  reader = DocumentReader([tmp_path], skip_bad=True)
  for _ in range(2):
    assert list(reader.read('reading')) == [*TEXTS, 'two']
    assert reader.num_skipped == 3
  found = reader.left_out.items()
  assert {Path(k).name: (x.documents, x.num_bytes) for k, x in found} == {
    'a.jsonl': (2, 5),
    'b.txt': (1, 5),
    'c.parquet': (0, 4),
    'd.zstd': (0, len(packed)),
  }
  source = load_corpus(str(tmp_path)).source
  assert source.startswith(f'{tmp_path} (1 of 4 files)')
  assert f'd.zstd: {len(packed)} bytes (a Zstandard file)' in source


def test_a_damaged_file_is_named_and_not_skipped(tmp_path: Path):
  (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(b'text' * 99)[:-9])
  with pytest.raises(UsageError, match=r'a\.txt\.gz is damaged'):
    _read(tmp_path, skip_bad=True)


def test_data_without_text_is_refused(tmp_path: Path):
  with pytest.raises(UsageError, match='has no files'):
    _read(tmp_path)
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'blank.txt').write_bytes(b' \n')
  (tmp_path / 'binary.txt').write_bytes(b'\0\1\2')
  for data, message in {
    '': 'must not be empty',
    f'{tmp_path}/nothing': 'does not exist: expected',
    f'{tmp_path}/empty': 'a folder without files',
    f'{tmp_path}/blank.txt': 'holds no text',
    f'{tmp_path}/binary.txt': 'holds no text',
  }.items():
    with pytest.raises(UsageError, match=f'{data}.*{message}'):
      load_corpus(data)


def test_the_standard_library_is_split_by_file():
  corpus = load_corpus('stdlib')
  assert 5_000_000 < corpus.num_bytes < 50_000_000
  assert not set(corpus.train) & set(corpus.validation)
  held_out = sum(len(text.encode()) for text in corpus.validation)
  assert 0.04 < held_out / corpus.num_bytes < 0.12
  assert any('class OrderedDict' in text for text in corpus.train)


def _write_parquet(path: Path, texts: list[str | None], kind='string'):
  columns = {'id': pa.array(range(len(texts))), 'text': pa.array(texts, kind)}
  pa.parquet.write_table(pa.table(columns), path, row_group_size=7)


@pytest.mark.parametrize(
  'kind',
  ['string', 'large_string', pa.dictionary(pa.int32(), pa.string())],
  ids=str,
)
def test_rows_of_parquet_are_documents(tmp_path: Path, kind: str):
  path = tmp_path / 'a.parquet'
  _write_parquet(path, [*TEXTS, None, '', 'last'], kind)
  assert _read(path) == [*TEXTS, 'last']
  with pytest.raises(UsageError, match=r"no column 'id' of text.* of text\."):
    _read(path, text_field='id')
  reader = DocumentReader([path], 'id', skip_bad=True)
  assert not list(reader.read(None))
  assert "(a Parquet without 'id' file)" in reader.describe_left_out()


def test_a_bad_byte_does_not_leave_out_a_text(tmp_path: Path):
  path = tmp_path / 'a.txt'
  # A character that others were replaced by is none to count.
  path.write_bytes('some \ufffd\n'.encode() * 99 + b'caf\xe9\nmore')
  reader = DocumentReader([path], skip_bad=True)
  expected = 'some \ufffd\n' * 99 + 'caf\ufffd\nmore'
  assert list(reader.read('reading')) == [expected]
  assert reader.num_replaced == 1
  assert not reader.left_out
  corpus = load_corpus(str(path))
  assert corpus.train[0] + corpus.validation[0] == expected
  assert '1 bytes that are no UTF-8 replaced' in corpus.source


@hypothesis.given(place=st.integers(0, 204), skip_bad=st.booleans())
def test_reading_goes_on_from_any_place(tmp_path_factory, place, skip_bad):
  folder = tmp_path_factory.mktemp('places')
  _write_parquet(folder / 'a.parquet', TEXTS[:50])
  (folder / 'b.jsonl').write_bytes(b'\n' + _json_lines(TEXTS[50:]) + b'\n')
  text = ''.join(f'{x}<|endoftext|>\n' for x in TEXTS)
  (folder / 'c.txt').write_text(text + TEXTS[0])
  (folder / 'd.txt').write_text('line\n' * 90_000)
  whole, places = [], [None]
  reader = DocumentReader([folder], skip_bad=skip_bad)
  for document in reader.read('reading'):
    whole.append(document)
    places.append(json.loads(json.dumps(reader.place())))
  assert len(whole) == 205
  again = DocumentReader([folder], skip_bad=skip_bad)
  assert list(again.read('reading', places[place])) == whole[place:]
  assert again.place() == reader.place()


@pytest.mark.parametrize(
  ('first', 'message'),
  [(1000, 'a.parquet is damaged'), (-4000, r'\(damaged Parquet\)')],
  ids=['pages', 'footer'],
)
def test_damaged_parquet_is_named(tmp_path: Path, first: int, message: str):
  path = tmp_path / 'a.parquet'
  _write_parquet(path, [f'{text}{i}' for i, text in enumerate(TEXTS * 5)])
  content = bytearray(path.read_bytes())
  content[first : first + 500] = bytes(500)
  path.write_bytes(content)
  with pytest.raises(UsageError, match=message):
    _read(path)
