import json
import math
from pathlib import Path
import subprocess
import sys

import pytest

from examples.gpt2.config import (
  PRESETS,
  UsageError,
  change,
  identity,
  resolve,
  to_json,
)
from examples.gpt2.run import RunFolder
from examples.gpt2.storage import make_folder, write_whole
from tests.gpt2.runs import contents

_CONFIG = resolve(PRESETS['demo'])
_IDENTITY = identity(_CONFIG) | {'data_sha256': 'ab'}


def _start(path: Path, **changes) -> RunFolder:
  """Starts a run, with other settings than the demo's."""
  with RunFolder(path) as folder:
    config = change(_CONFIG, **changes)
    known_by = identity(config) | {'data_sha256': 'ab'}
    others = {'settings': to_json(config), 'versions': {'jax': '1'}}
    folder.start(config, known_by, others)
  return folder


# Where a run can write.
_PLACES = pytest.mark.parametrize('place', ['disk', 'gs'], indirect=True)


@_PLACES
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


@pytest.mark.parametrize('torn', ['{"step": 4, "lo', 'garbage\n[1]\n'])
@pytest.mark.parametrize('step', [0, 2])
def test_later_lines_and_torn_ones_are_cut_off(tmp_path, torn: str, step: int):
  lines = [{'step': i, 'tokens': 10 * i} for i in (1, 2, 3)]
  text = ''.join(f'{json.dumps(line)}\n' for line in lines)
  (tmp_path / 'metrics.jsonl').write_text(text + torn)
  folder = RunFolder(tmp_path)
  assert folder.keep_metrics(step) == 10 * step
  assert folder.read_metrics() == lines[:step]


@_PLACES
def test_a_finished_run_is_kept(place: Path):
  folder = _start(place)
  assert not folder.finished
  folder.write_sample('text')
  assert folder.finished
  before = contents(place)
  _start(place, eval_every=3)
  assert contents(place) == before


@pytest.mark.parametrize('name', ['checkpoints', 'metrics.jsonl'])
def test_files_of_something_else_are_kept(tmp_path: Path, name: str):
  (tmp_path / name).write_text('mine')
  with pytest.raises(UsageError, match=rf'holds {name} of something else'):
    _start(tmp_path)
  assert set(contents(tmp_path)) == {name}


@_PLACES
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
from examples.gpt2.run import RunFolder
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
