from pathlib import Path
from types import SimpleNamespace

import hypothesis
from hypothesis import strategies as st
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


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda _: None)
  with pytest.raises(UsageError, match=r"pip install 'merit_optax\[cloud\]'"):
    as_path('gs://bucket/x')


@hypothesis.given(
  st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1000), st.integers(1, 200)),
    max_size=20,
  )
)
@hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_ranges_are_what_was_written(place, parts):
  contents = [bytes(i * j % 256 for i in range(1200)) for j in (1, 7)]
  for i, content in enumerate(contents):
    if not (place / str(i)).exists():
      storage.write_whole(place / str(i), content)
  files, offsets, sizes = zip(*parts, strict=True) if parts else ([], [], [])
  found = storage.read_ranges([place / str(i) for i in files], offsets, sizes)
  assert found == [contents[i][o : o + size] for i, o, size in parts]


def test_a_read_waits_for_a_store_that_fails(
  bucket: str, proxy, monkeypatch, capsys
):
  path = as_path(bucket) / 'a'
  storage.write_whole(path, b'abc')
  # Else the library itself would wait for half a minute.
  monkeypatch.setattr('gcsfs.retry.is_retriable', lambda error: False)
  proxy.status = 503
  pauses = []

  def heal_later(pause: float) -> None:
    pauses.append(pause)
    if len(pauses) == 2:
      proxy.heal()

  monkeypatch.setattr(storage, 'time', SimpleNamespace(sleep=heal_later))
  assert storage.read_ranges([path], [1], [2]) == [b'bc']
  assert 'tried again in 4 s' in capsys.readouterr().err
  assert pauses == [1.0, 4.0]


def test_a_range_that_is_not_there_is_an_error(place: Path):
  storage.write_whole(place / 'a', b'abc')
  for name, offset, size in (('a', 1, 3), ('none', 0, 1)):
    with pytest.raises(OSError):
      storage.read_ranges([place / name], [offset], [size])


def test_an_object_is_created_once(bucket: str):
  path = as_path(bucket) / 'run' / 'claim'
  storage.create(path, b'1')
  with pytest.raises(FileExistsError):
    storage.create(path, b'2')
  assert path.read_bytes() == b'1'


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
