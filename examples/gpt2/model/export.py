"""Writes models for GPT2LMHeadModel and LlamaForCausalLM of Hugging Face."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import jax.numpy as jnp
import tqdm

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import GENERATION, SETTINGS
from examples.gpt2.model import files, hugging_face

WEIGHTS = 'model.safetensors'
MAX_SHARD_SIZE = '5GB'


def write_hugging_face(
  folder: Path,
  model: files.Model,
  dtype: str = 'float32',
  max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
  """Writes a model for Hugging Face.

  Args:
    folder: Folder on a disk.
    model: Model, with arrays that this process can read whole.
    dtype: Data type of the weights.
    max_shard_size: Largest size of a file of weights, such as '5GB'.

  Raises:
    UsageError: If Hugging Face has no such model, or if there is no such size.
    OSError: If a file cannot be written.
  """
  if model.config.qk_norm:
    raise UsageError(
      'Neither GPT2LMHeadModel nor LlamaForCausalLM has qk_norm: only a model '
      'without it can be exported.'
    )
  arrays = hugging_face.to_arrays(model.config, model.num_tokens, model.params)
  _write_weights(folder, arrays, dtype, max_shard_size)
  _write_json(folder / 'config.json', hugging_face.to_settings(model, dtype))
  for name, content in model.companions.items():
    (folder / name).write_bytes(content)
  generation = hugging_face.generation_settings(model)
  if generation:
    _write_json(folder / GENERATION, generation)
  if model.tokenizer is not None:
    model.tokenizer.save(str(folder / files.TOKENIZER))
    _write_json(folder / SETTINGS, hugging_face.tokenizer_settings(model))


def _write_weights(
  folder: Path, arrays: dict[str, Any], dtype: str, max_shard_size: str
) -> None:
  """Writes model.safetensors, or its parts and their index."""
  size = jnp.dtype(dtype).itemsize
  try:
    split = huggingface_hub.split_state_dict_into_shards_factory(
      arrays,
      get_storage_size=lambda x: x.size * size,
      filename_pattern='model{suffix}.safetensors',
      max_shard_size=max_shard_size,
    )
  except ValueError as error:
    raise UsageError(f'--max-shard-size {max_shard_size}: {error}') from error
  parts = split.filename_to_tensors.items()
  for part, names in tqdm.tqdm(parts, 'writing', delay=2):
    shard = {name: arrays[name].astype(dtype, copy=False) for name in names}
    # Some versions of transformers insist on the entry.
    files.write_arrays(folder / part, shard, {'format': 'pt'})
  if split.is_sharded:
    index = {
      'metadata': split.metadata,
      'weight_map': split.tensor_to_filename,
    }
    _write_json(folder / f'{WEIGHTS}.index.json', index)


def _write_json(path: Path, values: dict[str, Any]) -> None:
  path.write_text(json.dumps(values, indent=2) + '\n')
