"""Model folders: what a model is, its weights and its tokenizer, as files.

A run has such a folder too, whose weights are those of a checkpoint until it
has ended.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np
from safetensors import SafetensorError
import safetensors.numpy
import tokenizers

from examples.gpt2 import sharding
from examples.gpt2.checkpoints import Checkpoints
from examples.gpt2.command import UsageError
from examples.gpt2.config import ModelConfig, complete, model_from_json
from examples.gpt2.model import shapes
from examples.gpt2.run_folder import DESCRIPTION, WEIGHTS
from examples.gpt2.storage import (
  as_path,
  make_folder,
  on_disk,
  whole_file,
  write_whole,
)
from examples.gpt2.tokenizer import (
  COMPANIONS,
  TOKENIZER,
  read_vocabulary,
  with_end_token,
)


@dataclasses.dataclass(frozen=True)
class Model:
  """A model with its weights."""

  config: ModelConfig
  num_tokens: int  # Number of token identifiers; vocab_size may be larger.
  params: Any  # Tree of float32 arrays.
  tokenizer: tokenizers.Tokenizer | None = None
  end_token: str | None = None  # Of the tokenizer, after each document.
  # Files beside the tokenizer that say how it is used.
  companions: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


def save_model(folder: Path, model: Model) -> None:
  """Writes a model into a folder, in place of one that is there.

  Each file is whole or not there, even after a kill; ``model.json`` is written
  last, so that with it the model is complete. Other files are left alone.

  Args:
    folder: Folder, on a disk or in a store; made if need be.
    model: Model, with arrays that this process can read whole.

  Raises:
    OSError: If a file cannot be written.
  """
  make_folder(folder)
  _remove(folder, [DESCRIPTION])
  write_weights(folder, model.params)
  write_description(folder, model)


def write_weights(folder: Path, params: Any) -> None:
  """Writes the weights of a model, without what the model is."""
  with whole_file(folder / WEIGHTS) as path:
    write_arrays(path, sharding.by_path(params))


def write_description(folder: Path, model: Model) -> None:
  """Writes what a model is, without its weights."""
  found = dict(with_end_token(model.companions, model.end_token))
  if model.tokenizer is not None:
    found[TOKENIZER] = model.tokenizer.to_str(pretty=True).encode()
  _remove(folder, {TOKENIZER, *COMPANIONS} - found.keys())
  for name, content in found.items():
    write_whole(folder / name, content)
  settings = {
    'num_tokens': model.num_tokens,
    'config': dataclasses.asdict(model.config),
  }
  write_whole(folder / DESCRIPTION, json.dumps(settings, indent=2).encode())


def _remove(folder: Path, names: Iterable[str]) -> None:
  for name in names:
    (folder / name).unlink(missing_ok=True)


def load_model(
  folder: Path,
  mesh: Mesh | None = None,
  step: int | None = None,
  flag: str = '--step',
) -> Model:
  """Reads a model: an imported one, or that of a run, which may go on.

  Args:
    folder: Folder of a run or of an imported model.
    mesh: Device mesh, of which each device reads its part of the weights.
      Without one, they are NumPy arrays.
    step: Step of the checkpoint to read. By default the weights at the end of
      the run or, of one that has not ended, those of its last checkpoint.
    flag: What gave the step, for messages.

  Returns:
    The model, checked.

  Raises:
    UsageError: If there is no such checkpoint; if a file or an array is
      missing, damaged, unknown or of another shape or type than the model's,
      which is named; or if the mesh does not fit the model.
    OSError: If a file cannot be read.
  """
  folder = as_path(folder)
  model = read_description(folder)
  like = shapes(model.config)
  # Host memory has room for what may not fit on a single device.
  devices = mesh or sharding.make_mesh('', jax.local_devices(backend='cpu')[:1])
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    like,
    sharding.parameter_shardings(devices, like),
  )
  checkpoints = folder / 'checkpoints'
  if step is None and (
    (folder / WEIGHTS).is_file() or not checkpoints.exists()
  ):
    params = _read_weights(folder / WEIGHTS, like)
  else:
    with Checkpoints(checkpoints, read_only=True) as opened:
      found = find_step(folder, opened, step, flag)
      params = opened.read(found, {'params': like})['params']
  if mesh is None:
    params = jax.tree.map(np.asarray, params)
  return dataclasses.replace(model, params=params)


def find_step(
  run: Path, checkpoints: Checkpoints, step: int | None, flag: str
) -> int:
  """Returns the step of a checkpoint, by default the last; it must be there."""
  steps = checkpoints.steps()
  if not steps:
    raise UsageError(f'{run} has no checkpoints yet.')
  if step not in (None, *steps):
    raise UsageError(
      f'{flag} must be the step of a checkpoint in {run} '
      f'({", ".join(map(str, steps))}), got {step}.'
    )
  return steps[-1] if step is None else step


def read_description(folder: Path) -> Model:
  """Reads what the model in a folder is, without its weights."""
  folder = as_path(folder)
  if not folder.is_dir():
    raise UsageError(f'{folder} is no folder of a run or of a model.')
  if not (folder / DESCRIPTION).exists() and (folder / 'config.json').exists():
    with naming(folder / 'config.json'):
      if 'model_type' in read_json(folder / 'config.json'):
        raise UsageError(
          'it is of a model of Hugging Face: import that first, by '
          f'python -m examples.gpt2.convert import {folder} OUT'
        )
  with naming(folder / DESCRIPTION):
    config, num_tokens = _parse(**read_json(folder / DESCRIPTION))
  known = read_vocabulary(folder, num_tokens)
  return Model(config, num_tokens, None, **known)


def _parse(config: dict[str, Any], num_tokens: int) -> tuple[ModelConfig, int]:
  """Checks the entries of model.json."""
  parsed = complete(model_from_json(config))
  if type(num_tokens) is not int or not 0 < num_tokens <= parsed.vocab_size:
    raise UsageError(
      'num_tokens must be an integer above 0 and at most vocab_size '
      f'{parsed.vocab_size}, got {num_tokens!r}.'
    )
  return parsed, num_tokens


def _read_weights(path: Path, like: Any) -> Any:
  """Reads arrays of some shapes; each device reads its part of them."""
  with naming(path):
    arrays = open_arrays(path)
    check_arrays(arrays, sharding.by_path(like))
  return jax.tree.map_with_path(
    lambda name, x: jax.make_array_from_callback(
      x.shape, x.sharding, arrays[sharding.path_name(name)].__getitem__
    ),
    like,
  )


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Raises ``UsageError`` that names a file, for what is wrong with it."""
  try:
    yield
  except FileNotFoundError as error:
    raise UsageError(f'{path} is missing.') from error
  # Python itself names entries that are unknown or missing.
  except (TypeError, ValueError, RecursionError, SafetensorError) as error:
    raise UsageError(f'{path} cannot be used: {error}') from error


def read_json(path: Path) -> dict[str, Any]:
  """Returns the JSON object in a file."""
  value = json.loads(path.read_text())
  if not isinstance(value, dict):
    raise UsageError(f'expected a JSON object, got {value!r}.')
  return value


def open_arrays(path: Path) -> dict[str, Any]:
  """Returns arrays of safetensors by name; what is indexed is read."""
  # Of a copy from a store, the disk keeps what is open.
  with on_disk(path) as copy, safetensors.safe_open(copy, 'numpy') as file:
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118


def write_arrays(
  path: Path, arrays: Mapping[str, Any], metadata: dict[str, str] | None = None
) -> None:
  """Writes arrays as safetensors."""
  # Their strides would be ignored.
  arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
  path.unlink(missing_ok=True)
  path.touch()
  mode = path.stat().st_mode  # As the umask has it: safetensors would not ask.
  try:
    safetensors.numpy.save_file(arrays, path, metadata)
    path.chmod(mode)
  except SafetensorError as error:
    raise OSError(f'{path} cannot be written: {error}') from error


def check_arrays(
  found: Mapping[str, Any],
  expected: Mapping[str, Any],
  dtypes: tuple[str, ...] = ('F32',),
) -> None:
  """Raises ``UsageError`` for open arrays that are not as expected."""
  for name in sorted(found.keys() | expected.keys()):
    got, accepted = 'not there', ['not there']
    if name in found:
      got = f'{found[name].get_dtype()}{found[name].get_shape()}'
    if name in expected:
      accepted = [f'{dtype}{list(expected[name].shape)}' for dtype in dtypes]
    if got not in accepted:
      raise UsageError(
        f'the array {name} is {got}, expected {" or ".join(accepted)} from '
        'what the model is.'
      )
