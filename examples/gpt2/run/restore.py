"""Reads checkpoints back, on any mesh, and finds what is damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.gpt2.config import UsageError, digest
from examples.gpt2.devices.processes import any_failed, on_process_0
from examples.gpt2.devices.sharding import by_path
from examples.gpt2.run.checkpoint_folder import DAMAGE, CheckpointFolder
from examples.gpt2.run.checksums import checksums
from examples.gpt2.run.orbax_io import describe, read_arrays, root_cause
from examples.gpt2.storage import as_path, os_errors

_STEP = 'step'
_PARAMS = 'params.'


class DamagedError(Exception):
  """A checkpoint is not what was saved."""


def types(arrays: dict[str, Any]) -> dict[str, str]:
  """Returns the types of arrays, such as 'float32[2, 3]'."""
  return {name: f'{x.dtype}{list(x.shape)}' for name, x in arrays.items()}


def restore(
  folder: CheckpointFolder, step: int, like: Any, only: str = ''
) -> Any:
  """Reads a checkpoint; all processes must call it.

  Args:
    folder: Folder of checkpoints.
    step: Step of one of them.
    like: Tree with the shapes and the shardings to restore to.
    only: What the paths of all its leaves begin with; others are not read.

  Returns:
    Tree of arrays.

  Raises:
    DamagedError: If the checkpoint is damaged, or of another shape.
    OSError: If a file cannot be read, which does not say that it is damaged.
  """
  targets = by_path(like)
  arrays, expected = _examine(_read, folder, step, targets, only)
  # Each process has read for itself, but checksums need the devices of all.
  _examine(_compare_checksums, arrays, expected)
  if _STEP in targets and _STEP not in arrays:
    # Releases before 0.3.0 did not save it.
    arrays[_STEP] = jax.device_put(np.int32(step), targets[_STEP].sharding)
  leaves = [arrays[name] for name in targets]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _read(
  folder: CheckpointFolder, step: int, targets: dict[str, Any], only: str
) -> tuple[dict[str, jax.Array], dict[str, int]]:
  """Returns arrays, and their checksums when they were saved, by path."""
  with os_errors():
    record = folder.record(step)
  targets = _stored(record, targets, only)
  arrays = read_arrays(folder.path(step), targets)
  return arrays, record['checksums']


def _stored(
  record: dict[str, Any], targets: dict[str, Any], only: str
) -> dict[str, Any]:
  """Returns what a checkpoint has of the targets, which may lack the step.

  Raises ``ValueError`` if it has other arrays.
  """
  found = {k: x for k, x in record['types'].items() if k.startswith(only)}
  if _STEP not in found:
    targets = {k: x for k, x in targets.items() if k != _STEP}
  expected = types(targets)
  for name in sorted(found.keys() | expected.keys()):
    one, other = found.get(name, 'missing'), expected.get(name, 'nothing')
    if one != other:
      raise ValueError(f'{name} is {one}, expected {other}')
  return targets


def _compare_checksums(
  arrays: dict[str, jax.Array], expected: dict[str, int]
) -> None:
  for name, value in checksums(arrays).items():
    if value != expected[name]:
      raise ValueError(f'{name} is not as it was saved, by its checksum')


def _examine(action: Callable[..., Any], *args: Any) -> Any:
  """Returns a result; raises in all processes if the action fails in one.

  What shows no damage, such as an error of a network or a device, is raised as
  it is.
  """
  result = damage = failure = None
  try:
    result = action(*args)
  except Exception as error:
    cause = root_cause(error)
    if isinstance(cause, DAMAGE):
      damage = DamagedError(describe(cause))
    else:
      failure = cause
  if any_failed(failure is not None):
    raise failure or OSError('another process cannot read the checkpoints')
  if any_failed(damage is not None):
    raise damage or DamagedError('another process found it damaged')
  return result


class Checkpoint:
  """A checkpoint of any run, of which nothing is changed."""

  def __init__(self, run: Path, step: int | None, flag: str):
    """Finds a checkpoint.

    Args:
      run: Folder of a run.
      step: Its step, None for the last.
      flag: What gave the step, for messages.

    Raises:
      UsageError: If there is none of that step, which are named.
    """
    run = as_path(run)
    self._folder = CheckpointFolder(run / 'checkpoints')
    steps = on_process_0(self._folder.steps)
    if not steps and step is None:
      raise UsageError(f'{run} has neither final weights nor a checkpoint yet.')
    if not steps:
      raise UsageError(f'{run} has no checkpoints, so none of {flag} {step}.')
    if step not in (None, *steps):
      raise UsageError(
        f'{flag} must be the step of a checkpoint in {self._folder.root} '
        f'({", ".join(map(str, steps))}), got {step}.'
      )
    self.step: int = steps[-1] if step is None else step

  def sha256(self) -> str:
    """Returns a hash of its arrays, by their checksums; for process 0."""
    try:
      with os_errors():
        return digest(self._folder.record(self.step)['checksums'])
    except DAMAGE as error:
      raise self._unusable(describe(error)) from error

  def state(self, like: Any) -> Any:
    """Reads a whole state."""
    return self._restore(like, '')

  def params(self, like: Any) -> Any:
    """Reads the parameters alone."""
    return self._restore({'params': like}, _PARAMS)['params']

  def _restore(self, like: Any, only: str) -> Any:
    try:
      return restore(self._folder, self.step, like, only)
    except DamagedError as error:
      raise self._unusable(str(error)) from error

  def _unusable(self, reason: str) -> UsageError:
    return UsageError(
      f'The checkpoint of step {self.step} in {self._folder.root} cannot be '
      f'used: {reason}.'
    )
