"""Reads the files of a model, and says what is wrong with them."""

from collections.abc import Mapping
import dataclasses
import json
from pathlib import Path
import typing
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from examples.gpt2.config import UsageError
from examples.gpt2.model.layers import ModelConfig


def read_config(path: Path) -> tuple[ModelConfig, int]:
  """Reads what a model is, and the number of its token identifiers.

  Args:
    path: ``model.json`` of a model folder.

  Returns:
    What the model is, and the number.

  Raises:
    UsageError: If the file is missing or damaged, or an entry is missing,
      unknown or out of its range.
  """
  settings = read_json(path)
  _check_names(path, settings, dict(config=None, num_tokens=None))
  values, num_tokens = settings['config'], settings['num_tokens']
  if not isinstance(values, dict):
    raise UsageError(f'{path}: config must be a JSON object, got {values!r}.')
  fields = dataclasses.fields(ModelConfig)
  _check_names(path, values, {f.name: f.default for f in fields})
  hints = typing.get_type_hints(ModelConfig)
  for name, value in [*values.items(), ('num_tokens', num_tokens)]:
    _check_value(path, name, value, hints.get(name, int))
  config = ModelConfig(**values)
  _check_sizes(path, config, num_tokens)
  return config, num_tokens


def _check_names(
  path: Path, values: dict[str, Any], defaults: dict[str, Any]
) -> None:
  """Raises ``UsageError`` for an unknown name, or one without default."""
  for name in sorted(values.keys() - defaults.keys()):
    raise UsageError(
      f'{path} has the unknown entry {name}: expected {", ".join(defaults)}.'
    )
  missing = defaults.keys() - values.keys()
  for name in sorted(missing):
    if defaults[name] in (None, dataclasses.MISSING):
      raise UsageError(f'{path} has no entry {name}.')


def _check_value(path: Path, name: str, value: Any, hint: Any) -> None:
  """Raises ``UsageError`` unless a value is of the type of its field."""
  if hint is int:
    accepted, fits = 'an integer above 0', type(value) is int and value > 0
  elif hint is bool:
    accepted, fits = 'true or false', type(value) is bool
  else:
    choices = typing.get_args(hint)
    accepted, fits = 'out of ' + ', '.join(choices), value in choices
  if not fits:
    raise UsageError(f'{path}: {name} must be {accepted}, got {value!r}.')


def _check_sizes(path: Path, config: ModelConfig, num_tokens: int) -> None:
  """Raises ``UsageError`` for sizes that do not fit each other."""
  if config.width % config.num_heads:
    raise UsageError(
      f'{path}: num_heads {config.num_heads} must divide width {config.width}.'
    )
  if config.architecture == 'llama' and config.head_width % 2:
    raise UsageError(
      f'{path}: width / num_heads must be even, got {config.head_width}.'
    )
  if num_tokens > config.vocab_size:
    raise UsageError(
      f'{path}: num_tokens {num_tokens} must be at most vocab_size '
      f'{config.vocab_size}.'
    )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
  """Reads a file of safetensors.

  Args:
    path: File.

  Returns:
    Arrays by name.

  Raises:
    UsageError: If the file is missing or damaged.
  """
  if not path.is_file():
    raise UsageError(f'{path} is missing.')
  try:
    return safetensors.numpy.load_file(path)
  except safetensors.SafetensorError as error:
    raise UsageError(
      f'{path} is no whole safetensors file: {error}.'
    ) from error


def check_arrays(
  path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
  """Checks that arrays are those of a model.

  Args:
    path: Where they were read, for the error.
    found: Arrays by name.
    expected: Shapes and types by name.

  Raises:
    UsageError: If one is missing, unknown, or of another shape or type.
  """
  for name in sorted(found.keys() | expected.keys()):
    one, other = (_describe(x.get(name)) for x in (found, expected))
    if one != other:
      raise UsageError(
        f'{path}: the array {name} is {one}, expected {other} from what the '
        'model is.'
      )


def _describe(array: Any) -> str:
  return 'not there' if array is None else f'{array.dtype}{list(array.shape)}'


def read_tokenizer(path: Path, num_tokens: int) -> tokenizers.Tokenizer:
  """Reads a tokenizer.

  Args:
    path: File of the tokenizers library.
    num_tokens: Number of token identifiers of the model.

  Returns:
    The tokenizer, which cuts and pads nothing.

  Raises:
    UsageError: If the file is damaged or has tokens beyond the model's.
  """
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The library raises nothing narrower.
    raise UsageError(
      f'{path} is no file of the tokenizers library: {error}.'
    ) from error
  count = num_identifiers(tokenizer)
  if count > num_tokens:
    raise UsageError(
      f'{path} has token identifiers up to {count - 1}, but the model has '
      f'{num_tokens} from 0 on.'
    )
  tokenizer.no_padding()
  tokenizer.no_truncation()
  return tokenizer


def num_identifiers(tokenizer: tokenizers.Tokenizer) -> int:
  """Returns the number that all identifiers of a tokenizer are below."""
  return 1 + max(tokenizer.get_vocab().values(), default=-1)


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON object from a file.

  Args:
    path: File.

  Returns:
    The object.

  Raises:
    UsageError: If the file is missing or holds something else.
  """
  try:
    value = json.loads(path.read_text())
  except FileNotFoundError as error:
    raise UsageError(f'{path} is missing.') from error
  except (ValueError, RecursionError) as error:
    raise UsageError(f'{path} is no JSON: {error}.') from error
  if not isinstance(value, dict):
    raise UsageError(f'{path} must hold a JSON object.')
  return value
