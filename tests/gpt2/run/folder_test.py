import contextlib
import errno
import json
import math
import os
from pathlib import Path
import threading
from unittest import mock
import warnings

import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.run import claim
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.storage import is_remote, make_folder, write_whole
from tests.gpt2.runs import contents, largest_file

_SETTINGS = {'config': {'steps': 3, 'seed': 0}}
_RESULTS = ('metrics.jsonl', 'model.json', 'weights.safetensors')


def _finish(path: Path) -> None:
  with RunFolder(path) as folder:
    folder.start(_SETTINGS)
    folder.log({'step': 1})
    folder.flush()
    for name in _RESULTS[1:]:
      (path / name).write_text(name)
    assert not folder.finished
    folder.write_sample('text')
    assert folder.finished


def test_metrics_are_read_as_they_were_logged(tmp_path: Path):
  folder = RunFolder(tmp_path / 'deep' / 'run')
  folder.start(_SETTINGS)
  folder.keep_metrics(0)
  assert folder.read_metrics() == []
  lines = [{'step': 1, 'loss': 0.5}, {'step': 2, 'text': 'a\nb\u2028c'}]
  for line in lines:
    folder.log(line)
  folder.log({'step': 3, 'loss': math.nan, 'layers': {'x': [1.0, math.inf]}})
  lines.append({'step': 3, 'loss': None, 'layers': {'x': [1.0, None]}})
  assert folder.read_metrics() == lines
  assert folder.read_settings() == _SETTINGS | {'slurm': {}}


@pytest.mark.parametrize('missing', [*_RESULTS, 'sample.txt', 'config.json'])
def test_a_run_is_finished_once_all_files_are_there(tmp_path, missing: str):
  _finish(tmp_path)
  (tmp_path / missing).unlink()
  assert not RunFolder(tmp_path).finished


def test_a_finished_run_is_kept(tmp_path: Path):
  _finish(tmp_path)
  before = contents(tmp_path)
  with RunFolder(tmp_path) as again:
    again.start(_SETTINGS | {'versions': 'others'})
    assert again.finished
    assert again.read_metrics() == [{'step': 1}]
  assert contents(tmp_path) == before


def test_fresh_moves_what_a_run_wrote_aside_and_nothing_else(place, capsys):
  def write(**files: bytes) -> None:
    for name, content in files.items():
      make_folder((place / name).parent)
      write_whole(place / name, content)

  mine = {'notes.txt': b'mine', 'data/text.txt': b'mine too'}
  write(**mine)
  for number in (b'1', b'2'):
    _finish(place)
    names = (
      'checkpoints/3/state', 'damaged-checkpoints/2/state', 'profile/trace',
      'tensorboard/events', 'tokenizer.json', 'wandb/run_id.txt',
    )  # fmt: skip
    write(**{name: name.encode() + number for name in names})
    before = contents(place)
    with RunFolder(place) as folder:
      folder.start(_SETTINGS, from_scratch=True)
      assert not folder.finished
    assert is_remote(place) or (place / claim.LOCK).exists()
    aside = f'before-{number.decode()}'
    assert aside in capsys.readouterr().out
    after = contents(place)
    assert after.pop('config.json') == before['config.json']
    for name in before.keys() - mine.keys():
      if not name.startswith('before'):
        before[f'{aside}/{name}'] = before.pop(name)
    assert after == before


@pytest.mark.parametrize(
  ('job', 'restarts', 'goes_on'),
  [('7', '1', True), ('7', '', False), ('8', '1', False), ('', '', False)],
)
def test_a_job_that_slurm_requeues_goes_on_despite_fresh(
  tmp_path: Path, monkeypatch, job: str, restarts: str, goes_on: bool, capsys
):
  monkeypatch.setenv('SLURM_JOB_ID', '7')
  with RunFolder(tmp_path) as folder:
    folder.start(_SETTINGS, from_scratch=True)
    assert [*contents(tmp_path)] == ['config.json'], 'nothing moved'
    folder.log({'step': 1})
  for name, value in (('JOB_ID', job), ('RESTART_COUNT', restarts)):
    monkeypatch.delenv(f'SLURM_{name}', raising=False)
    if value:
      monkeypatch.setenv(f'SLURM_{name}', value)
  with RunFolder(tmp_path) as folder:
    folder.start(_SETTINGS, from_scratch=True)
  assert (tmp_path / 'metrics.jsonl').exists() == goes_on
  assert ('requeued' in capsys.readouterr().out) == goes_on


@pytest.mark.parametrize('step', [0, 2, 3])
@pytest.mark.parametrize('torn', ['', '{"st', '{"step": 4}'])
def test_later_lines_and_torn_ones_are_cut_off(tmp_path, torn: str, step: int):
  path = tmp_path / 'metrics.jsonl'
  lines = [json.dumps({'step': i, 'tokens': 8 * i}) + '\n' for i in (1, 2, 3)]
  path.write_text(''.join(lines) + torn)
  folder = RunFolder(tmp_path)
  assert folder.keep_metrics(step) == (8 * step or None)
  assert path.read_text() == ''.join(lines[:step])
  folder.log({'step': step + 1})
  assert [x['step'] for x in folder.read_metrics()] == [*range(1, step + 2)]


def test_lost_lines_are_told_and_none_is_doubled(tmp_path: Path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"ste\n{"step": 4}\n{"step": 4}\n')
  with pytest.warns(UserWarning, match='lost 2 of the lines up to step 4'):
    RunFolder(tmp_path).keep_metrics(4)
  assert path.read_text() == '{"step": 1}\n{"step": 4}\n'


def test_a_fork_takes_no_later_lines_of_its_source(tmp_path: Path):
  source = tmp_path / 'source'
  source.mkdir()
  (source / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 2}\n')
  fork = RunFolder(tmp_path)
  with pytest.warns(UserWarning, match='lost 1 of the lines up to step 2'):
    fork.keep_metrics(2, source, 1)
  assert fork.read_metrics() == [{'step': 1}]


@contextlib.contextmanager
def _away(path: Path):
  """Takes a file's folder away, as a share that is not mounted."""
  folder = path.parent.rename(path.parent.with_name('away'))
  yield
  folder.rename(path.parent)


@pytest.mark.parametrize(
  'failure',
  [
    lambda path: largest_file(path.stat().st_size),
    lambda path: largest_file(path.stat().st_size + 5),
    lambda path: largest_file(path.stat().st_size + 20),
    _away,
    # A line may not have reached the disk.
    lambda _: mock.patch('os.fsync', side_effect=OSError('failed')),
  ],
)
def test_lines_that_cannot_be_written_wait(tmp_path: Path, failure):
  (tmp_path / 'run').mkdir()
  folder = RunFolder(tmp_path / 'run')
  path = folder.path / 'metrics.jsonl'
  folder.log({'step': 1})
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    with failure(path):
      for step in (2, 3, 4):
        folder.log({'step': step})
      with pytest.raises(OSError):
        folder.flush()
    # Every line on the disk is whole, at any time.
    assert path.read_bytes().endswith(b'\n')
    seen = [x['step'] for x in folder.read_metrics()]
    assert seen in ([1], [1, 2], [1, 2, 3])
    folder.log({'step': 5})
  assert [x['step'] for x in folder.read_metrics()] == [1, 2, 3, 4, 5]
  assert path.read_bytes().count(b'\n') == 5
  assert len(caught) == 1, 'one warning, not one a line'
  assert 'wait in memory' in str(caught[0].message)


@pytest.mark.parametrize(
  'name', [*_RESULTS, 'sample.txt', 'tokenizer.json', 'checkpoints/3/mine',
           'damaged-checkpoints/mine', 'tensorboard/mine', 'profile/mine',
           'wandb/mine'],
)  # fmt: skip
def test_what_is_of_something_else_is_not_touched(tmp_path: Path, name: str):
  (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / name).write_text('mine')
  words = f'{Path(name).parts[0]} of something else'
  for from_scratch in (False, True):
    with pytest.raises(UsageError, match=words):
      RunFolder(tmp_path).start(_SETTINGS, from_scratch=from_scratch)
  assert contents(tmp_path) == {name: b'mine'}


@pytest.mark.parametrize('text', ['no json', '[1, 2]', '{"model": "llama"}'])
def test_a_config_of_something_else_is_refused(tmp_path: Path, text: str):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(UsageError, match='no run of this trainer wrote'):
    RunFolder(tmp_path).start(_SETTINGS)


def test_a_folder_in_use_or_of_another_run_is_refused(place, monkeypatch):
  monkeypatch.setattr(claim, 'BEAT_SECONDS', 0.2)
  owner = ' on .* process' if is_remote(place) else ''
  with RunFolder(place) as first:
    first.start(_SETTINGS)
    with pytest.raises(UsageError, match=f'in use by a run .*{owner}'):
      RunFolder(place).start(_SETTINGS)
    first.flush()
  with RunFolder(place) as second:
    second.start(_SETTINGS)
  other = {'config': {'steps': 4}}
  for from_scratch in (False, True):
    with (
      RunFolder(place) as folder,
      pytest.raises(UsageError, match='steps: 3 -> 4'),
    ):
      folder.start(other, from_scratch=from_scratch)


def test_a_run_that_can_give_no_sign_says_so(make_bucket, monkeypatch, capsys):
  monkeypatch.setattr(claim, 'BEAT_SECONDS', 0.01)
  failed = threading.Event()
  errors = iter([PermissionError('rights have ended')] * 3)

  def write(*_: object) -> None:
    for error in errors:
      raise error
    failed.set()

  with RunFolder(make_bucket('gs')) as folder:
    folder.start(_SETTINGS)
    with monkeypatch.context() as patch:
      patch.setattr(claim, 'write_whole', write)
      assert failed.wait(60)
  told = capsys.readouterr().err
  assert told.count('rights have ended') == 1
  assert 'may take the folder' in told


def test_a_disk_without_locks_is_a_warning(tmp_path: Path, monkeypatch):
  error = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
  monkeypatch.setattr('fcntl.flock', mock.Mock(side_effect=error))
  with (
    RunFolder(tmp_path) as folder,
    pytest.warns(UserWarning, match='cannot be locked.*second run'),
  ):
    folder.start(_SETTINGS)
