"""The model of a run, also of one that goes on: from its checkpoints."""

import dataclasses
import hashlib
from pathlib import Path

import jax
from jax.sharding import Mesh
import numpy as np

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices import sharding
from examples.gpt2.model import files
from examples.gpt2.model.transformer import shapes
from examples.gpt2.run.restore import Checkpoint
from examples.gpt2.run.step import Trainer
from examples.gpt2.storage import as_path, os_errors


def describe_model(trainer: Trainer, tokens: Tokens) -> files.Model:
  """Returns what the model of a run is, without weights."""
  return files.Model(
    trainer.model_config,
    tokens.vocab_size,
    None,
    tokens.tokenizer,
    tokens.end_token,
    tokens.companions,
  )


def load_model(
  folder: Path,
  mesh: Mesh | None = None,
  step: int | None = None,
  flag: str = '--step',
) -> files.Model:
  """Reads a model: an imported one, or that of a run.

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
    UsageError: If there is no such checkpoint, or as
      :func:`examples.gpt2.model.files.load_model` does.
    OSError: If a file cannot be read.
  """
  folder = as_path(folder)
  if step is None and (_has_weights(folder) or not _is_run(folder)):
    return files.load_model(folder, mesh)
  model = files.read_description(folder)
  # Host memory has room for what may not fit on a single device.
  devices = mesh or sharding.make_mesh('', jax.local_devices(backend='cpu')[:1])
  like = shapes(model.config)
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    like,
    sharding.parameter_shardings(devices, like),
  )
  params = Checkpoint(folder, step, flag).params(like)
  if mesh is None:
    params = jax.tree.map(np.asarray, params)
  return dataclasses.replace(model, params=params)


def weights_sha256(folder: Path, step: int | None) -> str:
  """Returns a hash of the weights that a run starts from; for process 0.

  Raises ``UsageError`` if they are not there, or may be others later.
  """
  folder = as_path(folder)
  if step is not None:
    return Checkpoint(folder, step, '--init-step').sha256()
  path = folder / files.WEIGHTS
  if _has_weights(folder):
    with os_errors(), path.open('rb') as file:
      return hashlib.file_digest(file, 'sha256').hexdigest()
  if _is_run(folder):
    last = Checkpoint(folder, None, '--init-step').step
    raise UsageError(
      f'--init-from {folder} has no weights of its end: --init-step chooses '
      f'one of its checkpoints, of which the last is {last}.'
    )
  raise UsageError(
    '--init-from must be the folder of a run or of a converted model, with '
    f'a {path.name}: {folder} is not.'
  )


def _has_weights(folder: Path) -> bool:
  with os_errors():
    return (folder / files.WEIGHTS).is_file()


def _is_run(folder: Path) -> bool:
  with os_errors():
    return (folder / 'checkpoints').exists()
