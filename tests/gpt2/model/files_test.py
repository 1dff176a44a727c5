import dataclasses
import errno
import json
import os
from pathlib import Path

import chex
from flax import nnx
import jax
import numpy as np
import pytest
import safetensors.numpy

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import train_tokenizer
from examples.gpt2.devices.sharding import make_mesh, parameter_shardings
from examples.gpt2.model import files
from examples.gpt2.model.config import ModelConfig
from examples.gpt2.model.files import (
  Model,
  load_model,
  save_model,
  write_weights,
)
from examples.gpt2.model.transformer import Transformer

_CONFIG = ModelConfig(
  vocab_size=320, context_length=8, num_layers=2, num_heads=2, width=8,
  mlp_width=16, architecture='llama', qk_norm=True, untied_head=True,
  dtype='bfloat16', remat='dots',
)  # fmt: skip


@pytest.fixture(scope='module')
def params() -> nnx.State:
  return nnx.as_pure(nnx.state(Transformer(_CONFIG, rngs=nnx.Rngs(0))))


@pytest.fixture
def folder(tmp_path: Path, params: nnx.State) -> Path:
  """A model folder to spoil."""
  save_model(tmp_path / 'model', Model(_CONFIG, 300, params))
  return tmp_path / 'model'


def _change_settings(folder: Path, name: str, value: object = None):
  """Changes an entry of model.json, such as 'config.width'; None removes it."""
  path = folder / 'model.json'
  settings = json.loads(path.read_text())
  *outer, last = name.split('.')
  entries = settings[outer[0]] if outer else settings
  entries[last] = value
  if value is None:
    del entries[last]
  path.write_text(json.dumps(settings))


def test_each_device_of_a_mesh_reads_its_part_alone(
  folder: Path, params: nnx.State, monkeypatch
):
  mesh, read = make_mesh('fsdp=4,tensor=2'), []
  put = jax.make_array_from_callback

  def watch(shape, sharding, callback):
    def part(index):
      x = callback(index)
      read.append(x.size * len(sharding.device_set) / np.prod(shape))
      return x

    return put(shape, sharding, part)

  with monkeypatch.context() as patch:
    patch.setattr(jax, 'make_array_from_callback', watch)
    model = load_model(folder, mesh)
  sizes = sum(x.size > 100 for x in jax.tree.leaves(params))
  assert np.isclose(read, 1).sum() == 8 * sizes
  expected = parameter_shardings(mesh, params)
  assert jax.tree.map(lambda x: x.sharding, model.params) == expected
  save_model(folder, model)
  chex.assert_trees_all_equal(load_model(folder).params, params)


def test_a_model_replaces_the_one_before_with_all_it_had(folder, params):
  tokenizer = train_tokenizer(['text'], 260)
  (folder / 'other.txt').write_text('mine')
  save_model(folder, Model(_CONFIG, 300, params, tokenizer))
  other = jax.tree.map(lambda x: x + 1, params)
  save_model(folder, Model(_CONFIG, 290, other))
  model = load_model(folder)
  assert (model.num_tokens, model.tokenizer) == (290, None)
  chex.assert_trees_all_equal(model.params, other)
  assert (folder / 'other.txt').read_text() == 'mine'


def test_a_full_disk_leaves_the_weights_before(folder, params, monkeypatch):
  def fill(path: Path, arrays: object):
    path.write_bytes(b'half')
    raise OSError(errno.ENOSPC, 'No space left on device')

  save_model(folder, Model(_CONFIG, 300, params))
  monkeypatch.setattr(files, 'write_arrays', fill)
  with pytest.raises(OSError, match='No space'):
    write_weights(folder, jax.tree.map(lambda x: x + 1, params))
  chex.assert_trees_all_equal(load_model(folder).params, params)
  assert not list(folder.glob('.*'))


@pytest.mark.parametrize('write', [0, 1, 2])
def test_a_kill_leaves_no_half_written_model(
  folder: Path, params: nnx.State, monkeypatch, write: int
):
  model = Model(_CONFIG, 300, params, train_tokenizer(['text'], 260))
  left, rename = [write], os.replace

  def replace(*paths: Path):
    if not left[0]:
      raise KeyboardInterrupt
    left[0] -= 1
    rename(*paths)

  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', replace)
    with pytest.raises(KeyboardInterrupt):
      save_model(folder, model)
  with pytest.raises(UsageError, match=r'model\.json is missing'):
    load_model(folder)
  save_model(folder, model)
  assert not list(folder.glob('.*'))
  assert load_model(folder).tokenizer is not None


@pytest.mark.parametrize(
  ('architecture', 'epsilon'), [('gpt2', 1e-5), ('llama', 1e-6)]
)
def test_older_models_have_the_epsilon_of_their_architecture(
  tmp_path: Path, architecture: str, epsilon: float
):
  config = dataclasses.replace(
    _CONFIG, architecture=architecture, norm_epsilon=1e-3
  )
  params = nnx.as_pure(nnx.state(Transformer(config, rngs=nnx.Rngs(0))))
  save_model(tmp_path, Model(config, 300, params))
  assert load_model(tmp_path).config == config
  _change_settings(tmp_path, 'config.norm_epsilon')
  _change_settings(tmp_path, 'config.unroll')
  assert load_model(tmp_path).config.norm_epsilon == epsilon


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    ('num_tokens', None, "missing 1 required .* 'num_tokens'"),
    ('num_tokens', 321, 'num_tokens must be .* at most .* 320, got 321'),
    ('num_tokens', '9', "num_tokens must be .* got '9'"),
    ('config', [], 'must be a mapping, not list'),
    ('config.depth', 1, "unexpected keyword argument 'depth'"),
    ('config.width', True, 'width must be .* got True'),
    ('config.qk_norm', 1, 'qk_norm must be true or false'),
    ('config.architecture', 'rnn', "must be out of gpt2, llama, got 'rnn'"),
    ('config.norm_epsilon', '1', "must be a float above 0, got '1'"),
    ('config.num_heads', 3, 'num_heads 3 must divide'),
    ('config.head_width', 3, 'must be even for llama, got 3'),
  ],
)
def test_wrong_settings_are_named(folder, name, value, message):
  _change_settings(folder, name, value)
  with pytest.raises(UsageError, match=rf'model/model\.json.*{message}'):
    load_model(folder)


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    ('head.kernel', None, 'array head.kernel is not there'),
    ('more', np.zeros(3), r'more is F64\[3\], expected not there'),
    ('final_norm.scale', np.zeros(9, 'f'), r'is F32\[9\], expected F32\[8\]'),
    ('final_norm.scale', np.zeros(8, 'e'), r'is F16\[8\], expected F32\[8\]'),
  ],
)
def test_wrong_arrays_are_named(folder, name, value, message):
  path = folder / 'weights.safetensors'
  weights = safetensors.numpy.load_file(path) | {name: value}
  if value is None:
    del weights[name]
  safetensors.numpy.save_file(weights, path)
  with pytest.raises(UsageError, match=rf'model/weights.*{message}'):
    load_model(folder)


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('model.json', b'{', 'cannot be used: Expecting'),
    ('model.json', b'[1]', r'.*expected a JSON object, got \[1\]'),
    ('model.json', None, 'is missing'),
    ('weights.safetensors', b'12345678', 'cannot be used: .*header'),
    ('weights.safetensors', None, 'is missing'),
    ('tokenizer.json', b'{}', 'is no tokenizer'),
    ('', None, 'is no folder'),
  ],
)
def test_damaged_and_missing_files_are_named(folder, name, content, message):
  path = folder / name
  if content is None:
    path.rename(folder.parent / 'elsewhere')
  else:
    path.write_bytes(content)
  with pytest.raises(UsageError, match=f'{path} {message}'):
    load_model(folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, params):
  tokenizer = train_tokenizer(['text'], 257)
  save_model(tmp_path, Model(_CONFIG, 256, params, tokenizer))
  with pytest.raises(UsageError, match='identifiers up to 256: .* below 256'):
    load_model(tmp_path)
