"""Models from and for Hugging Face: python -m examples.gpt2.convert -h."""

import dataclasses
import json
from pathlib import Path
import sys
from typing import Any, Literal

import huggingface_hub
import jax.numpy as jnp
import tokenizers
import tqdm
import tyro

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import (
  GENERATION,
  SETTINGS,
  has_tokenizer,
  named_end_token,
  num_identifiers,
  read_companions,
  read_tokenizer,
)
from examples.gpt2.model import files, hugging_face
from examples.gpt2.model.config import padded_vocab_size
from examples.gpt2.run.command import exit_on_error
from examples.gpt2.storage import as_path, new_folder

_CONFIG = 'config.json'
_WEIGHTS = 'model.safetensors'


def main(args: list[str] | None = None) -> None:
  """Runs the command line; status 2 for what the user can correct."""
  with exit_on_error():
    tyro.extras.subcommand_cli_from_dict(
      {'export': export_model, 'import': import_model},
      args=args,
      prog='python -m examples.gpt2.convert',
      description='Turns models into and out of folders of Hugging Face.',
    )


def export_model(
  folder: tyro.conf.Positional[Path],
  out: tyro.conf.Positional[Path],
  dtype: Literal['float32', 'bfloat16'] = 'float32',
  max_shard_size: str = '5GB',
) -> None:
  """Writes a model for GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder of a finished run or of an imported model.
    out: Folder of the result: a new or an empty one.
    dtype: Data type of the weights.
    max_shard_size: Largest size of a file of weights, in KB, MB, GB or TB; a
      larger model is written as several files with an index.
  """
  with new_folder(as_path(out)) as scratch:
    model = files.load_model(folder)
    if model.config.qk_norm:
      raise UsageError(
        f'{folder} has qk_norm, which neither GPT2LMHeadModel nor '
        'LlamaForCausalLM has: only a model without it can be exported.'
      )
    arrays = hugging_face.to_arrays(
      model.config, model.num_tokens, model.params
    )
    _write_weights(scratch, arrays, dtype, max_shard_size)
    _write_json(scratch / _CONFIG, hugging_face.to_settings(model, dtype))
    for name, content in model.companions.items():
      (scratch / name).write_bytes(content)
    generation = hugging_face.generation_settings(model)
    if generation:
      _write_json(scratch / GENERATION, generation)
    if model.tokenizer is not None:
      model.tokenizer.save(str(scratch / files.TOKENIZER))
      settings = hugging_face.tokenizer_settings(model)
      _write_json(scratch / SETTINGS, settings)


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
    _write_json(folder / f'{_WEIGHTS}.index.json', index)


def _write_json(path: Path, values: dict[str, Any]) -> None:
  path.write_text(json.dumps(values, indent=2) + '\n')


def import_model(
  folder: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]
) -> None:
  """Reads a GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder with config.json, model.safetensors (or its parts) and
      perhaps a tokenizer: tokenizer.json, or vocab.json and merges.txt.
    out: Folder of the result, a new or an empty one: a model folder, for
      examples.gpt2.generate, evaluate, and train with --init-from.
  """
  with new_folder(as_path(out)) as scratch:
    files.save_model(scratch, _read(as_path(folder)))


def _read(folder: Path) -> files.Model:
  with files.naming(folder / _CONFIG):
    settings = files.read_json(folder / _CONFIG)
    config, num_rows = hugging_face.from_settings(settings)
  tokenizer, end_token = _read_tokenizer(folder, num_rows)
  size = num_rows if tokenizer is None else num_identifiers(tokenizer)
  config = dataclasses.replace(config, vocab_size=padded_vocab_size(size))
  arrays: dict[str, Any] = {}
  for path in _parts(folder):
    with files.naming(path):
      arrays |= files.open_arrays(path)
  with files.naming(folder / _WEIGHTS):
    params = hugging_face.from_arrays(config, num_rows, arrays)
  companions = read_companions(folder)
  generation = hugging_face.special_ids(settings, companions)
  if generation:
    companions[GENERATION] = json.dumps(generation, indent=2).encode()
  return files.Model(config, size, params, tokenizer, end_token, companions)


def _read_tokenizer(
  folder: Path, num_rows: int
) -> tuple[tokenizers.Tokenizer | None, str | None]:
  """Returns tokenizer and end-of-text token of an embedding with some rows."""
  if not has_tokenizer(folder):
    _note(f'{folder} has no tokenizer.json, so the result has no tokenizer.')
    return None, None
  tokenizer = read_tokenizer(folder)
  end_token = named_end_token(folder, tokenizer)
  if end_token is not None and tokenizer.token_to_id(end_token) is not None:
    tokenizer.add_special_tokens([end_token])  # As examples.gpt2.prepare does.
  added = tokenizer.get_added_tokens_decoder()
  missing = {i: x for x, i in tokenizer.get_vocab().items() if i >= num_rows}
  others = [missing[i] for i in sorted(missing.keys() - added.keys())]
  if others:
    raise UsageError(
      f'{folder} has the tokenizer of another model: the embedding has '
      f'{num_rows} rows, and none for {len(others)} tokens, such as '
      f'{", ".join(others[:5])}.'
    )
  if missing:
    names = ', '.join(missing[i] for i in sorted(missing))
    _note(
      f'{folder} has no weights for the added tokens {names}: they get the '
      'mean of the others.'
    )
  return tokenizer, end_token


def _note(text: str) -> None:
  print(text, file=sys.stderr)


def _parts(folder: Path) -> list[Path]:
  """Returns the files of the weights: one, or its parts."""
  if (folder / _WEIGHTS).is_file():
    return [folder / _WEIGHTS]
  parts = sorted(folder.glob('model-*.safetensors'))
  if not parts:
    names = ', '.join(sorted(path.name for path in folder.glob('*.bin')))
    raise UsageError(
      f'{folder} holds no {_WEIGHTS} and no parts of it: expected weights as '
      f'safetensors; pickles ({names or "*.bin"}) are not read, since they can '
      'run any code.'
    )
  return parts


if __name__ == '__main__':
  main()
