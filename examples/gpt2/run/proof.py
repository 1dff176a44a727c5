"""The proof, before anything is computed, that checkpoints can be saved."""

from collections.abc import Callable
from pathlib import Path
import shutil
from typing import Any
import uuid

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import orbax.checkpoint as ocp

from examples.gpt2.command import format_bytes
from examples.gpt2.config import UsageError
from examples.gpt2.devices.processes import any_failed, on_process_0
from examples.gpt2.run.checkpoint_folder import CheckpointFolder
from examples.gpt2.run.orbax_io import describe, make_writer, read_arrays
from examples.gpt2.storage import make_folder, os_errors, write_whole


def prove(root: Path, state: Any) -> None:
  """Saves a small checkpoint, which all processes must be able to read.

  Args:
    root: Folder of the checkpoints of a run.
    state: Tree of the shapes and types of a checkpoint, which must find room.

  Raises:
    UsageError: If it cannot be saved, if a process does not see it, or if the
      disk is too full for the state.
  """
  folder = CheckpointFolder(root, max_to_keep=1)
  on_process_0(_check_room, folder, _num_bytes(state))
  # First a file: where hosts do not see the same folder, Orbax would wait.
  name = on_process_0(_write_file, folder)
  _raise_in_all(_read_file, folder, name)
  _raise_in_all(_save, folder, name)
  _raise_in_all(_read, folder, name)
  on_process_0(folder.clean_up)


def _raise_in_all(
  action: Callable[[CheckpointFolder, str], str],
  folder: CheckpointFolder,
  name: str,
) -> None:
  """Raises ``UsageError`` in all processes if an action fails in one."""
  try:
    with os_errors():
      reason = action(folder, name)
  except Exception as error:
    reason = describe(error)
  if any_failed(bool(reason)):
    on_process_0(folder.clean_up)
    raise UsageError(
      f'--out-dir {folder.root.parent} cannot hold a checkpoint: '
      f'{reason or "another process says why"}. It must be writable, and the '
      'same folder for all hosts: on a disk that they share, or in gs:// or '
      's3://.'
    )


def _num_bytes(state: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


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


def _write_file(folder: CheckpointFolder) -> str:
  """Returns the name of a new file, which begins that of a checkpoint."""
  name = f'{folder.PROOF}{uuid.uuid4().hex}'
  try:
    make_folder(folder.root)
    write_whole(folder.root / f'{name}.txt', name.encode())
  except OSError as error:
    raise UsageError(
      f'--out-dir {folder.root.parent} cannot be written: {error}'
    ) from error
  return name


def _read_file(folder: CheckpointFolder, name: str) -> str:
  path = folder.root / f'{name}.txt'
  is_same = path.exists() and path.read_bytes() == name.encode()
  me = f'process {jax.process_index()}'
  return '' if is_same else f'{me} does not see what process 0 has written'


def _save(folder: CheckpointFolder, name: str) -> str:
  number = _number(name)
  mesh = Mesh(np.array(jax.devices()), ('device',))
  # Split as states are, so that every process has a part to write.
  split = jax.make_array_from_callback(
    number.shape,
    NamedSharding(mesh, PartitionSpec('device')),
    number.__getitem__,
  )
  item = ocp.args.Composite(state=ocp.args.StandardSave({'number': split}))
  # Of all processes, as the checkpoints to come: Orbax counts its saves.
  writer = make_writer(folder.root)
  writer.save(folder.root / name, args=item)
  writer.close()
  return ''


def _read(folder: CheckpointFolder, name: str) -> str:
  expected = _number(name)
  found = read_arrays(folder.root / name, {'number': expected})
  is_same = np.array_equal(found['number'], expected)
  return '' if is_same else 'other numbers are read than were written'


def _number(name: str) -> np.ndarray:
  """Returns, as bytes for each device, the number that a name ends in."""
  digits = bytes.fromhex(name.removeprefix(CheckpointFolder.PROOF))
  return np.tile(np.frombuffer(digits, np.uint8), (jax.device_count(), 1))
