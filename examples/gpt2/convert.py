"""Models from and for Hugging Face: python -m examples.gpt2.convert -h."""

import json
from pathlib import Path
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tyro

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import END_OF_TEXT
from examples.gpt2.data.tokens import new_folder
from examples.gpt2.model.files import (
  TOKENIZER,
  Model,
  arrays_by_path,
  as_tree,
  load_model,
  save_model,
)
from examples.gpt2.model.hugging_face_config import read_settings, to_settings
from examples.gpt2.model.hugging_face_layout import (
  from_hugging_face,
  hugging_face_shapes,
  to_hugging_face,
)
from examples.gpt2.model.layers import ModelConfig
from examples.gpt2.model.model_files import (
  check_arrays,
  num_identifiers,
  read_arrays,
  read_json,
  read_tokenizer,
)
from examples.gpt2.run.command import exit_on_error

_CONFIG = 'config.json'
_WEIGHTS = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_HEAD = 'lm_head.weight'
_EMBEDDINGS = {
  'gpt2': 'transformer.wte.weight',
  'llama': 'model.embed_tokens.weight',
}
# Constants that old versions saved beside the weights.
_CONSTANTS = re.compile(
  r'.*h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq'
)


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Args:
    args: Arguments; those of the process by default.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a file that
      cannot be read or written, and 130 after control-C.
  """
  with exit_on_error():
    tyro.extras.subcommand_cli_from_dict(
      {'export': export_model, 'import': import_model},
      args=args,
      prog='python -m examples.gpt2.convert',
      description='Turns models into and out of folders of Hugging Face.',
    )


def export_model(
  folder: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]
) -> None:
  """Writes a model for GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder of a finished run or of an imported model.
    out: Folder of the result: a new or an empty one.

  Raises:
    UsageError: If a folder is wrong, or Hugging Face has no such model.
    OSError: If a file cannot be read or written.
  """
  _check_is_free(out)
  model = load_model(folder)
  if model.config.qk_norm:
    raise UsageError(
      f'{folder} has qk_norm, which neither GPT2LMHeadModel nor '
      'LlamaForCausalLM has: only a model without it can be exported.'
    )
  params = arrays_by_path(model.params)
  arrays = to_hugging_face(model.config, model.num_tokens, params)
  with new_folder(out.expanduser().resolve()) as scratch:
    _write_json(scratch / _CONFIG, to_settings(model))
    safetensors.numpy.save_file(
      arrays_by_path(arrays), scratch / _WEIGHTS, metadata={'format': 'pt'}
    )
    if model.tokenizer is not None:
      model.tokenizer.save(str(scratch / TOKENIZER))
      _write_json(scratch / 'tokenizer_config.json', _tokenizer_settings(model))


def import_model(
  folder: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]
) -> None:
  """Reads a GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder with config.json, model.safetensors (or its parts and their
      index) and perhaps tokenizer.json.
    out: Folder of the result, a new or an empty one: a model folder, for
      examples.gpt2.generate, evaluate, and train with --init-from.

  Raises:
    UsageError: If a folder is wrong, or the model is another than ours.
    OSError: If a file cannot be read or written.
  """
  _check_is_free(out)
  model = _read_model(folder.expanduser())
  with new_folder(out.expanduser().resolve()) as scratch:
    save_model(
      scratch, model.config, model.num_tokens, model.params, model.tokenizer
    )


def _read_model(folder: Path) -> Model:
  """Reads a folder of Hugging Face."""
  config, num_rows = read_settings(folder / _CONFIG)
  arrays = _with_one_naming(folder, _read_weights(folder), config)
  expected = hugging_face_shapes(config, num_rows)
  check_arrays(folder / _WEIGHTS, arrays, expected)
  params = as_tree(config, from_hugging_face(config, arrays))
  if not (folder / TOKENIZER).is_file():
    return Model(config, num_rows, params, None)
  tokenizer = read_tokenizer(folder / TOKENIZER, num_rows)
  # Rows that no token has are padding too.
  return Model(config, num_identifiers(tokenizer), params, tokenizer)


def _check_is_free(out: Path) -> None:
  """Refuses, before the work, a folder with something in it."""
  out = out.expanduser()
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise UsageError(
      f'{out} is there and not an empty folder: choose another, or delete it.'
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n')


def _tokenizer_settings(model: Model) -> dict[str, Any]:
  """Returns what AutoTokenizer needs beside tokenizer.json."""
  has_end = model.tokenizer.token_to_id(END_OF_TEXT) is not None
  names = ('bos_token', 'eos_token', 'unk_token') if has_end else ()
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': model.config.context_length,
    'clean_up_tokenization_spaces': False,
    **dict.fromkeys(names, END_OF_TEXT),
  }


def _read_weights(folder: Path) -> dict[str, np.ndarray]:
  """Reads arrays by name, half precision as float32."""
  arrays: dict[str, np.ndarray] = {}
  for path in _weight_files(folder):
    arrays |= read_arrays(path)
  floats = (jnp.float16, jnp.bfloat16, jnp.float32)
  return {
    name: x.astype(np.float32, copy=False) if x.dtype in floats else x
    for name, x in arrays.items()
  }


def _weight_files(folder: Path) -> list[Path]:
  """Returns the files of the weights: one, or the parts in an index."""
  index = folder / _INDEX
  if (folder / _WEIGHTS).is_file():
    return [folder / _WEIGHTS]
  if index.is_file():
    names = read_json(index).get('weight_map')
    if not isinstance(names, dict):
      raise UsageError(f'{index} has no object weight_map.')
    # What an index of somebody else names lies in the folder itself.
    return sorted({folder / Path(str(name)).name for name in names.values()})
  pickles = sorted(folder.glob('*.bin'))
  raise UsageError(
    f'{folder} holds no {_WEIGHTS}'
    + (
      f'. {pickles[0].name} is not read, since a pickle can run any code: save '
      'the model as safetensors.'
      if pickles
      else ': expected a folder of Hugging Face with weights as safetensors.'
    )
  )


def _with_one_naming(
  folder: Path, arrays: dict[str, np.ndarray], config: ModelConfig
) -> dict[str, np.ndarray]:
  """Returns the arrays that count, by the names of a model with a head."""
  embedding = _EMBEDDINGS[config.architecture]
  prefix = embedding.split('.')[0] + '.'
  if not any(name.startswith(prefix) for name in arrays):
    arrays = {
      name if name == _HEAD else prefix + name: x for name, x in arrays.items()
    }
  arrays = {k: x for k, x in arrays.items() if not _CONSTANTS.fullmatch(k)}
  head = None if config.untied_head else arrays.pop(_HEAD, None)
  if head is not None and not np.array_equal(head, arrays.get(embedding)):
    raise UsageError(
      f'{folder} holds {_HEAD} that is not {embedding}, but {_CONFIG} has '
      'tie_word_embeddings.'
    )
  return arrays


if __name__ == '__main__':
  main()
