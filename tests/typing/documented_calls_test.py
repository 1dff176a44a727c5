"""A user's program is checked by mypy, with the types of Optax."""

from pathlib import Path
import subprocess
import sys

_PROGRAM = Path(__file__).with_name('documented_calls.py')


def test_documented_calls_have_the_types_that_they_take(tmp_path):
  done = subprocess.run(
    [sys.executable, '-m', 'mypy', '--config-file', '', '--strict',
     '--implicit-reexport', '--follow-untyped-imports',
     '--follow-imports=silent', '--cache-dir', tmp_path, _PROGRAM],
    cwd=_PROGRAM.parents[2], capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
