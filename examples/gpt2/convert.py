"""Models from and for Hugging Face: python -m examples.gpt2.convert -h."""

import dataclasses
import json
from pathlib import Path
import sys
from typing import Any, Literal

import tokenizers
import tyro

from examples.gpt2.command import exit_on_error
from examples.gpt2.config import UsageError
from examples.gpt2.data.tokenizer import (
  GENERATION,
  has_tokenizer,
  named_end_token,
  num_identifiers,
  read_companions,
  read_tokenizer,
)
from examples.gpt2.model import files, hugging_face
from examples.gpt2.model.config import padded_vocab_size
from examples.gpt2.model.hugging_face import MAX_SHARD_SIZE, WEIGHTS
from examples.gpt2.run.weights import load_model
from examples.gpt2.storage import as_path, new_folder

_CONFIG = 'config.json'


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
  max_shard_size: str = MAX_SHARD_SIZE,
  step: int | None = None,
) -> None:
  """Writes a model for GPT2LMHeadModel or LlamaForCausalLM.

  Args:
    folder: Folder of a run, which may go on, or of an imported model.
    out: Folder of the result: a new or an empty one.
    step: Step of the run's checkpoint to export. Default: the weights at the
      end of the run, or its last checkpoint.
    dtype: Data type of the weights.
    max_shard_size: Largest size of a file of weights, in KB, MB, GB or TB; a
      larger model is written as several files with an index.
  """
  with new_folder(as_path(out)) as scratch:
    model = load_model(folder, step=step)
    hugging_face.write_hugging_face(scratch, model, dtype, max_shard_size)
  print(f'wrote {out}')


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
  print(f'wrote {out}')


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
  with files.naming(folder / WEIGHTS):
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
  if end_token is not None and tokenizer.token_to_id(end_token) is None:
    _note(
      f'{folder} names {end_token} as the end of a text, which its tokenizer '
      'does not have: the imported model has no end-of-text token.'
    )
    end_token = None
  if end_token is not None:
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
  if (folder / WEIGHTS).is_file():
    return [folder / WEIGHTS]
  parts = sorted(folder.glob('model-*.safetensors'))
  if not parts:
    names = ', '.join(sorted(path.name for path in folder.glob('*.bin')))
    raise UsageError(
      f'{folder} holds no {WEIGHTS} and no parts of it: expected weights as '
      f'safetensors; pickles ({names or "*.bin"}) are not read, since they can '
      'run any code.'
    )
  return parts


if __name__ == '__main__':
  main()
