"""The model of a run, also of one that goes on: from its checkpoints."""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh
import numpy as np

from examples.gpt2.config import UsageError
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices import sharding
from examples.gpt2.model import files
from examples.gpt2.model.transformer import shapes
from examples.gpt2.run.checkpoints import Checkpoints
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
  with os_errors():
    has_weights = (folder / files.WEIGHTS).is_file()
    is_run = (folder / 'checkpoints').exists()
  if step is None and (has_weights or not is_run):
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
  with Checkpoints(folder / 'checkpoints', read_only=True) as checkpoints:
    found = find_step(folder, checkpoints, step, flag)
    params = checkpoints.read(found, {'params': like})['params']
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
