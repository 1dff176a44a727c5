"""The file to copy: the trainer's losses, any mesh, resuming, its commands."""

import dataclasses
import functools
from pathlib import Path
import random
import re
import shlex
import sys
import tempfile
from unittest import mock

from flax import nnx
import jax
import numpy as np
import pytest
import tyro

from examples import pretrain
from examples.gpt2.config import Config
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.presets import resolve
from examples.gpt2.run.step import Trainer
from tests.processes import run_all

_ROOT = Path(__file__).parents[1]
_FILE = _ROOT / 'examples' / 'pretrain.py'
_PACKAGES = {
  'etils', 'flax', 'jax', 'merit_optax', 'numpy', 'optax', 'orbax', 'tyro',
}  # fmt: skip
_SIZES = dict(
  num_layers=2, num_heads=2, width=16, init_std=0.1, context_length=16,
  batch_size=16, steps=20, learning_rate=0.03,
)  # fmt: skip


def _config(folder: str | Path, **settings) -> pretrain.Config:
  defaults = dict(accumulation_steps=2, out_dir=Path(folder), **_SIZES)
  return pretrain.Config(**defaults | settings)


def _one_device(_: pretrain.Config) -> jax.sharding.Mesh:
  return make_mesh('', jax.devices()[:1])


@functools.cache
def _losses(**settings) -> list[float]:
  """Returns the losses of a run, without settings on one device."""
  with tempfile.TemporaryDirectory() as folder:
    if settings:
      return pretrain.train(_config(folder, **settings))
    with mock.patch.object(pretrain, 'make_mesh', _one_device):
      return pretrain.train(_config(folder))


def _name(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='.')


def _trainer_params(params: nnx.State, like: nnx.State) -> nnx.State:
  """Puts parameters into the tree of the trainer."""
  ours = {_name(path): x for path, x in jax.tree.leaves_with_path(params)}

  def find(path: tuple, x: jax.Array) -> jax.Array:
    name = _name(path).replace('.attention.', '.').replace('.mlp.', '.')
    return ours.pop(name).reshape(x.shape)

  found = jax.tree.map_with_path(find, like)
  assert not ours
  return found


# Of pretrain.py and of the trainer.
_MODELS = {
  'GPT-2': ({}, {}),
  'QK-norm': ({'qk_norm': True}, {'qk_norm': True}),
  'Llama': (
    {'llama': True},
    {'architecture': 'llama', 'mlp_width': 64, 'norm_epsilon': 1e-5},
  ),
}


@pytest.mark.parametrize('model', _MODELS)
def test_losses_are_those_of_the_trainer(model, tmp_path):
  ours, theirs = _MODELS[model]
  config = _config(tmp_path, **ours)
  mesh = _one_device(config)
  settings = resolve(Config(micro_batch_size=8, unroll=1, **_SIZES, **theirs))
  trainer = Trainer(settings, config.vocab_size, mesh)
  tokens, _ = pretrain.load_tokens(config)
  expected = []
  with jax.set_mesh(mesh):
    state, params = trainer.init(), pretrain.init_state(config)['params']
    state = state._replace(params=_trainer_params(params, state.params))
    for step in range(1, config.steps + 1):
      tokens_ABT = pretrain.make_batch(tokens, config, step)
      state, metrics = trainer.step(state, tokens_ABT)
      expected.append(metrics['train_loss'])
  assert expected[-1] < expected[0] - 0.5
  # Of other models on a mesh.
  found = _losses(fsdp=2, tensor=2, **ours) if ours else _losses()
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_mesh_gives_the_losses_of_one_device():
  found = _losses(fsdp=2, tensor=2)
  np.testing.assert_allclose(found, _losses(), rtol=0, atol=1e-5)


def test_a_step_leaves_the_state_where_it_is(tmp_path):
  config = _config(tmp_path, fsdp=2, tensor=2)
  tokens, _ = pretrain.load_tokens(config)
  with jax.set_mesh(pretrain.make_mesh(config)):
    state = pretrain.init_state(config)
    places = {
      _name(path): x.sharding for path, x in jax.tree.leaves_with_path(state)
    }
    tokens_ABT = pretrain.make_batch(tokens, config, 1)
    state, _ = pretrain.train_step(state, tokens_ABT, config)
  for path, x in jax.tree.leaves_with_path(state):
    name = _name(path)
    assert x.sharding.is_equivalent_to(places[name], x.ndim), name
    # A fourth of each matrix and its moments is on a device, where data is 2.
    is_split = any(name.endswith(matrix) for matrix in pretrain.MATRICES)
    assert x.addressable_shards[0].data.size * (4 if is_split else 1) == x.size


def test_a_run_resumes_with_the_same_losses_and_settings(tmp_path):
  config = _config(tmp_path, fsdp=2, tensor=2, eval_every=4)
  make_batch = pretrain.make_batch

  def stop(tokens, config, step):
    if step == 11:
      raise KeyboardInterrupt
    return make_batch(tokens, config, step)

  with (
    mock.patch.object(pretrain, 'make_batch', stop),
    pytest.raises(KeyboardInterrupt),
  ):
    pretrain.train(config)
  # The last line of output and its checkpoint were those of step 8.
  assert pretrain.train(config) == _losses(fsdp=2, tensor=2)[8:]
  for name, value in dict(learning_rate=0.01, seed=1, steps=30).items():
    with pytest.raises(ValueError, match=f"holds a run with .*'{name}': '"):
      pretrain.train(_config(tmp_path, **{name: value}))
  assert pretrain.train(_config(tmp_path, accumulation_steps=1)) == []


def test_bfloat16_and_remat():
  losses = _losses(fsdp=8, dtype='bfloat16', remat=True)
  np.testing.assert_allclose(losses, _losses(), rtol=0, atol=0.05)
  assert np.abs(np.subtract(losses, _losses())).max() > 1e-4


def test_layers_that_are_compiled_one_by_one():
  losses = _losses(fsdp=8, unroll=True)
  np.testing.assert_allclose(losses, _losses(), rtol=0, atol=1e-5)


def test_gradients_of_embedding_rows_are_added_up_in_float32(tmp_path):
  config = _config(tmp_path, dtype='bfloat16')
  params = jax.jit(pretrain.init_params, static_argnums=0)(config)
  tokens_BT = np.full((64, 16), 3)

  def total(params):
    embedded = pretrain.make_model(params, config).embed(tokens_BT)
    return embedded.astype('float32').sum()

  grads = jax.grad(total)(params)
  # In bfloat16 a sum of ones stops at 256.
  found = grads['token_embedding']['embedding'][3]
  np.testing.assert_array_equal(found, 64 * 16)
  found = grads['position_embedding']['embedding'][:16]
  np.testing.assert_array_equal(found, 64)


def _write_tokens(folder: Path) -> Path:
  """Writes token files: each token is the one before it, plus 7 modulo 251."""
  for name, size in (('train.bin', 3000), ('val.bin', 500)):
    tokens = np.arange(size) * 7 % 251
    tokens.astype(np.uint16).tofile(folder / name)
  return folder


def test_batches_are_windows_of_the_token_files(tmp_path):
  config = _config(tmp_path, data=_write_tokens(tmp_path))
  tokens, validation = pretrain.load_tokens(config)
  assert (len(tokens), len(validation)) == (3000, 500)
  with jax.set_mesh(pretrain.make_mesh(config)):
    first, again, other = (
      np.asarray(pretrain.make_batch(tokens, config, i)) for i in (1, 1, 2)
    )
  assert first.shape == (2, 8, 17)
  assert first.dtype == np.int32
  np.testing.assert_array_equal(np.diff(first) % 251, 7)
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()


def _header(*numbers: int) -> bytes:
  """Returns a header as llm.c writes it."""
  return np.array(numbers, np.int32).tobytes().ljust(1024, b'\0')


@pytest.mark.parametrize(
  ('name', 'content'),
  [
    ('train.bin', _header(20240520, 1) + bytes(18000)),
    ('train.bin', b"\x93NUMPY\1\0v\0{'descr': '<u2'" + b' ' * 9001),
    ('train.bin', np.arange(3000, dtype=np.int64).tobytes()),
    ('val.bin', np.arange(128000, dtype=np.uint32).tobytes()),
  ],
  ids=['llm.c', 'NumPy', 'int64', 'uint32'],
)
def test_other_token_files_are_refused(name: str, content: bytes, tmp_path):
  (_write_tokens(tmp_path) / name).write_bytes(content)
  config = _config(tmp_path / 'run', data=tmp_path, vocab_size=65536)
  with pytest.raises(ValueError, match=f'{name} must be uint16 tokens with'):
    pretrain.train(config)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'fsdp': 3}, r'fsdp\*tensor must divide devices 8'),
    ({'fsdp': 8, 'width': 20}, 'fsdp must divide width 20'),
    ({'tensor': 4}, 'tensor must divide num_heads 2'),
    ({'tensor': 2, 'vocab_size': 251}, r'fsdp\*tensor must divide vocab_size'),
    ({'vocab_size': 200}, 'vocab_size must be above 250'),
    ({'accumulation_steps': 3}, r'accumulation_steps\*.* divide batch_size 16'),
    ({'context_length': 500}, 'context_length must be below 500, tokens'),
    (
      {'out_dir': Path('s3://bucket/run')},
      'out_dir must be on a disk or gs://',
    ),
    ({'out_dir': Path('run[1]')}, 'out_dir must have no brackets or backs'),
  ],
)
def test_settings_that_do_not_fit_are_refused(settings, message, tmp_path):
  config = _config(tmp_path, data=_write_tokens(tmp_path), **settings)
  with pytest.raises(ValueError, match=message):
    pretrain.train(config)


def test_a_token_out_of_range_is_found_before_the_run(tmp_path):
  file = _write_tokens(tmp_path) / 'val.bin'
  tokens = np.fromfile(file, np.uint16)
  tokens[300] = 999
  tokens.tofile(file)
  config = _config(tmp_path / 'run', data=tmp_path)
  with pytest.raises(ValueError, match='vocab_size must be above 999, a token'):
    pretrain.train(config)


def test_a_run_resumes_with_its_text_wherever_that_is(tmp_path):
  for name in ('first', 'copy'):
    (tmp_path / name).mkdir()
    _write_tokens(tmp_path / name)
  config = _config(tmp_path / 'run', data=tmp_path / 'first', steps=2)
  assert len(pretrain.train(config)) == 2
  moved = dataclasses.replace(config, data=tmp_path / 'copy')
  assert pretrain.train(moved) == []
  tokens = np.fromfile(tmp_path / 'first' / 'train.bin', np.uint16)
  tokens[::-1].tofile(tmp_path / 'first' / 'train.bin')
  with pytest.raises(ValueError, match="holds a run with {'data': '"):
    pretrain.train(config)


def test_validation_is_spread_and_the_same_for_any_seed(tmp_path):
  config = _config(tmp_path)
  tokens = np.arange(3000)
  with jax.set_mesh(pretrain.make_mesh(config)):
    batches, same = (
      np.asarray(pretrain.make_batch(tokens, _config(tmp_path, seed=x), 0))
      for x in (0, 1)
    )
  np.testing.assert_array_equal(batches, same)
  assert batches.shape == (4 * 2, 8, 17)
  assert (batches.min(), batches.max()) == (0, 2999)
  steps = np.diff(batches[..., 0].ravel())
  assert steps.min() >= steps.max() - 1


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
  nan = mock.Mock(return_value=np.nan)
  with (
    mock.patch.object(pretrain, 'eval_step', nan),
    pytest.raises(FloatingPointError, match='nan after step 1'),
  ):
    pretrain.train(_config(tmp_path, fsdp=8))
  assert not list(tmp_path.iterdir())


def test_it_needs_nothing_else_of_the_repository():
  text = _FILE.read_text()
  imported = re.findall(r'^ *(?:import|from) (\w+)', text, re.MULTILINE)
  assert 'merit_optax' in imported
  assert set(imported) <= _PACKAGES | sys.stdlib_module_names


def _commands() -> list[str]:
  """Returns the commands in the file and in the pages that run it."""
  pages = _ROOT / 'README.md', *_ROOT.glob('docs/*.md'), _FILE
  text = '\n'.join(page.read_text() for page in pages).replace('\\\n', ' ')
  line = re.compile(
    r'^ *(?:srun )?((?:\w+=\w+ )?python examples/pretrain\.py.*)$', re.MULTILINE
  )
  return sorted({shlex.join(shlex.split(x, True)) for x in line.findall(text)})


@pytest.mark.parametrize('command', _commands())
def test_a_command_takes_its_arguments(command):
  _, arguments = command.split('pretrain.py')
  config = tyro.cli(pretrain.Config, args=shlex.split(arguments))
  assert config.width % config.num_heads == 0
  assert config.batch_size % config.accumulation_steps == 0


def test_there_are_commands():
  for kind in ('--distributed', '--fsdp'):
    assert any(kind in command for command in _commands())


@pytest.mark.slow
@pytest.mark.parametrize('command', _commands())
def test_a_command_runs(command, tmp_path):
  sizes = ' '.join(
    f'--{name.replace("_", "-")} {value}' for name, value in _SIZES.items()
  )
  command += f' {sizes} --accumulation-steps 2 --out-dir {tmp_path / "run"}'
  if '--data' in command:
    command += f' --data {_write_tokens(tmp_path)}'
  is_distributed = '--distributed' in command
  outputs = _run(command, num_processes=2 if is_distributed else 1)
  steps, *others = (
    re.findall(r'^step (\d+) loss (.*?) ', x, re.M) for x in outputs
  )
  assert [int(step) for step, _ in steps] == [1, 20]
  assert not any(others)
  if '--data' not in command:
    expected = _losses()[0], _losses()[-1]
    found = [float(loss) for _, loss in steps]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


def _run(command: str, num_processes: int) -> list[str]:
  """Returns what a command prints in each task of a Slurm job."""
  environment = {}
  if num_processes > 1:
    environment = {
      'JAX_NUM_CPU_DEVICES': str(8 // num_processes),
      'SLURM_JOB_ID': str(random.randrange(1 << 20)),
      'SLURM_NTASKS': str(num_processes),
      'SLURM_STEP_NODELIST': 'localhost',
    }
  command = command.replace('python', shlex.quote(sys.executable), 1)
  return run_all(
    [['sh', '-c', command]] * num_processes,
    [
      environment | {'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)}
      for i in range(num_processes)
    ],
  )
