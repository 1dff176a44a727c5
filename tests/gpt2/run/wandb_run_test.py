"""What Weights & Biases gets of a run, offline and from a server like its."""

from dataclasses import replace
import gzip
import http.server
import json
import os
from pathlib import Path
import struct
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.presets import resolve
from examples.gpt2.run import wandb_run
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.wandb_run import WandbRun, check_login
from examples.gpt2.storage import as_path, file_system
from examples.gpt2.train import train

_SETTINGS = {'config': {'learning_rate': 0.5}, 'corpus': {'bytes': 7}}


@pytest.fixture
def wandb(monkeypatch, tmp_path: Path):
  """The module, offline, without what this machine has set up for it."""
  module = pytest.importorskip('wandb')
  for name in list(os.environ):
    if name.startswith('WANDB_'):
      monkeypatch.delenv(name)
  for name in ('CONFIG_DIR', 'CACHE_DIR', 'DATA_DIR'):
    monkeypatch.setenv(f'WANDB_{name}', str(tmp_path / 'of wandb'))
  monkeypatch.setenv('NETRC', str(tmp_path / 'none'))
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  yield module
  module.teardown()


class _Server(http.server.BaseHTTPRequestHandler):
  """Answers what wandb asks for a run, and keeps its history."""

  def do_POST(self):
    content = self.rfile.read(int(self.headers.get('Content-Length', 0)))
    if self.headers.get('Content-Encoding') == 'gzip':
      content = gzip.decompress(content)
    answer = {}
    if self.path == '/graphql':
      answer = {'data': self._data(json.loads(content))}
    elif self.path.endswith('/file_stream'):
      history = (json.loads(content)['files'] or {}).get('wandb-history.jsonl')
      if history:
        lines = map(json.loads, history['content'])
        self.server.rows[history['offset'] :] = lines
    content = json.dumps(answer).encode()
    self.send_response(200)
    self.send_header('Content-Length', str(len(content)))
    self.end_headers()
    self.wfile.write(content)

  do_GET = do_PUT = do_POST

  def _data(self, query: dict[str, Any]) -> dict[str, Any]:
    rows, name = self.server.rows, query['variables'].get('name')
    project = {'id': 'p', 'name': 'p', 'entity': {'id': 'e', 'name': 'me'}}
    bucket = {
      'id': 'b', 'name': name, 'displayName': 'run', 'project': project,
      'historyLineCount': len(rows), 'eventsLineCount': 0, 'logLineCount': 0,
      'historyTail': json.dumps([json.dumps(x) for x in rows[-1:]]),
      'eventsTail': '[]', 'summaryMetrics': '{}', 'config': '{}',
      'wandbConfig': '{"t": 1}', 'tags': [],
    }  # fmt: skip
    if query['operationName'] == 'RunResumeStatus':
      model = project | {'bucket': bucket}
      return {'model': model if self.server.runs else None}
    if query['operationName'] == 'UpsertBucket':
      self.server.runs.add(name)
      return {'upsertBucket': {'bucket': bucket, 'inserted': True}}
    if query['operationName'] == 'CreateRunFiles':
      host, names = self.headers['Host'], query['variables']['files']
      files = [{'name': x, 'uploadUrl': f'http://{host}/{x}'} for x in names]
      created = {'runID': 'b', 'uploadHeaders': [], 'files': files}
      return {'createRunFiles': created}
    return {}

  def log_message(self, *_):
    pass


@pytest.fixture
def server(wandb, monkeypatch):
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Server)
  server.rows, server.runs = [], set()
  threading.Thread(target=server.serve_forever, daemon=True).start()
  address = f'http://127.0.0.1:{server.server_port}'
  monkeypatch.setenv('WANDB_MODE', 'online')
  monkeypatch.setenv('WANDB_BASE_URL', address)
  monkeypatch.setenv('WANDB_API_KEY', 'a' * 40)
  yield server
  server.shutdown()
  server.server_close()


def _records(path: Path) -> list[Any]:
  """Returns what an offline run has written, which is a log of LevelDB."""
  from wandb.proto import wandb_internal_pb2 as protocol  # noqa: PLC0415

  content, place, found, parts = path.read_bytes(), 7, [], b''
  while place + 7 <= len(content):
    left = 32768 - place % 32768
    if left < 7:  # Too little room for a head.
      place += left
      continue
    _, size, kind = struct.unpack('<IHB', content[place : place + 7])
    parts += content[place + 7 : place + 7 + size]
    place += 7 + size
    if kind in (1, 4):  # A whole record, or the last part of one.
      found.append(protocol.Record.FromString(parts))
      parts = b''
  return found


def _history(records: list[Any]) -> list[dict[str, Any]]:
  """Returns the numbers of each step by their names."""
  return [
    {
      '/'.join(item.nested_key) or item.key: json.loads(item.value_json)
      for item in record.history.item
    }
    for record in records
    if record.HasField('history')
  ]


def _started(path: Path) -> RunFolder:
  folder = RunFolder(path)
  folder.start(_SETTINGS)
  return folder


def _take(folder: RunFolder, done: int, last: int) -> None:
  """Takes steps after a checkpoint, as the loop does."""
  folder.keep_metrics(done)
  with WandbRun('tests', folder) as run:
    for step in range(done + 1, last + 1):
      metrics = {'step': step, 'train_loss': 1 / step, 'mfu': None}
      if step == 2:
        metrics['layers'] = {'clipped': [0.25, 0.5]}
      folder.log(metrics)
      run.add(metrics)
    folder.flush()
    run.upload()


def test_an_offline_run_has_all_numbers_and_settings(wandb, tmp_path: Path):
  with _started(tmp_path / 'run') as folder:
    _take(folder, 0, 3)
    identifier = (folder.path / 'wandb/run_id.txt').read_text()
    time.sleep(1)  # The names of wandb's folders have seconds.
    _take(folder, 2, 4)
    assert (folder.path / 'wandb/run_id.txt').read_text() == identifier
  wandb.teardown()  # On a busy machine it may still write.
  files = sorted(folder.path.glob('wandb/offline-run-*/*.wandb'))
  assert {file.name for file in files} == {f'run-{identifier}.wandb'}
  for file, steps in zip(files, (3, 4), strict=True):
    records = _records(file)
    lines = _history(records)
    assert [line['step'] for line in lines] == [*range(1, steps + 1)]
    assert [line['_step'] for line in lines] == [*range(1, steps + 1)]
    assert lines[0]['train_loss'] == 1
    assert lines[1]['layers/clipped/2'] == 0.5
    assert 'mfu' not in lines[0]
    (run,) = (x.run for x in records if x.HasField('run'))
    settings = {x.key: json.loads(x.value_json) for x in run.config.update}
    assert settings['learning_rate'] == 0.5
    assert settings['corpus'] == {'bytes': 7}
    assert run.project == 'tests'


def test_a_resumed_run_sends_each_step_once_and_what_was_lost(server, tmp_path):
  with _started(tmp_path) as folder:
    _take(folder, 0, 5)
    assert [row['_step'] for row in server.rows] == [1, 2, 3, 4, 5]
    # The last steps again, which came after the checkpoint.
    _take(folder, 3, 6)
    assert [row['step'] for row in server.rows] == [1, 2, 3, 4, 5, 6]
    del server.rows[2:]  # As if a kill had come before they were sent.
    _take(folder, 4, 7)
  assert [row['step'] for row in server.rows] == [1, 2, 3, 4, 5, 6, 7]
  assert len(server.runs) == 1


def test_a_server_that_goes_away_stops_no_run(server, tmp_path, monkeypatch):
  monkeypatch.setattr(wandb_run, 'FINISH_SECONDS', 1.0)
  with _started(tmp_path) as folder:
    folder.keep_metrics(0)
    with (
      pytest.warns(UserWarning, match='wandb gets no more.*Timed out'),
      WandbRun('tests', folder) as run,
    ):
      server.shutdown()
      server.server_close()
      run.add({'step': 1, 'train_loss': 1.0})


@pytest.mark.parametrize('when', ['init', 'log'])
def test_an_error_of_wandb_is_told_once(
  wandb, tmp_path: Path, monkeypatch, when: str
):
  owner = {'init': wandb, 'log': wandb.Run}[when]
  error = wandb.errors.CommError('no route to host')
  monkeypatch.setattr(owner, when, mock.Mock(side_effect=error))
  with (
    _started(tmp_path) as folder,
    pytest.warns(UserWarning, match='wandb gets no more.*no route') as warned,
  ):
    _take(folder, 0, 3)
  assert sum('no route' in str(x.message) for x in warned) == 1
  assert len(folder.read_metrics()) == 3


def test_in_a_store_the_identifier_and_the_files_are_kept(wandb, bucket: str):
  path = as_path(bucket) / 'run'
  with _started(path) as folder:
    _take(folder, 0, 2)
    identifier = (path / 'wandb' / 'run_id.txt').read_text()
    _take(folder, 2, 3)
    assert (path / 'wandb' / 'run_id.txt').read_text() == identifier
  files = file_system(path).find(str(path / 'wandb'))
  ends = f'run-{identifier}.wandb'
  assert sum(file.endswith(ends) for file in files) >= 1


def test_without_a_login_a_run_is_refused(wandb, monkeypatch):
  check_login('tests')  # Offline it needs none.
  wandb.teardown()
  monkeypatch.setenv('WANDB_MODE', 'online')
  with pytest.raises(UsageError, match='--wandb tests: .*wandb login'):
    check_login('tests')
  with pytest.raises(UsageError, match='--wandb a/b: Invalid project name'):
    check_login('a/b')


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path: Path):
  message = r"--wandb needs a package: pip install 'merit_optax\[wandb\]'"
  monkeypatch.delitem(sys.modules, 'wandb', raising=False)
  # Such a folder, which wandb makes itself, is no package.
  (tmp_path / 'wandb').mkdir()
  monkeypatch.setattr(sys, 'path', [str(tmp_path)])
  with pytest.raises(UsageError, match=message):
    resolve(Config(wandb='tests'))


@pytest.mark.slow
def test_a_run_of_the_trainer_has_all_its_numbers(wandb, tiny: Config):
  train(replace(tiny, wandb='tests'))
  (file,) = tiny.out_dir.glob('wandb/offline-run-*/*.wandb')
  lines = _history(_records(file))
  written = RunFolder(tiny.out_dir).read_metrics()
  assert [line['step'] for line in lines] == [*range(1, 7)]
  for line, metrics in zip(lines, written, strict=True):
    for name in ('train_loss', 'val_loss', 'tokens_per_second'):
      assert line.get(name) == metrics.get(name)
  assert 'max_attention_logit/1' in lines[3]
