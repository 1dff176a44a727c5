"""Plans for TPUs, each in a process of its own: it keeps jax to the CPU."""

import importlib.util
import json
import math
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh
import pytest

from examples.gpt2.config import Config, UsageError
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.model.attention import causal_attention
from examples.gpt2.presets import resolve
from examples.gpt2.run.step import Trainer
from examples.plan import __main__ as plan, programs, topology

_needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason="the TPU compiler is missing: pip install -e '.[pod]'",
)
_TINY = (
  '--num-layers', '2', '--width', '256', '--num-heads', '4',
  '--context-length', '128', '--vocab-size', '512', '--batch-size', '16',
  '--unroll', '1',
)  # fmt: skip


def _run(module: str, *args: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, '-m', module, *args],
    capture_output=True,
    text=True,
    check=False,
    cwd=Path(__file__).parents[2],
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )


def _plan(out: Path, *args: str) -> tuple[dict[str, Any], str]:
  """Returns the JSON and the printed text of a plan."""
  done = _run('examples.plan', *_TINY, *args, '--out', str(out))
  assert done.returncode == 0, done.stderr
  return json.loads(out.read_text()), done.stdout


def test_without_the_compiler_it_says_what_to_install(monkeypatch, capsys):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(SystemExit) as error:
    plan.main(['--topology', 'v5e:2x2'])
  assert error.value.code == 2
  text = capsys.readouterr().err
  assert "'.[pod]'" in text
  assert topology.requirement() in text
  assert f'jax {jax.__version__}' in text


def test_the_libtpu_that_jax_asks_for_is_found():
  assert topology.requirement().startswith('libtpu==')


def test_a_sweep_tries_every_mesh_once():
  found = plan.meshes(12)
  assert len(found) == len(set(found)) == 18
  for text in found:
    sizes = dict(axis.split('=') for axis in text.split(','))
    assert list(sizes) == ['data', 'fsdp', 'tensor']
    assert math.prod(map(int, sizes.values())) == 12


@pytest.mark.parametrize(
  ('config', 'batch', 'micro'),
  [
    (Config(preset='xl'), 8192, 256),
    (Config(preset='demo'), 256, 256),
    (Config(micro_batch_size=24), 72, 24),
    (Config(batch_size=512), 512, 256),
    (Config(batch_size=512, micro_batch_size=128), 512, 128),
  ],
)
def test_the_batch_has_whole_micro_batches(
  config: Config, batch: int, micro: int
):
  found = plan.fit_batch(config, 256)
  assert (found.batch_size, found.micro_batch_size) == (batch, micro)


def test_a_batch_that_was_asked_for_is_not_changed():
  with pytest.raises(UsageError, match='--micro-batch-size must divide'):
    plan.fit_batch(Config(batch_size=100), 256)


@pytest.mark.parametrize('platform', ['tpu', 'gpu', None])
def test_attention_is_that_of_the_mesh(platform: str | None, monkeypatch):
  calls = []
  monkeypatch.setattr(
    jax.nn, 'dot_product_attention', lambda *x, **_: calls.append(x) or x[0]
  )
  device = platform and AbstractDevice(
    device_kind='chip', num_cores=None, platform=platform
  )
  mesh = AbstractMesh((1,), ('data',), abstract_device=device)
  query = jax.ShapeDtypeStruct((1, 8, 1, 4), 'float32')
  with jax.sharding.use_abstract_mesh(mesh):
    jax.eval_shape(causal_attention, query, query, query)
  assert bool(calls) == (platform is not None)


def test_the_update_alone_has_no_gradients():
  config = resolve(Config(num_layers=1, width=16, num_heads=2, vocab_size=257))
  trainer = Trainer(config, 257, make_mesh('fsdp=8'))
  update = programs.figures(programs.compile_update(trainer))
  step = programs.figures(programs.compile_step(config, trainer))
  assert 0 < update.hbm_bytes < step.hbm_bytes
  assert {x.kind for x in update.collectives} == {'all-reduce'}


@_needs_libtpu
@pytest.mark.parametrize('name', ['v5e', 'v5e:3x5', 'gpu:2x2', 'TPU7x:2x2x1'])
def test_a_wrong_topology_is_explained(name: str):
  done = _run('examples.plan', '--topology', name)
  assert done.returncode == 2
  assert f'--topology {name}' in done.stderr
  assert 'v5e:16x16' in done.stderr or 'not known' in done.stderr
  assert 'Traceback' not in done.stderr


@_needs_libtpu
def test_a_plan_of_a_small_slice(tmp_path: Path):
  results, text = _plan(
    tmp_path / 'plan.json', '--topology', 'v5e:2x2', '--mesh', 'fsdp=2,tensor=2'
  )
  assert results['device_kind'] == 'TPU v5 lite'
  assert results['micro_batch_size'] == results['batch_shards'] == 2
  memory = results['memory']
  assert memory['fits']
  assert memory['optimizer_state'] == pytest.approx(
    2 * memory['parameters'], rel=1e-3
  )
  parts = set(memory) - {'needed', 'available', 'fits'}
  assert sum(memory[name] for name in parts) == memory['needed']
  times = results['estimate']
  assert times['seconds'] == max(
    times[name] for name in ('compute', 'memory', 'network')
  )
  # Each of the 8 micro-batches takes the parameters of each of two layers.
  assert results['collectives']['all-gather']['executions'] >= 2 * 8
  for word in ('fits', 'ESTIMATED', 'MFU', 'all-gather', 'tokens/s'):
    assert word in text


@_needs_libtpu
def test_the_update_sends_norms_only(tmp_path: Path):
  results, _ = _plan(
    tmp_path / 'plan.json', '--topology', 'v5e:2x2', '--mesh', 'fsdp=4',
    '--optimizer', 'merit',
  )  # fmt: skip
  update = results['update']
  assert set(update['collectives']) == {'all-reduce'}
  width, layers = 256, 2
  shapes = [(width, 3 * width), (width, width), (width, 1024), (1024, width)]
  matrices = [(512, width), (128, width), *layers * shapes]
  # Biases and norms have two numbers, and each parameter one in the norm of
  # the gradient.
  vectors = 2 + layers * 8
  numbers = sum(2 * sum(shape) + 2 for shape in matrices)
  numbers += 2 * vectors + len(matrices) + vectors
  # Four bytes, and the ring of four devices sends each 3 / 2 times.
  assert 0 < update['bytes_sent_per_device'] <= 4 * numbers * 3 / 2
  assert 0 < update['share_of_step'] < 1


@pytest.mark.slow
@_needs_libtpu
def test_a_sweep_ranks_what_fits_and_names_what_is_left_out(tmp_path: Path):
  results, text = _plan(
    tmp_path / 'plan.json', '--topology', 'v5e:2x2', '--sweep', '--quick',
    '--num-heads', '2', '--width', '128',
  )  # fmt: skip
  tried = [row['mesh'] for row in results['rows']]
  assert sorted([*tried, *results['left_out']]) == sorted(plan.meshes(4))
  assert list(results['left_out']) == ['data=1,fsdp=1,tensor=4']
  seconds = [row['seconds'] for row in results['rows']]
  assert seconds == sorted(seconds)
  assert 'left out, 1 x: tensor = 4' in text


@_needs_libtpu
def test_what_does_not_fit_gets_advice_and_its_place_in_a_sweep(tmp_path: Path):
  big = (
    '--topology', 'v5e:2x2', '--num-layers', '1', '--width', '16384',
    '--context-length', '8192', '--sequences-per-shard', '4', '--quick',
  )  # fmt: skip
  out = tmp_path / 'plan.json'
  done = _run('examples.plan', *_TINY, *big, '--mesh', 'tensor=4')
  assert done.returncode == 4, done.stderr
  assert 'out of memory' in done.stderr
  assert '--remat dots' in done.stderr
  results, text = _plan(out, *big, '--sweep')
  assert len(results['rows']) == 6
  assert not any(row['fits'] for row in results['rows'])
  assert 'of 15.75G' in text


@_needs_libtpu
def test_merit_moves_less_than_lamb(tmp_path: Path):
  out = tmp_path / 'update.json'
  done = _run(
    'benchmarks.pod_update', '--topologies', 'v5e:4x4', '--rows', '8192',
    '--columns', '4096', '--out', str(out),
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  rows = {row['optimizer']: row for row in json.loads(out.read_text())['rows']}
  moved = {name: row['bytes moved per parameter'] for name, row in rows.items()}
  assert moved['adamw'] <= 28.1
  assert moved['merit'] <= 40.1
  assert moved['merit'] <= moved['lamb'] <= 48.1
  assert rows['merit']['collectives'] == 'all-reduce'
  numbers = 2 * (8192 + 4096) + 2
  assert rows['merit']['numbers reduced'] <= numbers
