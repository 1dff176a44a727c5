"""The file to copy: any mesh, resuming, what it refuses, its commands."""

import json
import logging
import os
from pathlib import Path
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tyro

from examples import pretrain
from tests.processes import run_all

_ROOT = Path(__file__).parents[1]
_FILE = _ROOT / 'examples' / 'pretrain.py'
_PACKAGES = {'flax', 'jax', 'merit_optax', 'numpy', 'optax', 'orbax', 'tyro'}
_SIZES = dict(
  num_layers=2, num_heads=2, width=16, context_length=16, batch_size=16,
  steps=20, eval_every=8, eval_batches=2, checkpoint_every=4,
)  # fmt: skip
_MESH = {'mesh': 'fsdp=2,tensor=2', 'micro_batches': 2}


def _train(folder: Path, **settings) -> list[dict]:
  """Returns the metrics of a run."""
  pretrain.train(pretrain.Config(out_dir=folder, **(_SIZES | settings)))
  return _lines(folder)


def _lines(folder: Path) -> list[dict]:
  return [json.loads(x) for x in (folder / 'metrics.jsonl').open()]


def _write_tokens(folder: Path) -> Path:
  """Writes tokens below 251 to a new folder."""
  folder.mkdir()
  tokens = np.random.default_rng(0).integers(251, size=4000, dtype=np.uint16)
  for name in ('train.bin', 'val.bin'):
    tokens.tofile(folder / name)
  return folder


@pytest.fixture
def data(tmp_path):
  return _write_tokens(tmp_path / 'data')


@pytest.mark.parametrize('optimizer', ['merit', 'muon-hyperball'])
def test_a_mesh_trains_as_one_device(optimizer, tmp_path, monkeypatch):
  split = _train(tmp_path / 'split', optimizer=optimizer, **_MESH)
  one = jax.make_mesh(
    (1, 1, 1), ('data', 'fsdp', 'tensor'), devices=jax.devices()[:1],
    axis_types=(jax.sharding.AxisType.Auto,) * 3,
  )  # fmt: skip
  monkeypatch.setattr(pretrain, 'make_mesh', lambda _: one)
  whole = _train(tmp_path / 'whole', optimizer=optimizer)
  assert [x['step'] for x in whole] == [*range(1, 21)]
  assert [x['step'] for x in whole if 'val_loss' in x] == [8, 16, 20]
  assert whole[-1]['val_loss'] < whole[0]['train_loss'] - 1
  for x, y in zip(split, whole, strict=True):
    assert x == pytest.approx(y, abs=1e-4)


def test_parameters_and_moments_lie_on_the_mesh():
  config = pretrain.Config(**_SIZES, **_MESH)
  with jax.set_mesh(pretrain.make_mesh(config)):
    state = pretrain.init_state(config)
  split = [x.sharding.num_devices for x in jax.tree.leaves(state)]
  assert set(split) == {8}
  parts = {
    jax.tree_util.keystr(path[-2:], simple=True, separator='/')
    for path, x in jax.tree.leaves_with_path(state)
    if not x.is_fully_replicated
  }
  assert parts == pretrain.SHARDINGS.keys()


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_resumes_to_the_same_bits(number, tmp_path):
  whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
  flags = [f'--{k.replace("_", "-")}={x}' for k, x in (_SIZES | _MESH).items()]
  process = subprocess.Popen(
    [sys.executable, str(_FILE), *flags, f'--out-dir={stopped}'],
    env=os.environ
    | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'}
    | {'JAX_NUM_CPU_DEVICES': '8'},
  )
  while not (stopped / 'checkpoints' / '4').exists():
    assert process.poll() is None
    time.sleep(0.002)
  process.send_signal(number)
  process.wait()
  if number == signal.SIGKILL:
    with (stopped / 'metrics.jsonl').open('a') as file:
      file.write('{"step": 21, "tra')  # A torn line.
  else:
    assert process.returncode in (0, 143)  # It may have been at its end.
  assert _train(stopped, **_MESH) == _train(whole, **_MESH)


def test_a_run_that_goes_on_says_what_is_done_and_warns_of_nothing(
  tmp_path, capsys, caplog
):
  lines = _train(tmp_path)
  shutil.rmtree(tmp_path / 'checkpoints' / '20')
  for done in (16, 20):
    assert _train(tmp_path) == lines
    output = capsys.readouterr().out
    assert f'{tmp_path}: {done} of 20 steps are done\n' in output
  assert [x for x in caplog.records if x.levelno >= logging.WARNING] == []


def test_another_run_is_not_gone_on_with(tmp_path):
  _train(tmp_path, steps=1)
  with pytest.raises(ValueError, match='has seed 0, not 1'):
    _train(tmp_path, steps=1, seed=1)
  _write_tokens(tmp_path / 'data')
  with pytest.raises(ValueError, match=r'has data .*, not \[\[4000, '):
    _train(tmp_path, steps=1, data=str(tmp_path / 'data'))


def test_numbers_that_are_not_finite_leave_no_checkpoint(tmp_path):
  with pytest.raises(FloatingPointError, match='Step [12] is not finite'):
    _train(tmp_path, learning_rate=1e30, checkpoint_every=1)
  assert not [*(tmp_path / 'checkpoints').iterdir()]


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'mesh': 'fsdp=3'}, 'The number of devices must be a multiple of 3, got'),
    ({'mesh': 'fsdp=8', 'width': 20}, 'width must be a multiple of 8, got 20'),
    ({'mesh': 'tensor=4'}, 'num_heads must be a multiple of 4, got 2'),
    ({'mesh': 'fsdp=0'}, "mesh must be as fsdp=4,tensor=2, got 'fsdp=0'"),
    ({'mesh': 'fdsp=2'}, "mesh must be as fsdp=4,tensor=2, got 'fdsp=2'"),
    ({'batch_size': 12}, 'batch_size must be a multiple of 8, got 12'),
    ({'micro_batches': 4}, 'batch_size must be a multiple of 32, got 16'),
    ({'checkpoint_every': 0}, 'checkpoint_every must be at least 1, got 0'),
    ({'vocab_size': 200}, 'vocab_size must be above 2.., a token'),
    ({'context_length': 4000}, 'context_length must be below 4000'),
    (
      {'data': __file__},
      r'data must be stdlib, or .*prepare.*, got .*test\.py',
    ),
    ({'data': '/no/such'}, "data must be stdlib, or .*, got '/no/such'"),
  ],
)
def test_settings_that_do_not_fit_are_refused(settings, message, data):
  with pytest.raises(ValueError, match=message):
    _train(data / 'run', **{'data': str(data), **settings})


@pytest.mark.parametrize('dtype', [np.int32, np.uint32, np.int64, '>i4'])
def test_wider_tokens_are_refused(dtype, data):
  file = data / 'val.bin'
  np.fromfile(file, np.uint16).astype(dtype).tofile(file)
  with pytest.raises(ValueError, match=r'val\.bin must hold uint16, not int32'):
    _train(data / 'run', data=str(data))


def test_a_folder_of_something_else_is_refused(data):
  with pytest.raises(ValueError, match='out_dir must be new, empty or of a ru'):
    _train(data, data=str(data))


def test_it_is_short_and_needs_nothing_else_of_the_repository():
  text = _FILE.read_text()
  imported = re.findall(r'^ *(?:import|from) (\w+)', text, re.MULTILINE)
  assert set(imported) <= _PACKAGES | sys.stdlib_module_names
  assert len(text.splitlines()) <= 400


def _commands() -> list[str]:
  """Returns the commands in the file and in the pages that run it."""
  pages = _ROOT / 'README.md', *_ROOT.glob('docs/*.md'), _FILE
  text = '\n'.join(page.read_text() for page in pages).replace('\\\n', ' ')
  line = r'^ *(?:srun )?((?:\w+=\w+ )?python (?:examples/)?pretrain\.py.*)$'
  found = re.findall(line, text, re.MULTILINE)
  return sorted({shlex.join(shlex.split(x, True)) for x in found})


@pytest.mark.parametrize('command', _commands())
def test_a_command_takes_its_arguments(command):
  arguments = shlex.split(command.split('pretrain.py')[1])
  tyro.cli(pretrain.Config, args=arguments)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
  command = next(x for x in _commands() if '--distributed on' in x)
  flags = shlex.split(command.split('pretrain.py')[1]) + [
    f'--{k.replace("_", "-")}={x}' for k, x in _SIZES.items()
  ]
  job = {
    'JAX_NUM_CPU_DEVICES': '4', 'SLURM_JOB_ID': str(random.randrange(1 << 20)),
    'SLURM_NTASKS': '2', 'SLURM_STEP_NODELIST': 'localhost',
  }  # fmt: skip
  run = [sys.executable, str(_FILE), *flags, f'--out-dir={tmp_path / "two"}']
  ranks = [{'SLURM_PROCID': x, 'SLURM_LOCALID': x} for x in ('0', '1')]
  outputs = run_all([run] * 2, [job | x for x in ranks])
  assert re.findall(r'^step (\d+) ', outputs[0], re.MULTILINE)[-1] == '20'
  assert 'step' not in outputs[1]
  for x, y in zip(
    _lines(tmp_path / 'two'), _train(tmp_path / 'one'), strict=True
  ):
    assert x == pytest.approx(y, abs=1e-3)
