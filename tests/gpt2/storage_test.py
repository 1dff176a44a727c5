from pathlib import Path

import pytest

from examples.gpt2 import storage
from examples.gpt2.config import UsageError
from examples.gpt2.storage import as_path


@pytest.mark.parametrize('text', ['a/b', '/a/b', '.', 'a:b', 'x/gs:/b'])
def test_a_path_on_a_disk_is_a_plain_one(text: str):
  path = as_path(text)
  assert type(path) is type(Path())
  assert path == Path(text) == as_path(Path(text))
  assert not storage.is_remote(path)
  assert as_path('~/x') == Path.home() / 'x'


@pytest.mark.parametrize('scheme', ['gs', 's3'])
def test_a_url_is_one_even_after_pathlib(scheme: str):
  url = f'{scheme}://bucket/a/b'
  for text in (url, Path(url), url + '/', as_path(url)):
    path = as_path(text)
    assert str(path) == url
    assert storage.is_remote(path / 'c')
  assert str(path.parent / 'c') == f'{scheme}://bucket/a/c'


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('http://host/x', 'http:/.* not supported.* gs:// or s3://'),
    ('gcs://bucket/x', 'gcs:/.* not supported'),
    ('gs://', 'no bucket'),
    ('s3:///', 'no bucket'),
    ('', 'must not be empty'),
  ],
)
def test_what_cannot_be_a_place_is_refused(text: str, words: str):
  for path in (text, Path(text)) if '//host' in text else (text,):
    with pytest.raises(UsageError, match=words):
      as_path(path)


def test_a_file_is_written_whole_or_not_at_all(place: Path):
  path = place / 'a'
  for content in (b'old', b'new'):
    with storage.whole_file(path) as scratch:
      scratch.write_bytes(content)
    assert path.read_bytes() == content
  with pytest.raises(KeyError), storage.whole_file(path) as scratch:
    scratch.write_bytes(b'half')
    raise KeyError
  assert not scratch.exists()
  assert path.read_bytes() == b'new'
  with storage.on_disk(path) as copy:
    assert Path(copy).read_bytes() == b'new'


def test_a_new_folder_takes_the_place_of_none(place: Path, tmp_path: Path):
  with pytest.raises(KeyError), storage.new_folder(place / 'new') as scratch:
    (scratch / 'a').write_bytes(b'half')
    raise KeyError
  assert not (place / 'new').exists()
  assert not list(tmp_path.iterdir())
  with storage.new_folder(place / 'new') as scratch:
    (scratch / 'sub').mkdir()
    (scratch / 'sub' / 'a').write_bytes(b'content')
    (scratch / 'b').write_bytes(b'')
  assert (place / 'new' / 'sub' / 'a').read_bytes() == b'content'
  assert (place / 'new' / 'b').read_bytes() == b''
  with (
    pytest.raises(FileExistsError, match='another folder'),
    storage.new_folder(place / 'new'),
  ):
    raise AssertionError('the work has begun')
