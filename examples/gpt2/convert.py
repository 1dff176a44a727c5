"""Models from and for Hugging Face: python -m examples.gpt2.convert -h."""

import json
from pathlib import Path
from typing import Any

import tyro

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import (
  named_end_token,
  num_identifiers,
  read_tokenizer,
)
from examples.gpt2.model import files, hugging_face
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
  folder: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]
) -> None:
  """Writes a model for GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder of a finished run or of an imported model.
    out: Folder of the result: a new or an empty one.
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
    # Some versions of transformers insist on the entry.
    files.write_arrays(scratch / _WEIGHTS, arrays, {'format': 'pt'})
    _write_json(scratch / _CONFIG, hugging_face.to_settings(model))
    if model.tokenizer is not None:
      model.tokenizer.save(str(scratch / files.TOKENIZER))
      settings = hugging_face.tokenizer_settings(model)
      _write_json(scratch / 'tokenizer_config.json', settings)


def _write_json(path: Path, values: dict[str, Any]) -> None:
  path.write_text(json.dumps(values, indent=2) + '\n')


def import_model(
  folder: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path]
) -> None:
  """Reads a GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder with config.json, model.safetensors (or its parts) and
      perhaps tokenizer.json.
    out: Folder of the result, a new or an empty one: a model folder, for
      examples.gpt2.generate, evaluate, and train with --init-from.
  """
  with new_folder(as_path(out)) as scratch:
    files.save_model(scratch, _read(as_path(folder)))


def _read(folder: Path) -> files.Model:
  with files.naming(folder / _CONFIG):
    settings = files.read_json(folder / _CONFIG)
    config, num_rows = hugging_face.from_settings(settings)
  arrays: dict[str, Any] = {}
  for path in _parts(folder):
    with files.naming(path):
      arrays |= files.open_arrays(path)
  with files.naming(folder / _WEIGHTS):
    params = hugging_face.from_arrays(config, num_rows, arrays)
  if not (folder / files.TOKENIZER).is_file():
    return files.Model(config, num_rows, params)
  tokenizer = read_tokenizer(folder / files.TOKENIZER, num_rows)
  end_token = named_end_token(folder / files.TOKENIZER, tokenizer)
  # Rows that no token has are padding too.
  size = num_identifiers(tokenizer)
  return files.Model(config, size, params, tokenizer, end_token)


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
