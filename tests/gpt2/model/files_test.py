from collections.abc import Callable
import dataclasses
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
from examples.gpt2.model.files import (
  arrays_by_path,
  as_module,
  load_model,
  save_model,
)
from examples.gpt2.model.layers import ModelConfig
from examples.gpt2.model.transformer import Transformer

_CONFIG = ModelConfig(
  vocab_size=320,
  context_length=8,
  num_layers=2,
  num_heads=2,
  width=8,
  mlp_width=16,
  architecture='llama',
  qk_norm=True,
  untied_head=True,
  dtype='bfloat16',
  remat='dots',
)


@pytest.fixture(scope='module')
def params() -> nnx.State:
  return nnx.as_pure(nnx.state(Transformer(_CONFIG, rngs=nnx.Rngs(0))))


@pytest.fixture
def folder(tmp_path: Path, params: nnx.State) -> Path:
  """A model folder to spoil."""
  save_model(tmp_path / 'model', _CONFIG, 300, params)
  return tmp_path / 'model'


def _change_settings(
  folder: Path, change: Callable[[dict], object], name: str = 'model.json'
):
  settings = json.loads((folder / name).read_text())
  change(settings)
  (folder / name).write_text(json.dumps(settings))


def _change_weights(folder: Path, change: Callable[[dict], object]):
  weights = safetensors.numpy.load_file(folder / 'weights.safetensors')
  change(weights)
  safetensors.numpy.save_file(weights, folder / 'weights.safetensors')


def test_a_model_comes_back_as_it_was_saved(tmp_path: Path, params: nnx.State):
  tokenizer = train_tokenizer(['some text, some more text'], 270)
  save_model(tmp_path / 'a' / 'b', _CONFIG, 300, params, tokenizer)
  model = load_model(tmp_path / 'a' / 'b')
  assert (model.config, model.num_tokens) == (_CONFIG, 300)
  chex.assert_trees_all_equal(model.params, params)
  assert model.tokenizer.to_str() == tokenizer.to_str()
  tokens = np.arange(8)[None]
  np.testing.assert_array_equal(
    as_module(_CONFIG, model.params)(tokens), as_module(_CONFIG, params)(tokens)
  )


def test_params_may_be_given_by_path_and_in_any_memory_order(
  tmp_path: Path, params: nnx.State
):
  arrays = arrays_by_path(params)
  turned = {k: np.asfortranarray(x) for k, x in arrays.items()}
  assert not turned['head.kernel'].flags.c_contiguous
  save_model(tmp_path, _CONFIG, 300, turned)
  assert {p.name for p in tmp_path.iterdir()} == {
    'model.json',
    'weights.safetensors',
  }
  stored = safetensors.numpy.load_file(tmp_path / 'weights.safetensors')
  chex.assert_trees_all_equal(stored, arrays)
  assert stored['blocks.mlp.up.kernel'].shape == (2, 8, 16)


def test_params_may_lie_on_many_devices(tmp_path: Path, params: nnx.State):
  mesh = jax.make_mesh((8,), ('x',))
  spec = jax.sharding.NamedSharding(mesh, jax.P(None, 'x'))
  sharded = jax.tree.map(
    lambda x: jax.device_put(x, spec) if x.ndim > 2 else x, params
  )
  save_model(tmp_path, _CONFIG, 300, sharded)
  chex.assert_trees_all_equal(load_model(tmp_path).params, params)


def test_a_model_replaces_the_one_before_with_all_it_had(
  folder: Path, params: nnx.State
):
  tokenizer = train_tokenizer(['text'], 260)
  (folder / 'other.txt').write_text('mine')
  save_model(folder, _CONFIG, 300, params, tokenizer)
  other = jax.tree.map(lambda x: x + 1, params)
  save_model(folder, _CONFIG, 290, other)
  model = load_model(folder)
  assert (model.num_tokens, model.tokenizer) == (290, None)
  chex.assert_trees_all_equal(model.params, other)
  assert (folder / 'other.txt').read_text() == 'mine'


@pytest.mark.parametrize('write', [0, 1, 2])
def test_a_kill_leaves_no_half_written_model(
  folder: Path,
  params: nnx.State,
  monkeypatch: pytest.MonkeyPatch,
  write: int,
):
  tokenizer = train_tokenizer(['text'], 260)
  left, rename = [write], os.replace

  def replace(*paths: Path):
    if not left[0]:
      raise KeyboardInterrupt
    left[0] -= 1
    rename(*paths)

  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', replace)
    with pytest.raises(KeyboardInterrupt):
      save_model(folder, _CONFIG, 300, params, tokenizer)
  with pytest.raises(UsageError, match=r'model\.json is missing'):
    load_model(folder)
  save_model(folder, _CONFIG, 300, params, tokenizer)
  assert not list(folder.glob('.*'))
  assert load_model(folder).tokenizer is not None


def test_a_new_setting_with_a_default_may_be_missing(folder: Path):
  _change_settings(folder, lambda x: x['config'].pop('unroll'))
  assert load_model(folder).config == _CONFIG


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda x: x.pop('num_tokens'), 'no entry num_tokens'),
    (lambda x: x.update(num_tokens=321), 'num_tokens 321 must be at most'),
    (lambda x: x.update(num_tokens='9'), "num_tokens must be .* got '9'"),
    (lambda x: x.update(kind=1), 'unknown entry kind'),
    (lambda x: x.update(config=[]), r'config must be .* got \[\]'),
    (lambda x: x['config'].pop('width'), 'no entry width'),
    (lambda x: x['config'].update(depth=1), 'unknown entry depth'),
    (lambda x: x['config'].update(width=True), 'width must be .* got True'),
    (lambda x: x['config'].update(width=0), 'width must be .* got 0'),
    (lambda x: x['config'].update(qk_norm=1), 'qk_norm must be true or false'),
    (
      lambda x: x['config'].update(architecture='rnn'),
      "architecture must be out of gpt2, llama, got 'rnn'",
    ),
    (lambda x: x['config'].update(num_heads=3), 'num_heads 3 must divide'),
    (lambda x: x['config'].update(num_heads=8), 'must be even, got 1'),
  ],
)
def test_wrong_settings_are_named(
  folder: Path, change: Callable[[dict], object], message: str
):
  _change_settings(folder, change)
  with pytest.raises(UsageError, match=message) as caught:
    load_model(folder)
  assert str(folder / 'model.json') in str(caught.value)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda x: x.pop('head.kernel'), 'array head.kernel is not there'),
    (
      lambda x: x.update(more=np.zeros(3)),
      r'array more is float64\[3\], expected not there',
    ),
    (
      lambda x: x.update({'final_norm.scale': np.zeros((9,), np.float32)}),
      r'final_norm.scale is float32\[9\], expected float32\[8\]',
    ),
    (
      lambda x: x.update({'final_norm.scale': np.zeros((8,), np.float16)}),
      r'final_norm.scale is float16\[8\], expected float32\[8\]',
    ),
  ],
)
def test_wrong_arrays_are_named(
  folder: Path, change: Callable[[dict], object], message: str
):
  _change_weights(folder, change)
  with pytest.raises(UsageError, match=message) as caught:
    load_model(folder)
  assert str(folder / 'weights.safetensors') in str(caught.value)


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('model.json', b'{', 'no JSON'),
    ('model.json', b'\xff\xfe', 'no JSON'),
    ('model.json', b'[1]', 'must hold a JSON object'),
    ('weights.safetensors', b'12345678', 'no whole safetensors file'),
    ('tokenizer.json', b'{}', 'no file of the tokenizers library'),
  ],
)
def test_damaged_files_are_named(
  folder: Path, name: str, content: bytes, message: str
):
  (folder / name).write_bytes(content)
  with pytest.raises(UsageError, match=message) as caught:
    load_model(folder)
  assert str(folder / name) in str(caught.value)


def test_a_cut_file_of_weights_is_refused(folder: Path):
  path = folder / 'weights.safetensors'
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(UsageError, match='no whole safetensors file'):
    load_model(folder)


@pytest.mark.parametrize('name', ['model.json', 'weights.safetensors'])
def test_missing_files_are_named(folder: Path, name: str):
  (folder / name).unlink()
  with pytest.raises(UsageError, match=f'{name} is missing'):
    load_model(folder)


def test_a_missing_folder_is_named(tmp_path: Path):
  with pytest.raises(UsageError, match='nowhere is no folder'):
    load_model(tmp_path / 'nowhere')


def test_a_tokenizer_of_another_model_is_refused(
  tmp_path: Path, params: nnx.State
):
  tokenizer = train_tokenizer(['text'], 257)
  save_model(tmp_path, _CONFIG, 256, params, tokenizer)
  with pytest.raises(UsageError, match='identifiers up to 256, .* has 256'):
    load_model(tmp_path)


def test_settings_of_a_model_are_plain_json(folder: Path):
  settings = json.loads((folder / 'model.json').read_text())
  assert settings == {
    'num_tokens': 300,
    'config': dataclasses.asdict(_CONFIG),
  }
