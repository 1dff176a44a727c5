"""The file to copy: the trainer's losses, any mesh, resuming, its commands."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
from pathlib import Path
import random
import re
import shlex
import signal
import sys
import tempfile
import threading
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import tyro

from examples import pretrain
from examples.gpt2 import convert, evaluate, generate, plot, prepare
from examples.gpt2.config import Config, change
from examples.gpt2.resolve import resolve
from examples.gpt2.sharding import make_mesh
from examples.gpt2.step import Trainer
from tests.processes import run_all

_ROOT = Path(__file__).parents[1]
_FILE = _ROOT / 'examples' / 'pretrain.py'
_PACKAGES = {
  'etils', 'flax', 'fsspec', 'jax', 'merit_optax', 'numpy', 'optax', 'orbax',
  'safetensors', 'tyro', 'wandb',
}  # fmt: skip
_SIZES = dict(
  num_layers=2, num_heads=2, width=16, init_std=0.1, context_length=16,
  batch_size=16, steps=20, learning_rate=0.03,
)  # fmt: skip
_MESH = dict(mesh='fsdp=2,tensor=2', micro_batch_size=2)


def _config(folder: str | Path, **settings) -> pretrain.Config:
  return pretrain.Config(**dict(out_dir=Path(folder), **_SIZES) | settings)


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


_MODELS = {
  'GPT-2': {},
  'QK-norm': {'qk_norm': True},
  'Llama': {'architecture': 'llama'},
}


@pytest.mark.parametrize('model', _MODELS)
def test_losses_are_those_of_the_trainer(model, tmp_path):
  settings = _MODELS[model]
  config = _config(tmp_path, **settings)
  mesh = _one_device(config)
  trainer = Trainer(
    resolve(
      change(Config(), unroll=1, norm_epsilon=1e-5, **_SIZES, **settings)
    ),
    config.vocab_size,
    mesh,
  )
  tokens, _ = pretrain.load_tokens(config)
  expected = []
  with jax.set_mesh(mesh):
    state, params = trainer.init(), pretrain.init_state(config)['params']
    theirs, ours = map(pretrain.by_path, (state.params, params))
    assert {k: x.shape for k, x in theirs.items()} == {
      k: x.shape for k, x in ours.items()
    }
    params = [ours[name] for name in theirs]
    structure = jax.tree.structure(state.params)
    state = state._replace(params=jax.tree.unflatten(structure, params))
    for step in range(1, config.steps + 1):
      tokens_ABT = pretrain.make_batch(tokens, config, step)
      state, metrics = trainer.step(state, tokens_ABT)
      expected.append(metrics['train_loss'])
  assert expected[-1] < expected[0] - 0.5
  # Of other models on a mesh.
  found = _losses(**_MESH, **settings) if settings else _losses()
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_mesh_gives_the_losses_of_one_device():
  found = _losses(**_MESH)
  np.testing.assert_allclose(found, _losses(), rtol=0, atol=1e-5)


def test_a_step_leaves_the_state_where_it_is(tmp_path):
  config = _config(tmp_path, **_MESH)
  tokens, _ = pretrain.load_tokens(config)
  with jax.set_mesh(pretrain.make_mesh(config)):
    state = pretrain.init_state(config)
    places = {name: x.sharding for name, x in pretrain.by_path(state).items()}
    tokens_ABT = pretrain.make_batch(tokens, config, 1)
    state, _ = pretrain.train_step(state, tokens_ABT, config)
  for name, x in pretrain.by_path(state).items():
    assert x.sharding.is_equivalent_to(places[name], x.ndim), name
    # A fourth of each matrix and its moments is on a device, where data is 2.
    is_split = any(name.endswith(matrix) for matrix in pretrain.MATRICES)
    assert x.addressable_shards[0].data.size * (4 if is_split else 1) == x.size


@contextlib.contextmanager
def _before(last: int, action):
  """Calls a function before a step."""
  make_batch = pretrain.make_batch

  def act(tokens, config, step):
    if step == last:
      action()
    return make_batch(tokens, config, step)

  with mock.patch.object(pretrain, 'make_batch', act):
    yield


def _lines(folder: Path) -> list[dict[str, float]]:
  text = (folder / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_a_run_resumes_with_the_same_losses_and_settings(tmp_path):
  config = _config(tmp_path, **_MESH, eval_every=4, checkpoint_every=8)

  def stop():
    raise KeyboardInterrupt

  with _before(11, stop), pytest.raises(KeyboardInterrupt):
    pretrain.train(config)
  assert [x['step'] for x in _lines(tmp_path)] == [*range(1, 11)]
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 11, "train')  # As of a kill while it is written.
  losses = _losses(**_MESH)
  assert pretrain.train(config) == losses[8:]
  lines = _lines(tmp_path)
  assert [x['train_loss'] for x in lines] == losses
  assert [x['tokens'] for x in lines] == [256 * x for x in range(1, 21)]
  evaluated = [x['step'] for x in lines if 'val_loss' in x]
  assert evaluated == [4, 8, 12, 16, 20]
  for name, value in dict(learning_rate=0.01, seed=1, steps=30).items():
    with pytest.raises(ValueError, match=f"holds a run with .*'{name}': '"):
      pretrain.train(_config(tmp_path, **{name: value}))
  assert pretrain.train(_config(tmp_path, micro_batch_size=None)) == []


def test_a_run_at_wandb_goes_on_there(tmp_path, monkeypatch):
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  config = _config(tmp_path, steps=2, wandb='project', **_MESH)
  names = []
  for _ in range(2):
    pretrain.train(config)
    names.append((tmp_path / 'wandb_id.txt').read_text())
  assert names[0] == names[1]
  assert list(tmp_path.glob(f'wandb/*/run-{names[0]}.wandb'))


def test_sigterm_saves_and_ends_the_run(tmp_path, monkeypatch):
  flags = [f'--{k.replace("_", "-")}={x}' for k, x in (_SIZES | _MESH).items()]
  command = ['pretrain.py', *flags, f'--out-dir={tmp_path}']
  monkeypatch.setattr(sys, 'argv', command)
  monkeypatch.setattr(pretrain, 'STOP', threading.Event())
  terminate = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
  handler = signal.getsignal(signal.SIGTERM)
  try:
    with _before(6, terminate), pytest.raises(SystemExit) as told:
      pretrain.main()
  finally:
    signal.signal(signal.SIGTERM, handler)
  assert told.value.code == 143
  assert [x['step'] for x in _lines(tmp_path)] == [*range(1, 7)]
  assert not (tmp_path / 'weights.safetensors').exists()
  pretrain.STOP.clear()
  assert pretrain.train(_config(tmp_path, **_MESH)) == _losses(**_MESH)[6:]


@pytest.mark.parametrize('name', pretrain.OPTIMIZERS)
def test_an_optimizer_trains_at_its_usual_rate(name, tmp_path):
  settings = dict(optimizer=name, learning_rate=None, init_std=None)
  losses = pretrain.train(_config(tmp_path, mesh='fsdp=8', **settings))
  assert losses[-1] < losses[0] - 0.2


def test_a_factored_state_is_copied_to_every_device(tmp_path):
  make = functools.partial(optax.adafactor, min_dim_size_to_factor=8)
  table = {'adafactor': (lambda rate, config: make(rate), lambda config: 0.03)}
  config = _config(tmp_path, **_MESH, optimizer='adafactor')
  with mock.patch.dict(pretrain.OPTIMIZERS, table):
    with jax.set_mesh(pretrain.make_mesh(config)):
      state = pretrain.by_path(pretrain.init_state(config)['opt_state'])
    losses = pretrain.train(config)
  assert losses[-1] < losses[0] - 0.5
  rows = {k: x for k, x in state.items() if '.v_row.' in k and x.size > 2}
  assert len(rows) > 4
  assert all(x.sharding.is_fully_replicated for x in rows.values())


@pytest.mark.parametrize('at_once', [1, 3000, 1 << 27])
def test_the_loss_in_chunks_is_the_cross_entropy(at_once, monkeypatch):
  monkeypatch.setattr(pretrain, 'LOGITS_AT_ONCE', at_once)
  keys = jax.random.split(jax.random.key(0), 3)
  features = jax.random.normal(keys[0], (16, 12, 8))
  head = jax.random.normal(keys[1], (192, 8))
  labels = jax.random.randint(keys[2], (16, 12), 0, 192)

  def plain(features, head):
    logits = features @ head.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return 3 * losses.mean()

  def ours(features, head):
    return 3 * pretrain.cross_entropy(features, head, labels)

  expected = jax.value_and_grad(plain, (0, 1))(features, head)
  with jax.set_mesh(pretrain.make_mesh(_config('', mesh='fsdp=2,tensor=2'))):
    found = jax.jit(jax.value_and_grad(ours, (0, 1)))(features, head)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
    found,
    expected,
  )


@pytest.mark.parametrize('is_gradient', [False, True])
def test_not_all_logits_exist_at_once(is_gradient, monkeypatch):
  monkeypatch.setattr(pretrain, 'LOGITS_AT_ONCE', 1 << 14)
  loss = pretrain.cross_entropy
  function = jax.grad(loss, (0, 1)) if is_gradient else loss
  shapes = (16, 64, 8), (256, 8), (16, 64)
  arrays = [
    jax.ShapeDtypeStruct(x, dtype)
    for x, dtype in zip(shapes, ('f4', 'f4', 'i4'), strict=True)
  ]
  with jax.set_mesh(_one_device(_config(''))):
    compiled = jax.jit(function).lower(*arrays).compile()
  logits = 16 * 64 * 256 * 4
  assert compiled.memory_analysis().temp_size_in_bytes < logits / 2


def test_bfloat16_and_remat():
  losses = _losses(mesh='fsdp=8', dtype='bfloat16', remat='full')
  np.testing.assert_allclose(losses, _losses(), rtol=0, atol=0.05)
  assert np.abs(np.subtract(losses, _losses())).max() > 1e-4


def test_layers_that_are_compiled_one_by_one():
  losses = _losses(mesh='fsdp=8', remat='dots', unroll=2)
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
  config = _config(tmp_path, data=str(_write_tokens(tmp_path)))
  tokens, validation = pretrain.load_tokens(config)
  assert (tokens.sizes.tolist(), validation.sizes.tolist()) == ([3000], [500])
  with jax.set_mesh(pretrain.make_mesh(config)):
    first, again, other = (
      np.asarray(pretrain.make_batch(tokens, config, i)) for i in (1, 1, 2)
    )
  assert first.shape == (1, 16, 17)
  assert first.dtype == np.int32
  np.testing.assert_array_equal(np.diff(first) % 251, 7)
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'mesh': 'fsdp=3'}, r'fsdp\*tensor must divide devices 8'),
    ({'mesh': 'fsdp=8', 'width': 20}, 'fsdp must divide width 20'),
    ({'mesh': 'tensor=4'}, 'tensor must divide num_heads 2'),
    ({'mesh': 'fsdp=0'}, "mesh must be as fsdp=4,tensor=2, got 'fsdp=0'"),
    ({'mesh': 'fdsp=2'}, "mesh must be as fsdp=4,tensor=2, got 'fdsp=2'"),
    ({'vocab_size': 200}, 'vocab_size must be above 250'),
    ({'batch_size': 12}, r'data\*fsdp must divide batch_size 12'),
    (
      {'batch_size': 24, 'micro_batch_size': 2},
      'batch_size must be a multiple of 16, a micro-batch',
    ),
    ({'context_length': 500}, 'context_length must be below 500, as val has'),
    (
      {'out_dir': Path('s3://bucket/run')},
      'out_dir must be on a disk or gs://',
    ),
  ],
)
def test_settings_that_do_not_fit_are_refused(settings, message, tmp_path):
  config = _config(tmp_path, data=str(_write_tokens(tmp_path)), **settings)
  with pytest.raises(ValueError, match=message):
    pretrain.train(config)


def test_a_token_out_of_range_is_found_before_the_run(tmp_path):
  file = _write_tokens(tmp_path) / 'val.bin'
  tokens = np.fromfile(file, np.uint16)
  tokens[300] = 999
  tokens.tofile(file)
  config = _config(tmp_path / 'run', data=str(tmp_path))
  with pytest.raises(ValueError, match='vocab_size must be above 999, a token'):
    pretrain.train(config)


def test_a_run_resumes_with_its_text_wherever_that_is(tmp_path):
  for name in ('first', 'copy'):
    (tmp_path / name).mkdir()
    _write_tokens(tmp_path / name)
  config = _config(tmp_path / 'run', data=str(tmp_path / 'first'), steps=2)
  assert len(pretrain.train(config)) == 2
  moved = dataclasses.replace(config, data=str(tmp_path / 'copy'))
  assert pretrain.train(moved) == []
  tokens = np.fromfile(tmp_path / 'first' / 'train.bin', np.uint16)
  tokens[::-1].tofile(tmp_path / 'first' / 'train.bin')
  with pytest.raises(ValueError, match="holds a run with {'data': '"):
    pretrain.train(config)


def test_validation_is_spread_and_the_same_for_any_seed(tmp_path):
  config = _config(tmp_path)
  np.arange(3000, dtype=np.uint16).tofile(tmp_path / 'tokens.bin')
  tokens = pretrain.Tokens([f'{tmp_path}/tokens.bin'], 'uint16', 3000)
  settings = dict(micro_batch_size=1, eval_sequences=71)
  with jax.set_mesh(pretrain.make_mesh(config)):
    batches, same = (
      np.asarray(
        pretrain.make_batch(tokens, _config(tmp_path, seed=x, **settings), 0)
      )
      for x in (0, 1)
    )
  np.testing.assert_array_equal(batches, same)
  assert batches.shape == (8, 8, 17)
  assert (batches.min(), batches.max()) == (0, 2999)
  steps = np.diff(batches[..., 0].ravel())
  assert steps.min() >= steps.max() - 1


def test_numbers_that_are_not_finite_stop_the_run(tmp_path):
  config = _config(tmp_path, learning_rate=1e20, eval_every=1, mesh='fsdp=8')
  with pytest.raises(FloatingPointError, match='Step 2 had'):
    pretrain.train(config)
  assert [x['step'] for x in _lines(tmp_path)] == [1]


def test_no_weights_that_are_not_finite_are_saved():
  state = {'params': {'w': np.array([0.0, np.nan], np.float32)}}
  with pytest.raises(FloatingPointError, match='after step 4'):
    pretrain.save(None, 4, state, {})


def test_what_is_given_stays(tmp_path):
  config = _config(tmp_path, micro_batch_size=None, init_std=None)
  assert pretrain.with_defaults(config) == dataclasses.replace(
    config, init_std=0.02 * 48**0.5
  )


def test_a_window_lies_in_one_shard(tmp_path):
  """As examples.gpt2.prepare writes them, of any dtype."""
  tokens = np.arange(90_000, 90_100)
  sizes, shards = (50, 3, 47), {}
  for i, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
    part.astype(np.uint32).tofile(tmp_path / f'train-{i}.bin')
    shards[f'train-{i}.bin'] = len(part)
  shards = {'train': shards, 'val': shards}
  index = {'vocab_size': 100_000, 'dtype': 'uint32', 'shards': shards}
  (tmp_path / 'index.json').write_text(json.dumps(index))
  config = _config(tmp_path, data=str(tmp_path), context_length=4)
  config = pretrain.with_defaults(config)
  assert config.vocab_size == 100_000
  train, _ = pretrain.load_tokens(config)
  windows = train.windows(np.arange(train.count(5)), 5)
  expected = [x for x in range(96) if x < 46 or x >= 53]
  np.testing.assert_array_equal(windows[:, 0] - 90_000, expected)
  np.testing.assert_array_equal(np.diff(windows), 1)


def test_a_process_reads_the_rows_of_its_devices(tmp_path):
  config = _config(tmp_path, mesh='fsdp=4,tensor=2')
  tokens, _ = pretrain.load_tokens(config)
  rows = []

  def windows(numbers, length):
    rows.append(len(numbers))
    return np.zeros((len(numbers), length), np.int32)

  with (
    jax.set_mesh(pretrain.make_mesh(config)),
    mock.patch.object(tokens, 'windows', windows),
  ):
    pretrain.make_batch(tokens, config, 1)
  assert set(rows) == {4}


def test_commands_of_the_trainer_read_a_run(tmp_path, capsys):
  text = tmp_path / 'text.jsonl'
  parts = re.split(r'\n{3}', Path(pretrain.__file__).read_text())
  text.write_text(''.join(json.dumps({'text': x}) + '\n' for x in parts))
  data, run = tmp_path / 'tokens', tmp_path / 'run'
  prepare.main(
    ['--data', str(text), '--out-dir', str(data), '--vocab-size=300']
    + ['--validation-share=0.2', '--shard-tokens=3000']
  )
  pretrain.train(_config(run, data=str(data), **_MESH, checkpoint_every=8))
  assert len(list(data.glob('train-*.bin'))) > 1
  capsys.readouterr()
  generate.main([str(run), '--prompt=import', '--tokens=5'])
  assert 'import' in capsys.readouterr().out
  evaluate.main([str(run), '--data', str(data)])
  measured = float(re.search(r'loss +(\S+) nats', capsys.readouterr().out)[1])
  assert abs(measured - _lines(run)[-1]['val_loss']) < 0.3
  # Of a run that goes on, the last checkpoint.
  (run / 'weights.safetensors').unlink()
  evaluate.main([str(run), '--data', str(data)])
  assert f'{measured:.4f} nats' in capsys.readouterr().out
  generate.main([str(run), '--prompt=import', '--tokens=5', '--step=16'])
  plot.main([str(run), f'--out={tmp_path}/curves.png'])
  if importlib.util.find_spec('transformers'):
    convert.main(['export', str(run), str(tmp_path / 'exported')])
    assert (tmp_path / 'exported' / 'config.json').exists()


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


def test_there_are_commands():
  for kind in ('--distributed on', '--mesh fsdp', '--optimizer'):
    assert any(kind in command for command in _commands())


@pytest.mark.slow
@pytest.mark.parametrize('command', _commands())
def test_a_command_runs(command, tmp_path):
  sizes = ' '.join(
    f'--{name.replace("_", "-")} {value}' for name, value in _SIZES.items()
  )
  command += f' {sizes} --optimizer merit --out-dir {tmp_path / "run"}'
  if '--data' in command:
    command += f' --data {_write_tokens(tmp_path)}'
  is_distributed = '--distributed' in command
  outputs = _run(command, num_processes=2 if is_distributed else 1)
  steps, *others = (re.findall(r'^step (\d+) loss', x, re.M) for x in outputs)
  assert steps == ['1', '10', '20']
  assert not any(others)
  if '--data' not in command:
    found = [line['train_loss'] for line in _lines(tmp_path / 'run')]
    np.testing.assert_allclose(found, _losses(), rtol=0, atol=1e-3)


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
