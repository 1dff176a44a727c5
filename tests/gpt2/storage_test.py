from collections.abc import Iterator
import http.server
import os
from pathlib import Path
import socket
import threading
import time
from typing import ClassVar
import urllib.error
import urllib.request

import fsspec
import pytest

from examples.gpt2 import storage
from examples.gpt2.command import UsageError
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
  ('path', 'words'),
  [
    ('http://host/x', 'http://host/x .* gs://BUCKET/PATH or s3://'),
    (Path('http://host/x'), 'http:/host/x .* gs://BUCKET/PATH or s3://'),
    ('gcs://bucket/x', 'gcs://bucket/x .* gs://BUCKET/PATH'),
    ('gs://', 'gs:// .* gs://BUCKET/PATH'),
    ('s3:///', 's3:/// .* s3://BUCKET/PATH'),
    ('', 'must not be empty'),
  ],
)
def test_other_places_are_refused(path: str | Path, words: str):
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


_HANG = 100
"""Seconds for which a store hangs, longer than any wait that is allowed."""


class _Faulty(http.server.BaseHTTPRequestHandler):
  """Passes requests on to an emulator; the first reads of a file go wrong."""

  emulator = ''
  faults: ClassVar[list[str]] = []

  def do_GET(self):
    is_read = self.headers.get('Range') or 'alt=media' in self.path
    fault = self.faults.pop(0) if is_read and self.faults else ''
    if fault == 'drop':
      self.connection.shutdown(socket.SHUT_RDWR)
    elif fault == 'hang':
      time.sleep(_HANG)
    elif fault in ('503', '403'):
      self._answer(int(fault), {}, b'')
    else:
      self._pass_on(half=fault == 'half')

  def do_HEAD(self):
    self._pass_on()

  def _pass_on(self, half: bool = False):
    headers = {k: v for k, v in self.headers.items() if k != 'Host'}
    request = urllib.request.Request(
      self.emulator + self.path, headers=headers, method=self.command
    )
    try:
      with urllib.request.urlopen(request) as answer:
        content = answer.read()
        self._answer(answer.status, answer.headers, content, half)
    except urllib.error.HTTPError as error:
      self._answer(error.code, error.headers, error.read())

  def _answer(self, status: int, headers, content: bytes, half: bool = False):
    self.send_response(status)
    for name in ('Content-Type', 'ETag', 'Last-Modified', 'Content-Range'):
      if name in headers:
        self.send_header(name, headers[name])
    size = len(content) or headers.get('Content-Length', 0)
    self.send_header('Content-Length', str(size))
    self.end_headers()
    self.wfile.write(content[: len(content) // 2] if half else content)
    self.close_connection = True

  def log_message(self, *_):
    pass


@pytest.fixture
def faults(bucket: str, monkeypatch) -> Iterator[tuple[Path, list[str]]]:
  """Gives a file in a store, and a list of what its next reads run into."""
  aiohttp = pytest.importorskip('aiohttp')
  path = as_path(bucket) / 'tokens.bin'
  storage.write_whole(path, bytes(range(66)))
  scheme = bucket.partition(':')[0]
  names = {'gs': 'STORAGE_EMULATOR_HOST', 's3': 'AWS_ENDPOINT_URL'}
  _Faulty.emulator, _Faulty.faults = os.environ[names[scheme]], []
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Faulty)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  kind = type(storage.file_system(path))
  monkeypatch.setenv(
    names[scheme], f'http://127.0.0.1:{server.server_address[1]}'
  )
  for name, option, value in (
    ('gs', 'requests_timeout', aiohttp.ClientTimeout(sock_read=2)),
    ('s3', 'config_kwargs', {'read_timeout': 2}),
  ):
    monkeypatch.setitem(fsspec.config.conf[name], option, value)
  kind.clear_instance_cache()
  yield path, _Faulty.faults
  kind.clear_instance_cache()
  server.shutdown()


@pytest.mark.parametrize('fault', ['hang', 'drop', '503', 'half'])
def test_a_read_that_fails_for_a_moment_is_repeated(faults, fault: str):
  path, coming = faults
  start = time.monotonic()
  coming += [fault]
  assert storage.read(path, 3, 60) == bytes(range(3, 60))
  assert not coming
  assert time.monotonic() - start < _HANG


def test_a_file_that_cannot_be_read_is_named(faults):
  path, coming = faults
  coming += ['403'] * 20
  with pytest.raises(OSError, match=f'{path}: .*Forbidden'):
    storage.read(path, 0, 66)
  assert len(coming) == 19  # It is not tried again.
  coming.clear()
  with pytest.raises(FileNotFoundError, match='other.bin is not there'):
    storage.read(path.with_name('other.bin'), 0, 66)
