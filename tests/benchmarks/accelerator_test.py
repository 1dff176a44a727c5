import json
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import get_args

import pytest

from benchmarks import accelerator

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
  """Lets parts be short commands; returns those that ran."""
  ran: list[list[str]] = []
  kinds = {
    'trajectories': 'pass',
    'optax-suite': 'raise SystemExit(1)',
    'resume': 'import time; time.sleep(60)',
  }

  def command(_: accelerator.Settings, part: accelerator.Part):
    ran.append(['-c', kinds[part]])
    return ran[-1]

  monkeypatch.setattr(accelerator, 'command', command)
  monkeypatch.setattr(accelerator, '_machine', lambda: {'backend': 'gpu'})
  return ran


def _run(out: Path, *args: str) -> dict[str, str]:
  """Returns how the parts went."""
  accelerator.main(['--out', str(out), *args])
  results = [json.loads(x.read_text()) for x in out.glob('*.json')]
  return {x['part']: x['status'] for x in results}


def test_parts_end_as_they_should_and_are_not_repeated(
  tmp_path: Path, commands: list[list[str]], capsys
):
  args = ('--parts', 'trajectories', 'optax-suite', 'resume')
  expected = {
    'trajectories': 'done',
    'optax-suite': 'failed',
    'resume': 'not finished',
  }
  assert _run(tmp_path, *args, '--limit', '1') == expected
  text = capsys.readouterr().out
  assert f'optax-suite: see {tmp_path / "optax-suite.log"}' in text
  commands.clear()
  assert _run(tmp_path, *args, '--limit', '1') == expected
  assert len(commands) == 2


def test_a_part_ends_with_the_command(tmp_path: Path):
  code = f"""
from benchmarks import accelerator
accelerator.command = lambda *_: ['-c', (
  "import os, time, pathlib; "
  "pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
  "time.sleep(60)"
)]
accelerator.main(
  ['--out', {str(tmp_path)!r}, '--dry-run', '--parts', 'trajectories']
)
"""
  with subprocess.Popen([sys.executable, '-c', code], cwd=_ROOT) as process:
    while not (tmp_path / 'pid').exists() or not (
      pid := (tmp_path / 'pid').read_text()
    ):
      assert process.poll() is None
      time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
  assert not Path('/proc', pid).exists()


@pytest.mark.slow
def test_all_parts_run_dry(tmp_path: Path):
  parts = get_args(accelerator.Part)
  found = _run(tmp_path, '--dry-run', '--parts', *parts)
  assert found == dict.fromkeys(parts, 'done')
  table = (tmp_path / 'table.txt').read_text()
  assert 'merit' in table
