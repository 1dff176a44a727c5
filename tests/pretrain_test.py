"""The one file to copy: the trainer's losses, any mesh, resuming, commands."""

import ast
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import os
from pathlib import Path
import re
import shlex
import socket
import subprocess
import sys

from flax import nnx
import jax
import numpy as np
import pytest
import tyro

from examples import pretrain
from examples.gpt2.config import Config
from examples.gpt2.devices.sharding import batch_sharding, make_mesh
from examples.gpt2.presets import resolve
from examples.gpt2.run.step import Trainer

_ROOT = Path(__file__).parents[1]
_FILE = _ROOT / 'examples' / 'pretrain.py'
_PACKAGES = {'flax', 'jax', 'merit_optax', 'numpy', 'optax', 'orbax', 'tyro'}
_SIZES = dict(
  num_layers=2,
  num_heads=2,
  width=16,
  context_length=16,
  batch_size=16,
  steps=20,
  learning_rate=0.03,
)
_TINY = dict(num_layers=1, num_heads=2, width=16, context_length=8, steps=2)


@pytest.fixture
def config(tmp_path: Path) -> pretrain.Config:
  """Settings of a run that takes seconds."""
  return pretrain.Config(out_dir=tmp_path, accumulation_steps=2, **_SIZES)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
  mesh = make_mesh('', jax.devices()[:1])
  monkeypatch.setattr(pretrain, 'make_mesh', lambda config: mesh)


def _write_tokens(folder: Path, largest: int = 250) -> Path:
  for name, size in (('train.bin', 3000), ('val.bin', 500)):
    tokens = np.arange(size) * 7 % (largest + 1)
    tokens.astype(np.uint16).tofile(folder / name)
  return folder


def _names(params: nnx.State) -> dict[str, jax.Array]:
  """Returns parameters by a name such as 'blocks.up.kernel'."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): x
    for path, x in jax.tree.leaves_with_path(params)
  }


def _trainer_params(params: nnx.State, like: nnx.State) -> nnx.State:
  """Puts parameters into the tree of the trainer."""
  ours = _names(params)

  def find(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    name = name.replace('.attention.', '.').replace('.mlp.', '.')
    return ours.pop(name).reshape(x.shape)

  found = jax.tree.map_with_path(find, like)
  assert not ours
  return found


@pytest.mark.usefixtures('one_device')
def test_losses_are_those_of_the_trainer(config):
  mesh = pretrain.make_mesh(config)
  trainer = Trainer(
    resolve(Config(micro_batch_size=8, unroll=1, **_SIZES)),
    config.vocab_size,
    mesh,
  )
  tokens, _ = pretrain.load_tokens(config)
  expected = []
  with jax.set_mesh(mesh):
    state, params = trainer.init(), pretrain.init_state(config)['params']
    state = state._replace(params=_trainer_params(params, state.params))
    for step in range(1, config.steps + 1):
      tokens_ABT = pretrain.make_batch(tokens, config, step)
      assert tokens_ABT.sharding.is_equivalent_to(batch_sharding(mesh), 3)
      state, metrics = trainer.step(state, tokens_ABT)
      expected.append(metrics['train_loss'])
  losses = pretrain.train(config)
  assert losses[-1] < losses[0] - 0.5
  np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)


def test_a_mesh_gives_the_losses_of_one_device(config, request):
  meshes = {'fsdp': 8}, {'fsdp': 2, 'tensor': 2}
  losses = []
  for i, sizes in enumerate(meshes):
    changes = dict(out_dir=config.out_dir / str(i), **sizes)
    losses.append(pretrain.train(dataclasses.replace(config, **changes)))
  request.getfixturevalue('one_device')
  expected = pretrain.train(config)
  for found in losses:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_arrays_stay_where_they_are_said_to_be(config):
  config = dataclasses.replace(config, fsdp=2, tensor=2)
  tokens, _ = pretrain.load_tokens(config)
  with jax.set_mesh(pretrain.make_mesh(config)) as mesh:
    state = pretrain.init_state(config)
    places = jax.tree.map(lambda x: x.sharding, state)
    state, _ = pretrain.train_step(
      state, pretrain.make_batch(tokens, config, 1), config
    )
  jax.tree.map(
    lambda x, place: np.testing.assert_(
      x.sharding.is_equivalent_to(place, x.ndim)
    ),
    state,
    places,
  )


def test_a_resumed_run_gives_the_same_losses(config, monkeypatch):
  config = dataclasses.replace(config, fsdp=8, steps=8, eval_every=3)
  other = dataclasses.replace(config, out_dir=config.out_dir / 'other')
  expected = pretrain.train(other)
  make_batch = pretrain.make_batch

  def stop_at_seven(tokens, config, step):
    if step == 7:
      raise KeyboardInterrupt
    return make_batch(tokens, config, step)

  with monkeypatch.context() as patch:
    patch.setattr(pretrain, 'make_batch', stop_at_seven)
    with pytest.raises(KeyboardInterrupt):
      pretrain.train(config)
  assert pretrain.train(config) == expected[6:]
  assert pretrain.train(config) == []


def test_bfloat16_and_remat(config):
  changes = dict(dtype='bfloat16', remat=True, steps=4)
  losses = pretrain.train(dataclasses.replace(config, **changes))
  assert abs(losses[0] - np.log(256)) < 0.1
  assert losses[-1] < losses[0]


def test_batches_are_windows_of_the_files(config, tmp_path):
  config = dataclasses.replace(config, data=_write_tokens(tmp_path))
  tokens, validation = pretrain.load_tokens(config)
  assert (len(tokens), len(validation)) == (3000, 500)
  with jax.set_mesh(pretrain.make_mesh(config)):
    first, again, next_ = (
      np.asarray(pretrain.make_batch(tokens, config, i)) for i in (1, 1, 2)
    )
  assert first.shape == (2, 8, 17)
  assert first.dtype == np.int32
  np.testing.assert_array_equal(np.diff(first) % 251, 7)
  np.testing.assert_array_equal(first, again)
  assert (first != next_).any()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'fsdp': 3}, '8 devices'),
    ({'tensor': 16}, '8 devices'),
    ({'vocab_size': 200}, 'vocab_size must be above 250'),
  ],
)
def test_settings_that_do_not_fit_are_refused(
  changes, message, config, tmp_path
):
  data = _write_tokens(tmp_path)
  with pytest.raises(ValueError, match=message):
    pretrain.train(dataclasses.replace(config, data=data, **changes))


def test_it_is_short_and_stands_alone():
  text = _FILE.read_text()
  assert len(text.splitlines()) <= 300
  imported = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      imported |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      imported.add(node.module)
  packages = {name.split('.')[0] for name in imported}
  assert packages <= _PACKAGES | sys.stdlib_module_names


def _commands() -> list[str]:
  """Returns the commands of the pages that run the file."""
  text = pretrain.__doc__ + ''.join(
    path.read_text() for path in (_ROOT / 'README.md', *_ROOT.glob('docs/*.md'))
  )
  text = text.replace('\\\n', ' ')
  found = re.findall(
    r'^ *((?:\w+=\w+ )?python .*pretrain.*)$', text, re.MULTILINE
  )
  return sorted({' '.join(shlex.split(x, comments=True)) for x in found})


def test_documented_commands_take_their_arguments():
  commands = _commands()
  assert len(commands) >= 3
  for command in commands:
    _, args = re.split(r'pretrain(?:\.py)?', command, maxsplit=1)
    config = tyro.cli(pretrain.Config, args=shlex.split(args))
    assert config.width % config.num_heads == 0
    assert config.batch_size % config.accumulation_steps == 0
