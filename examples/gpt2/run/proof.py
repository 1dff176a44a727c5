"""The proof, before anything is computed, that checkpoints can be saved."""

import math
from pathlib import Path
import shutil
from typing import Any
import uuid

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp

from examples.gpt2.config import UsageError
from examples.gpt2.devices.processes import any_failed, on_first
from examples.gpt2.run.checkpoint_folder import CheckpointFolder
from examples.gpt2.run.command import format_bytes
from examples.gpt2.run.orbax_io import describe, make_writer, read_arrays
from examples.gpt2.storage import make_folder, os_errors


def prove(root: Path, state: Any) -> None:
  """Saves a small checkpoint, which all processes must be able to read.

  Args:
    root: Folder of the checkpoints of a run.
    state: Tree of the shapes and types of a checkpoint, which must find room.

  Raises:
    UsageError: If it cannot be saved, if a process does not see it, or if the
      disk is too full for the state.
  """
  folder = CheckpointFolder(root, keep=1)
  on_first(_check_room, folder, _num_bytes(state))
  path = folder.root / on_first(_save, folder)
  reason = _unseen(path)
  has_failed = any_failed(bool(reason))
  on_first(folder.clean_up)
  if has_failed:
    raise UsageError(
      f'--out-dir {root.parent}: {reason or "another process"} cannot read '
      'what process 0 has written there. All hosts must see the same folder: '
      'choose one on a disk that they share, or in gs:// or s3://.'
    )


def _num_bytes(state: Any) -> int:
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)
  )


def _check_room(folder: CheckpointFolder, needed: int) -> None:
  """Raises ``UsageError`` if a disk has too little room; stores have enough."""
  if folder.is_remote:
    return
  folder.clean_up()
  free = shutil.disk_usage(folder.root).free
  if free < needed:
    raise UsageError(
      f'--out-dir {folder.root.parent} is on a disk with {format_bytes(free)} '
      f'left, and a checkpoint needs {format_bytes(needed)}: free some of it, '
      'or choose another folder.'
    )


def _save(folder: CheckpointFolder) -> str:
  """Returns the name of a new checkpoint of a number."""
  name = f'{folder.PROOF}{uuid.uuid4().hex}'
  item = ocp.args.Composite(state=ocp.args.StandardSave(_number(name)))
  try:
    with os_errors():
      make_folder(folder.root)
      with make_writer(folder.root, {0}) as writer:
        writer.save(folder.root / name, args=item)
  except Exception as error:
    raise UsageError(
      f'--out-dir {folder.root.parent} cannot hold a checkpoint: '
      f'{describe(error)}'
    ) from error
  return name


def _number(name: str) -> dict[str, np.ndarray]:
  """Returns, as an array, the number that a name ends in."""
  digits = bytes.fromhex(name.removeprefix(CheckpointFolder.PROOF))
  return {'number': np.frombuffer(digits, np.uint8)}


def _unseen(path: epath.Path) -> str:
  """Returns why this process does not see a checkpoint of a number, or ''."""
  expected = _number(path.name)
  try:
    found = read_arrays(path, expected)
  except Exception as error:
    return f'process {jax.process_index()} ({describe(error)})'
  is_same = np.array_equal(found['number'], expected['number'])
  return '' if is_same else f'process {jax.process_index()}'
