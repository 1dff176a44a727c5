from pathlib import Path

import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.data.corpus import load_corpus


def test_the_standard_library_is_split_by_file():
  corpus = load_corpus('stdlib')
  assert 5_000_000 < corpus.num_bytes < 50_000_000
  assert not set(corpus.train) & set(corpus.validation)
  held_out = sum(len(text.encode()) for text in corpus.validation)
  assert 0.04 < held_out / corpus.num_bytes < 0.12
  assert any('class OrderedDict' in text for text in corpus.train)


def test_reading_twice_gives_the_same(tmp_path: Path):
  for i in range(50):
    (tmp_path / f'{i}.txt').write_text(f'document {i} ' * 20)
  assert load_corpus(str(tmp_path)) == load_corpus(str(tmp_path))


def test_a_changed_file_changes_the_hash(tmp_path: Path):
  path = tmp_path / 'a.txt'
  path.write_text('one')
  before = load_corpus(str(path)).sha256
  path.write_text('two')
  assert load_corpus(str(path)).sha256 != before


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


@pytest.mark.parametrize('content', [b'', b' \n', b'\0\1\2', b'\xff\xfe'])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes):
  path = tmp_path / 'data.txt'
  path.write_bytes(content)
  with pytest.raises(UsageError, match=r'data\.txt.*no UTF-8 text'):
    load_corpus(str(path))


def test_a_missing_path_is_refused(tmp_path: Path):
  with pytest.raises(UsageError, match='does not exist.*expected'):
    load_corpus(str(tmp_path / 'nothing'))


def test_an_empty_folder_is_refused(tmp_path: Path):
  with pytest.raises(UsageError, match='no UTF-8 text'):
    load_corpus(str(tmp_path))
