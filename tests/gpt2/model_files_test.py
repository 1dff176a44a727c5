import os
from pathlib import Path

import chex
from flax import nnx
import jax
import pytest

from examples.gpt2.command import UsageError
from examples.gpt2.config import ModelConfig, complete
from examples.gpt2.model import Transformer
from examples.gpt2.model_files import (
  Model,
  load_model,
  save_model,
)
from examples.gpt2.tokenizer import train_tokenizer

_CONFIG = complete(ModelConfig(
  vocab_size=320, context_length=8, num_layers=2, num_heads=2, width=8,
  mlp_width=16, architecture='llama', qk_norm=True, untied_head=True,
  dtype='bfloat16', remat='dots',
))  # fmt: skip


@pytest.fixture(scope='module')
def params() -> nnx.State:
  return nnx.as_pure(nnx.state(Transformer(_CONFIG, rngs=nnx.Rngs(0))))


@pytest.fixture
def folder(tmp_path: Path, params: nnx.State) -> Path:
  """A model folder to spoil."""
  save_model(tmp_path / 'model', Model(_CONFIG, 300, params))
  return tmp_path / 'model'


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
  ('name', 'content', 'message'),
  [
    ('model.json', b'{', 'cannot be used: Expecting'),
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
