"""Updates compiled for TPUs, each in a process of its own."""

from collections.abc import Callable
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import jax
import pytest

from benchmarks import pod_update
from examples.gpt2 import compile_for

_ROOT = Path(__file__).parents[2]
_for_tpus = pytest.mark.skipif(
  bool(compile_for.missing('v5e')),
  reason="the TPU compiler is missing: pip install -e '.[tpu-compiler]'",
)

Rows = dict[str, dict[str, Any]]


@pytest.fixture
def compile_updates(tmp_path: Path) -> Callable[..., Rows]:
  """Compiles updates; returns what they do, by the name of the optimizer."""
  out = tmp_path / 'results.json'

  def compile_updates(*flags: str) -> Rows:
    # It keeps jax to the CPU.
    done = subprocess.run(
      [
        sys.executable, '-m', 'benchmarks.pod_update', *flags,
        '--out', str(out),
      ],
      capture_output=True,
      text=True,
      check=False,
      cwd=_ROOT,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())['rows']
    return {row['optimizer']: row for row in rows}

  return compile_updates


@_for_tpus
def test_merit_moves_less_than_lamb_on_tpus(compile_updates):
  rows = compile_updates(
    '--topologies', 'v5e:4x4', '--rows', '8192', '--columns', '4096'
  )
  moved = {name: row['bytes moved per parameter'] for name, row in rows.items()}
  assert moved['adamw'] <= 28.1
  assert moved['merit'] <= 40.1
  assert moved['merit'] <= moved['lamb'] <= 48.1
  assert rows['merit']['collectives'] == 'all-reduce'
  norms = 2 * (8192 + 4096) + 2
  assert rows['merit']['bytes in collectives'] <= 4 * norms


_STACKED = (
  '--topologies', 'v5e:2x2', '--shape', '4', '512', '2048', '--mesh', 'fsdp=2',
  '--optimizers',
)  # fmt: skip


@_for_tpus
def test_stacked_matrices_are_split_on_tpus_as_fsdp_splits_them(
  compile_updates,
):
  found = compile_updates(*_STACKED, 'merit', 'muon')
  assert {row['mesh'] for row in found.values()} == {'data=2,fsdp=2,tensor=1'}
  # Only maxima pass between devices.
  assert found['merit']['collectives'] == 'all-reduce'
  assert 0 < found['merit']['bytes sent per parameter'] < 0.1
  assert found['muon']['bytes sent per parameter'] > 1


@_for_tpus
@pytest.mark.parametrize(
  'mesh, split, most',
  [
    # To devices with whole matrices and back, 4 bytes a number, on two axes.
    ('fsdp=4,tensor=2', ('', 'fsdp', 'tensor'), 16),
    # Each device has two of four experts.
    ('fsdp=4,tensor=2', ('tensor', 'fsdp', ''), 16),
    ('fsdp=1', ('', '', ''), 0),
  ],
)
def test_whole_matrices_send_less_on_tpus(compile_updates, mesh, split, most):
  found = compile_updates(
    '--topologies', 'v5e:2x4', '--shape', '4', '256', '512', '--mesh', mesh,
    '--split', *split, '--optimizers', 'muon-hyperball', 'adam-hyperball',
  )  # fmt: skip
  hyperball, adam = found['muon-hyperball'], found['adam-hyperball']
  assert ('all-to-all' in hyperball['collectives']) == (most > 0)
  assert 'all-gather' not in hyperball['collectives']
  assert 'permute' not in hyperball['collectives']
  assert most / 4 <= hyperball['bytes sent per parameter'] <= most
  # Only norms.
  assert adam['bytes sent per parameter'] < 0.01


def test_a_mesh_that_does_not_divide_the_rows_is_refused(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
  monkeypatch.setattr(compile_for, 'devices', lambda _: jax.devices()[:4])
  with pytest.raises(SystemExit) as error:
    pod_update.main([
      '--shape', '4', '6', '8', '--mesh', 'fsdp=4',
      '--out', str(tmp_path / 'results.json'),
    ])  # fmt: skip
  assert error.value.code == 2
  assert 'that divide --shape, got fsdp for 6' in capsys.readouterr().err
