"""What tests of the planner share."""

from collections.abc import Callable
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope='session')
def run() -> Run:
  """Runs Python in a process of its own, since plans keep jax to the CPU."""

  def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
      [sys.executable, *args],
      capture_output=True,
      text=True,
      check=False,
      cwd=_ROOT,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'} | environment,
    )

  return run


@pytest.fixture
def results_of(run: Run, tmp_path: Path) -> Callable[..., dict[str, Any]]:
  """Runs a module of the repository, and returns the JSON that it writes."""
  out = tmp_path / 'results.json'

  def results_of(module: str, *args: str) -> dict[str, Any]:
    done = run('-m', module, *args, '--out', str(out))
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())

  return results_of
