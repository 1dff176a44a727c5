"""Processes that tests run beside each other."""

from collections.abc import Sequence
import contextlib
import os
from pathlib import Path
import socket
import subprocess

_ROOT = Path(__file__).parents[1]


def free_port(first: int = 0) -> int:
  """Returns a port that nobody listens on, from ``first`` on."""
  for port in range(first, 65536):
    with socket.socket() as listener, contextlib.suppress(OSError):
      listener.bind(('localhost', port))
      return listener.getsockname()[1]
  raise AssertionError('no port is free')


def run_all(
  commands: Sequence[Sequence[str]],
  environments: Sequence[dict[str, str]] | None = None,
) -> list[str]:
  """Runs commands at the same time, and returns what each has printed.

  They run in the root of the repository, import from it, and use the CPU; each
  may have more in its environment. None of them may fail.
  """
  running = [
    subprocess.Popen(
      command,
      cwd=_ROOT,
      env=os.environ
      | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'}
      | environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for command, environment in zip(
      commands, environments or [{}] * len(commands), strict=True
    )
  ]
  # If one fails, the others may wait for it for ever.
  try:
    outputs = [process.communicate(timeout=300) for process in running]
  finally:
    for process in running:
      process.kill()
  failed = any(process.returncode for process in running)
  assert not failed, '\n'.join(errors for _, errors in outputs)
  return [printed for printed, _ in outputs]
