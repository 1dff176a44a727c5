import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize('stream', ['stdout', 'stderr'])
def test_a_reader_that_leaves_does_not_end_a_command(stream: str):
  read, write = os.pipe()
  os.close(read)
  program = f"""
import sys
from examples.gpt2.command import exit_on_error
with exit_on_error():
  for _ in range(3):
    print('text', file=sys.{stream}, flush=True)
raise SystemExit(7)
"""
  done = subprocess.run(
    [sys.executable, '-c', program], check=False, **{stream: write}
  )
  os.close(write)
  assert done.returncode == 7


def test_text_that_the_terminal_lacks_is_escaped():
  program = """
from examples.gpt2.command import exit_on_error
with exit_on_error():
  print('caf\\u00e9')
"""
  done = subprocess.run(
    [sys.executable, '-c', program],
    check=True,
    env=os.environ | {'PYTHONIOENCODING': 'ascii'},
    capture_output=True,
  )
  assert done.stdout == b'caf\\xe9\n'
