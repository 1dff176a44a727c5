"""Plans for GPUs, each in a process of its own: it keeps jax to the CPU."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from examples.gpt2.config import UsageError
from examples.plan import gpus, topology

_needs_compiler = pytest.mark.skipif(
  bool(gpus.missing()),
  reason="the compiler for GPUs is missing: pip install -e '.[plan-cuda]'",
)
_TINY = (
  '--num-layers', '2', '--width', '256', '--num-heads', '4',
  '--context-length', '256', '--vocab-size', '512', '--batch-size', '32',
  '--dtype', 'bfloat16',
)  # fmt: skip


@pytest.mark.parametrize('name', ['h100', 'h100:8', 'a100:0x8', 'h200:2x2x2'])
def test_a_wrong_topology_is_explained(name: str):
  with pytest.raises(UsageError, match=f'--topology {name}: .*h100:1x8'):
    topology.devices(name)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(gpus, 'missing', lambda: ['jax_cuda12_plugin'])
  with pytest.raises(UsageError, match=r'jax_cuda12_plugin.*plan-cuda'):
    topology.devices('h100:1x8')


def _plan(tmp_path: Path, *args: str) -> dict:
  out = tmp_path / 'plan.json'
  done = subprocess.run(
    [sys.executable, '-m', 'examples.plan', *_TINY, *args, '--out', str(out)],
    capture_output=True,
    text=True,
    check=False,
    cwd=Path(__file__).parents[2],
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 0, done.stderr
  return json.loads(out.read_text())


@_needs_compiler
@pytest.mark.parametrize(
  'kind',
  [
    pytest.param(kind, marks=() if kind == 'h100' else pytest.mark.slow)
    for kind in ('a100', 'h100', 'h200', 'b200')
  ],
)
def test_a_plan_of_two_hosts(kind: str, tmp_path: Path):
  plan = _plan(
    tmp_path, '--topology', f'{kind}:2x2', '--mesh', 'data=2,fsdp=2'
  )  # fmt: skip
  assert kind.upper() in plan['device_kind']
  assert plan['jax-cuda12-plugin']
  assert plan['fits']
  assert plan['collectives']['all-gather']['executions'] >= 2
  assert plan['network_seconds'] > 0
  slower = _plan(
    tmp_path, '--topology', f'{kind}:2x2', '--mesh', 'data=2,fsdp=2',
    '--network', '0.001',
  )  # fmt: skip
  assert slower['network_seconds'] > 10 * plan['network_seconds']
  assert slower['compute_seconds'] == plan['compute_seconds']
