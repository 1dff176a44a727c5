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
  assert all(text.startswith('ninety') for text in documents)
  assert all(text.endswith(end) for text in documents)


def test_files_are_read_in_order_and_without_hidden_ones(tmp_path: Path):
  for name in ('b', 'a/z', '.git/c', '.d', 'a/.e'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name)
  assert _read(tmp_path) == ['a/z', 'b']
  assert _read(tmp_path / 'b', tmp_path / 'a') == ['b', 'a/z']
  assert _read(tmp_path / '.d') == ['.d']


def test_progress_counts_documents(tmp_path: Path, capsys):
  (tmp_path / 'a.jsonl').write_text('{"text": "word"}\n' * 300)
  (tmp_path / 'b.txt').write_text('word')
  assert _read(tmp_path)
  last = capsys.readouterr().err.split('\r')[-1]
  assert 'reading: 301 documents' in last


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


def test_documents_that_cannot_be_read_can_be_skipped(tmp_path: Path):
  (tmp_path / 'a.jsonl').write_bytes(b'{"text": "one"}\n\xff\n{}\n')
  (tmp_path / 'b.txt').write_bytes(b'x\xff\ny\n<|endoftext|>\ntwo')
  reader = DocumentReader([tmp_path], skip_bad=True)
  for _ in range(2):
    assert list(reader.read('reading')) == ['one', 'two']
    assert reader.num_skipped == 3


def test_a_damaged_file_is_named_and_not_skipped(tmp_path: Path):
  (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(b'text' * 99)[:-9])
  with pytest.raises(UsageError, match=r'a\.txt\.gz is damaged'):
    _read(tmp_path, skip_bad=True)


def test_missing_documents_are_refused(tmp_path: Path):
  with pytest.raises(UsageError, match='nothing does not exist: expected'):
    _read(tmp_path / 'nothing')
  with pytest.raises(UsageError, match='has no files'):
    _read(tmp_path)


def test_the_standard_library_is_split_by_file():
  corpus = load_corpus('stdlib')
  assert 5_000_000 < corpus.num_bytes < 50_000_000
  assert not set(corpus.train) & set(corpus.validation)
  held_out = sum(len(text.encode()) for text in corpus.validation)
  assert 0.04 < held_out / corpus.num_bytes < 0.12
  assert any('class OrderedDict' in text for text in corpus.train)


def test_a_single_file_is_split_within(text_file: Path):
  corpus = load_corpus(str(text_file))
  text = text_file.read_text()
  assert corpus.train[0] + corpus.validation[0] == text
  assert len(corpus.validation[0]) == pytest.approx(0.05 * len(text), abs=1)


def test_a_folder_is_read_with_its_subfolders_and_without_binaries(
  tmp_path: Path,
):
  (tmp_path / 'sub').mkdir()
  (tmp_path / 'sub' / 'a.txt').write_text('some text')
  (tmp_path / 'picture.png').write_bytes(b'\x89PNG\0\xff')
  (tmp_path / 'latin.txt').write_bytes(b'caf\xe9')
  corpus = load_corpus(str(tmp_path))
  assert '1 of 3 files' in corpus.source
  assert corpus.num_bytes == len('some text')
  assert 'picture.png: 6 bytes (a PNG file)' in corpus.source
  assert 'latin.txt: 1 documents, 4 bytes' in corpus.source


@pytest.mark.parametrize('content', [b' \n', b'\0\1\2'])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes):
  path = tmp_path / 'data.txt'
  path.write_bytes(content)
  with pytest.raises(UsageError, match=r'data\.txt holds no text'):
    load_corpus(str(path))


def test_a_corpus_needs_files(tmp_path: Path):
  for data, message in {
    '': 'must not be empty',
    f'{tmp_path}/nothing': 'does not exist: expected',
    str(tmp_path): 'a folder without files',
  }.items():
    with pytest.raises(UsageError, match=f'--data {data}.*{message}'):
      load_corpus(data)


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


def test_no_compressed_file_is_taken_for_a_document(tmp_path: Path):
  contents = _json_lines(TEXTS[:30]), _json_lines(TEXTS[30:60])
  (tmp_path / '0.jsonl.gz').write_bytes(gzip.compress(contents[0]))
  (tmp_path / '1.jsonl.zst').write_bytes(zstd.compress(contents[1]))
  (tmp_path / '2.jsonl').write_bytes(_json_lines(TEXTS[60:]))
  reader = DocumentReader([tmp_path], skip_bad=True)
  assert list(reader.read('reading')) == TEXTS
  assert not reader.left_out


def test_other_formats_are_named_and_counted(tmp_path: Path):
  (tmp_path / 'a.jsonl').write_bytes(_json_lines(TEXTS) + b'junk\n')
  content = zstd.compress(_json_lines(TEXTS))
  (tmp_path / 'b.zstd').write_bytes(content)
  (tmp_path / 'c.parquet').write_bytes(b'junk')
  with pytest.raises(
    UsageError, match=r'b\.zstd is .* \(Zstandard\).*--skip-b'
  ):
    _read(tmp_path / 'b.zstd')
  reader = DocumentReader([tmp_path], skip_bad=True)
  assert list(reader.read('reading')) == TEXTS
  found = {Path(k).name: v for k, v in reader.left_out.items()}
  assert {k: (x.documents, x.num_bytes) for k, x in found.items()} == {
    'a.jsonl': (1, 5),
    'b.zstd': (0, len(content)),
    'c.parquet': (0, 4),
  }
  assert found['b.zstd'].reason == 'a Zstandard file'
  lines = reader.describe_left_out().splitlines()
  assert lines[1].endswith(
    'a.jsonl: 1 documents, 5 bytes (Expecting value: line 1 column 1 (char 0))'
  )
  assert lines[2].endswith(f'b.zstd: {len(content)} bytes (a Zstandard file)')


def test_of_many_files_that_are_left_out_all_bytes_are_counted(tmp_path):
  for i in range(15):
    (tmp_path / f'{i:02}.png').write_bytes(b'\x89PNG\0')
  reader = DocumentReader([tmp_path], skip_bad=True)
  assert not list(reader.read('reading'))
  assert reader.describe_left_out().endswith('and 5 more; in all 75 bytes')


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


def test_byte_order_marks_are_no_text(tmp_path: Path):
  mark = b'\xef\xbb\xbf'
  (tmp_path / 'a.txt').write_bytes(mark + b'text')
  # Two files with marks, one after the other.
  lines = mark + _json_lines(TEXTS[:2])
  (tmp_path / 'b.jsonl').write_bytes(lines + lines)
  assert _read(tmp_path) == ['text', *TEXTS[:2], *TEXTS[:2]]


@pytest.mark.parametrize('encoding', ['utf-8', 'utf-16-le'])
def test_the_trainer_reads_what_prepare_reads(tmp_path: Path, encoding: str):
  content = _json_lines(TEXTS).decode().encode(encoding)
  (tmp_path / 'a.jsonlines').write_bytes(content)
  (tmp_path / '.env').write_text('secret')
  assert _read(tmp_path) == TEXTS
  corpus = load_corpus(str(tmp_path))
  assert sorted(corpus.train + corpus.validation) == sorted(TEXTS)
  assert corpus.validation


@hypothesis.given(place=st.integers(0, 204), skip_bad=st.booleans())
def test_reading_goes_on_from_any_place(
  tmp_path_factory, place: int, skip_bad: bool
):
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
