import dataclasses
import json
import math
from pathlib import Path
import subprocess
import sys

import pytest

from examples.gpt2.config import UsageError, identity
from examples.gpt2.presets import PRESETS, from_json, resolve, to_json
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.storage import make_folder, write_whole
from tests.gpt2.runs import contents

_CONFIG = resolve(PRESETS['demo'])
_IDENTITY = identity(_CONFIG) | {'corpus_sha256': 'ab'}


def _start(path: Path, **changes) -> RunFolder:
  """Starts a run, with other settings than the demo's."""
  with RunFolder(path) as folder:
    config = dataclasses.replace(_CONFIG, **changes)
    known_by = identity(config) | {'corpus_sha256': 'ab'}
    others = {'settings': to_json(config), 'versions': {'jax': '1'}}
    folder.start(config, known_by, others)
  return folder


def test_settings_are_read_as_they_were_written(place: Path):
  folder = _start(place / 'deep' / 'run', eval_every=7)
  settings = folder.read_settings()
  assert settings['config'] == _IDENTITY
  assert settings['versions'] == {'jax': '1'}
  assert from_json(settings['settings']).eval_every == 7


def test_metrics_are_read_as_they_were_logged(place: Path):
  folder = _start(place)
  folder.keep_metrics(0)
  assert folder.read_metrics() == []
  lines = [{'step': 1, 'loss': 0.5}, {'step': 2, 'text': 'a\nb\u2028c'}]
  for line in lines:
    folder.metrics.add(line)
  folder.metrics.add({'step': 3, 'loss': math.nan, 'x': [1.0, math.inf]})
  folder.metrics.flush()
  assert folder.read_metrics() == [
    *lines,
    {'step': 3, 'loss': None, 'x': [1.0, None]},
  ]


@pytest.mark.parametrize('torn', ['', '{"step": 4, "lo', 'garbage\n[1]\n'])
@pytest.mark.parametrize('step', [0, 2, 3])
def test_later_lines_and_torn_ones_are_cut_off(tmp_path, torn: str, step: int):
  lines = [{'step': i, 'tokens': 10 * i} for i in (1, 2, 3)]
  text = ''.join(f'{json.dumps(line)}\n' for line in lines)
  (tmp_path / 'metrics.jsonl').write_text(text + torn)
  folder = RunFolder(tmp_path)
  assert folder.keep_metrics(step) == 10 * step
  assert folder.read_metrics() == lines[:step]


def test_lost_lines_are_told_and_none_is_doubled(tmp_path: Path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 2}\n' * 2)
  folder = RunFolder(tmp_path)
  with pytest.warns(UserWarning, match='lost 2 of the lines up to step 3'):
    assert folder.keep_metrics(3) == 0
  assert folder.read_metrics() == [{'step': 2}]


def test_a_fork_takes_the_lines_of_its_source(tmp_path: Path):
  source, fork = RunFolder(tmp_path / 'source'), _start(tmp_path / 'fork')
  (tmp_path / 'source').mkdir()
  source.metrics.replace([{'step': i, 'tokens': i} for i in (1, 2, 3)])
  assert fork.keep_metrics(2, source.path) == 2
  assert [x['step'] for x in fork.read_metrics()] == [1, 2]


def test_a_finished_run_is_kept(place: Path):
  folder = _start(place)
  assert not folder.finished
  folder.write_sample('text')
  assert folder.finished
  before = contents(place)
  _start(place, eval_every=3)
  assert contents(place) == before


@pytest.mark.parametrize('name', ['checkpoints', 'metrics.jsonl', 'model.json'])
def test_what_is_of_something_else_is_not_touched(tmp_path: Path, name: str):
  (tmp_path / name).write_text('mine')
  with pytest.raises(UsageError, match=rf'holds {name} of something else'):
    _start(tmp_path)
  assert set(contents(tmp_path)) == {name}


@pytest.mark.parametrize('text', ['{}', '[1]', '{"config": {}}', 'no JSON'])
def test_a_config_of_something_else_is_refused(tmp_path: Path, text: str):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(UsageError, match=r'config\.json that no run'):
    _start(tmp_path)
  assert (tmp_path / 'config.json').read_text() == text


def test_another_run_is_refused_and_what_differs_is_named(place: Path):
  _start(place, seed=3)
  _start(place)  # Nothing had been computed.
  first = place / 'checkpoints' / '0' / 'state'
  make_folder(first.parent)
  write_whole(first, b'state')
  with pytest.raises(UsageError, match=r'\(seed: 0 -> 4\): choose another'):
    _start(place, seed=4, eval_every=3)


def test_a_folder_in_use_is_refused(tmp_path: Path):
  program = """
import sys
from examples.gpt2.run.folder import RunFolder
with RunFolder(sys.argv[1]):
  print('locked', flush=True)
  sys.stdin.read()
"""
  with subprocess.Popen(
    [sys.executable, '-c', program, str(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  ) as other:
    assert other.stdout.readline() == b'locked\n'
    with pytest.raises(UsageError, match='in use by a run'):
      _start(tmp_path)
    other.kill()
  _start(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
  (tmp_path / 'file').touch()
  with pytest.raises(UsageError, match='--out-dir .*cannot be written'):
    _start(tmp_path / 'file' / 'run')
