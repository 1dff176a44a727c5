import json
from pathlib import Path
import subprocess
import sys

import pytest

from examples.gpt2.command import UsageError
from examples.gpt2.config import Config, change, identity, to_json
from examples.gpt2.resolve import resolve
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.storage import make_folder, write_whole
from tests.gpt2.runs import contents

# Where a run can write.
_PLACES = pytest.mark.parametrize('place', ['disk', 'gs'], indirect=True)


def _config(**settings) -> Config:
  defaults = dict(
    num_layers=1, num_heads=1, width=16, context_length=16, batch_size=8,
    steps=10,
  )  # fmt: skip
  return resolve(change(Config(), **defaults | settings))


def _start(path: Path, **changes) -> RunFolder:
  """Starts a run with some settings."""
  with RunFolder(path) as folder:
    config = _config(**changes)
    decides = identity(config) | {'data_sha256': 'ab'}
    folder.start(config, decides, {'settings': to_json(config)})
  return folder


@pytest.mark.parametrize(
  'torn',
  [
    '{"step": 4, "lo',
    'garbage\n[1]\n',
    # Of somebody who has edited the file.
    '{"step": "4", "tokens": 40}\n{"step": 4}\n',
  ],
)
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
  folder.finish('text')
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


def _has_done(place: Path, step: int) -> None:
  file = place / 'checkpoints' / str(step) / 'state'
  make_folder(file.parent)
  write_whole(file, b'state')


@_PLACES
def test_another_run_is_refused_and_what_differs_is_named(place: Path):
  _start(place, seed=3)
  _start(place)  # Nothing had been computed.
  _has_done(place, 0)
  with pytest.raises(UsageError, match=r'\(seed: 0 -> 4\): choose another'):
    _start(place, seed=4, eval_every=3)


_STABLE = dict(schedule='wsd', warmup=2, decay=0, batch_ramp=('2:2', '4:5'))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'steps': 20}, None),
    ({'batch_size': 16}, None),
    ({'batch_ramp': ('2:2', '4:7')}, None),
    ({'steps': 3, 'batch_ramp': ('2:2',)}, 'has done 4 steps'),
    ({'warmup': 3}, 'step 1 had the learning rate .* with --warmup in steps'),
    (
      {'batch_ramp': ('2:3', '4:5')},
      'step 3 had a batch of 4, now 2. Another ramp is for the steps',
    ),
  ],
)
def test_only_the_future_of_a_run_may_change(tmp_path, changes, message):
  _start(tmp_path, **_STABLE)
  _has_done(tmp_path, 4)
  if message is None:
    _start(tmp_path, **_STABLE | changes)
  else:
    with pytest.raises(UsageError, match=message):
      _start(tmp_path, **_STABLE | changes)


def test_a_folder_in_use_is_refused(tmp_path: Path):
  program = """
import sys
from examples.gpt2.run_folder import RunFolder
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
