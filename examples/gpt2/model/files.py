"""Model folders: what a model is, its weights and its tokenizer, as files."""

from collections.abc import Mapping
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from flax import nnx
import jax
import numpy as np
import safetensors.numpy
import tokenizers

from examples.gpt2.config import UsageError
from examples.gpt2.devices.sharding import path_name
from examples.gpt2.model.layers import ModelConfig
from examples.gpt2.model.model_files import (
  check_arrays,
  read_arrays,
  read_config,
  read_tokenizer,
)
from examples.gpt2.model.transformer import Transformer
from examples.gpt2.run.folder import whole_file

TOKENIZER = 'tokenizer.json'
_MODEL = 'model.json'
_WEIGHTS = 'weights.safetensors'


@dataclasses.dataclass(frozen=True)
class Model:
  """A model as it was read.

  Attributes:
    config: What the model is.
    num_tokens: Number of token identifiers, of which ``config.vocab_size`` may
      be a larger, rounded-up number.
    params: Tree of float32 NumPy arrays.
    tokenizer: Tokenizer, where there is one.
  """

  config: ModelConfig
  num_tokens: int
  params: Any
  tokenizer: tokenizers.Tokenizer | None


def save_model(
  folder: Path,
  config: ModelConfig,
  num_tokens: int,
  params: Any,
  tokenizer: tokenizers.Tokenizer | None = None,
) -> None:
  """Writes a model into a folder, in place of one that is there.

  Each file is whole or not there, even after a kill; ``model.json`` is written
  last, so that with it the model is complete. Other files are left alone.

  Args:
    folder: Folder; made if need be.
    config: What the model is.
    num_tokens: Number of token identifiers, ``config.vocab_size`` at the most.
    params: Tree of arrays that this process can read whole, or arrays by path,
      such as ``'blocks.mlp.up.kernel'``.
    tokenizer: Tokenizer, where there is one.

  Raises:
    OSError: If a file cannot be written.
  """
  folder.mkdir(parents=True, exist_ok=True)
  for name in (_MODEL, TOKENIZER):
    (folder / name).unlink(missing_ok=True)
  with whole_file(folder / _WEIGHTS) as path:
    safetensors.numpy.save_file(arrays_by_path(params), path)
  if tokenizer is not None:
    with whole_file(folder / TOKENIZER) as path:
      tokenizer.save(str(path))
  settings = {'num_tokens': num_tokens, 'config': dataclasses.asdict(config)}
  with whole_file(folder / _MODEL) as path:
    path.write_text(json.dumps(settings, indent=2))


def load_model(folder: Path) -> Model:
  """Reads a model folder.

  Args:
    folder: Folder that :func:`save_model` wrote.

  Returns:
    The model, checked.

  Raises:
    UsageError: If a file or an array is missing, damaged, unknown or of another
      shape or type than the model's; it is named.
    OSError: If a file cannot be read.
  """
  folder = folder.expanduser()
  if not folder.is_dir():
    raise UsageError(f'{folder} is no folder: expected one with {_MODEL}.')
  config, num_tokens = read_config(folder / _MODEL)
  arrays = read_arrays(folder / _WEIGHTS)
  check_arrays(folder / _WEIGHTS, arrays, by_path(shapes(config)))
  tokenizer = None
  if (folder / TOKENIZER).is_file():
    tokenizer = read_tokenizer(folder / TOKENIZER, num_tokens)
  return Model(config, num_tokens, as_tree(config, arrays), tokenizer)


def as_module(config: ModelConfig, params: Any) -> Transformer:
  """Returns the model with some parameters; to be traced."""
  return nnx.merge(_split(config)[0], params)


def shapes(config: ModelConfig) -> Any:
  """Returns the tree of the shapes of a model's parameters."""
  return nnx.as_pure(_split(config)[1])


@functools.cache
def _split(config: ModelConfig) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
  model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return nnx.split(model)


def as_tree(config: ModelConfig, arrays: Mapping[str, Any]) -> Any:
  """Returns the tree of a model's parameters, given by path."""
  return jax.tree.map_with_path(
    lambda path, _: arrays[path_name(path)], shapes(config)
  )


def by_path(params: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by path, such as 'blocks.mlp.up.kernel'."""
  return {path_name(p): x for p, x in jax.tree.leaves_with_path(params)}


def arrays_by_path(params: Any) -> dict[str, np.ndarray]:
  """Returns the leaves of a tree by path, as contiguous NumPy arrays."""
  # safetensors writes the memory as it lies, whatever the strides say.
  return {k: np.ascontiguousarray(x) for k, x in by_path(params).items()}
