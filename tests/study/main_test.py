import fcntl
import json
import os
from pathlib import Path
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

from examples.study import __main__ as command
from examples.study.analysis import report
from tests.processes import free_port

_TINY_STUDY = Path(__file__).parent / 'tiny_study.py'


def test_a_plan_is_counted_without_a_run(tmp_path, capsys):
  command.main(['--plan-only', '--results', str(tmp_path / 'results')])
  text = capsys.readouterr().out
  count = int(re.search(r'about (\d+) trials left', text)[1])
  assert 800 < count < 5000
  assert not (tmp_path / 'results').exists()


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    ('--jobs 0 --results .', '--jobs must be at least 1, got 0'),
    ('--jobs 2 --mesh fsdp=2', '--jobs must be 1, got 2'),
    ('--scale small --together 3', '--together 3 needs --micro-batch-size'),
    ('--jobs 2 --together 3', '--together 3 needs one process and --jobs 1'),
    ('--steps 3', '--results another folder'),
    ('--data x.txt', '--results another folder'),
    ('--scale small --dtype bfloat16', '--results another folder'),
    ('--process-id 1', '--coordinator, --num-processes and --process-id'),
  ],
)
def test_flags_are_checked(flags, message, capsys):
  with pytest.raises(SystemExit) as error:
    command.main(flags.split())
  assert error.value.code == 2
  assert message in capsys.readouterr().err


@pytest.fixture(autouse=True)
def tokens(tmp_path: Path):
  """Random tokens, in the format of nanoGPT."""
  tokens = np.random.default_rng(0).integers(257, size=9000, dtype=np.uint16)
  for name in ('train.bin', 'val.bin'):
    tokens.tofile(tmp_path / name)


@pytest.fixture
def start_pair(tmp_path: Path):
  """Starts a tiny study as two processes, of two devices each."""

  def start(process: int, port: int) -> subprocess.Popen:
    environment = {
      'PYTHONPATH': str(_TINY_STUDY.parents[2]),
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': '2',
    }
    flags = (
      'batch-scaling', '--steps', '3', '--data', '.', '--mesh',
      'fsdp=2,tensor=2', '--results', f'results{process}', '--coordinator',
      f'localhost:{port}', '--num-processes', '2', '--process-id', str(process),
    )  # fmt: skip
    with (tmp_path / f'process{process}.log').open('w') as log:
      return subprocess.Popen(
        [sys.executable, _TINY_STUDY, *flags],
        cwd=tmp_path,
        env=os.environ | environment,
        stdout=log,
        stderr=log,
      )

  def start_pair() -> list[subprocess.Popen]:
    port = free_port()
    return [start(process, port) for process in range(2)]

  return start_pair


def _assert_results(folder: Path, scale: str) -> list[dict]:
  """Asserts that both runs have a result, and returns their records."""
  lines = (folder / f'{scale}.jsonl').read_text().splitlines()
  records = [json.loads(line) for line in lines]
  assert [x['learning_rate'] for x in records] == [0.01, 0.02]
  assert all(5 < x['loss'] < 7 for x in records)
  text = (folder / scale / 'RESULTS.md').read_text()
  # As the experiment has them, where the file is sorted.
  losses = [f'| {x["loss"]:.3f} (one seed) |' for x in reversed(records)]
  assert text.splitlines()[-2:] == losses
  assert (folder / scale / 'figures/batch-scaling.png').is_file()
  return records


def test_an_experiment_runs_from_beginning_to_end(
  tmp_path, monkeypatch, capsys
):
  tiny = runpy.run_path(str(_TINY_STUDY))
  monkeypatch.setattr(command, 'SCALES', tiny['SCALES'])
  for module in (command, report):
    monkeypatch.setattr(module, 'EXPERIMENTS', tiny['EXPERIMENTS'])
  monkeypatch.chdir(tmp_path)
  command.main([
    'batch-scaling', '--scale', 'small', '--steps', '3', '--data', '.',
    '--jobs', '1', '--mesh', 'fsdp=2,tensor=2', '--results', 'results',
  ])  # fmt: skip
  _assert_results(tmp_path / 'results', 'small')
  output = capsys.readouterr().out
  assert 'about 2 trials left' in output
  assert output.count('wrote') == 2


def test_what_is_not_complete_is_told(tmp_path, capsys):
  command.main(['report', '--results', str(tmp_path)])
  named = ', '.join(command.EXPERIMENTS)
  assert f'trials are missing: {named}\n' in capsys.readouterr().out


@pytest.mark.slow
def test_of_two_processes_the_first_has_the_results(start_pair, tmp_path):
  assert [x.wait() for x in start_pair()] == [0, 0]
  records = _assert_results(tmp_path / 'results0', 'nano')
  assert [x['processes'] for x in records] == [2, 2]
  assert not (tmp_path / 'results1').exists()
  assert 'wrote' not in (tmp_path / 'process1.log').read_text()


@pytest.mark.slow
def test_if_the_first_process_cannot_write_both_end(start_pair, tmp_path):
  folder = tmp_path / 'results0'
  (folder / '.nano.jsonl.partial').mkdir(parents=True)
  assert [x.wait() for x in start_pair()] == [2, 2]
  with (folder / '.nano.jsonl.lock').open('wb') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert [x.wait() for x in start_pair()] == [2, 2]
  for i in range(2):
    log = (tmp_path / f'process{i}.log').read_text()
    assert 'in use by another study' in log


def test_of_closed_experiments_the_results_are_printed(capsys):
  command.main(['mechanism'])
  text = capsys.readouterr().out
  assert '| attention | 1.604 ± 0.022 (0.0156) |' in text
  assert 'which commit has the code' in text
