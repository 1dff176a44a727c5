"""Checkpoints of a run: written while it goes on, checked when read back.

Orbax writes them, and makes each appear whole or not at all. It does not see a
bit that a disk or a copy has flipped: it restores the wrong number without a
word, and training goes on from it. So every array is saved with a checksum,
which is taken on its devices before the save and again after the restore.
"""

from collections.abc import Callable
import contextlib
import math
from pathlib import Path
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from examples.gpt2.command import CommandError
from examples.gpt2.config import UsageError
from examples.gpt2.devices.processes import any_failed, on_process_0
from examples.gpt2.devices.sharding import by_path
from examples.gpt2.run.checkpoint_folder import CheckpointFolder
from examples.gpt2.run.checksums import checksums
from examples.gpt2.run.orbax_io import describe, make_writer
from examples.gpt2.run.restore import DamagedError, restore, types

MOST_FAILURES = 3
"""Saves that fail in a row before the run ends."""


class UnsavedError(CommandError):
  """Several checkpoints in a row could not be saved."""

  status = 5


class Checkpoints:
  """The last few checkpoints of a run, and the one of the smallest loss.

  As a context, it waits at its end for the save under way. All processes make
  the same calls.
  """

  def __init__(
    self, folder: Path, max_to_keep: int, keep_period: int | None = None
  ):
    """Makes a folder, or clears it of what a killed run left unfinished."""
    self._folder = CheckpointFolder(folder, max_to_keep, keep_period)
    self._saving: tuple[int, ocp.AsyncCheckpointer] | None = None
    self._num_failures = 0  # In a row.
    on_process_0(self._folder.clean_up)

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if kind is None:
      self.wait()
    elif self._saving:
      # Other processes may have no error, and would not answer.
      with contextlib.suppress(Exception):
        self._saving[1].close()

  def save(self, step: int, state: Any, loss: float | None = None) -> bool:
    """Starts a save, once the one before it is over.

    A save that fails is a warning, so that a store or disk that is away for a
    while does not end the run, but after three in a row there is an error.

    The state may be donated as soon as this returns. Checkpoints that are no
    longer kept are deleted once the new one is whole; the best, of the smallest
    finite loss, is.

    Returns:
      False, after a warning, if the state holds a number that is not finite or
      if the save cannot start.

    Raises:
      UnsavedError: If this is the third save in a row that has failed.
    """
    self.wait()
    arrays = by_path(state)
    for name, is_finite in jax.device_get(_are_finite(arrays)).items():
      if not is_finite:
        return self.fail(step, f'{name} is not finite')
    if loss is None or not math.isfinite(loss):
      loss = math.inf
    record = {
      'loss': float(loss),
      'types': types(arrays),
      'checksums': checksums(arrays),
    }
    items = ocp.args.Composite(
      state=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
    )
    writer = make_writer(self._folder.root)
    self._saving = step, writer
    return self._try(writer.save, self._folder.path(step), args=items)

  def fail(self, step: int, reason: str) -> bool:
    """Warns that a step is not saved, and returns False.

    All processes must call it. Raises ``UnsavedError`` the third time in a row.
    """
    self._num_failures += 1
    _warn(
      f'The checkpoint of step {step} is not saved: {reason}. The run goes on, '
      'and the checkpoints before it are kept.'
    )
    if self._num_failures >= MOST_FAILURES:
      raise UnsavedError(
        f'the last {self._num_failures} checkpoints could not be saved in '
        f'{self._folder.root}; once they can, the same command goes on from '
        'the one before them.'
      )
    return False

  def wait(self) -> bool:
    """Waits until the save under way is durable; warns if it is not.

    Raises ``UnsavedError`` the third time in a row. If it failed in some of
    several processes, the others give up after 20 minutes.
    """
    if not self._saving:
      return True
    if not self._try(self._saving[1].close):
      return False
    self._saving = None
    self._num_failures = 0
    try:
      on_process_0(self._folder.delete_old)
    except OSError as error:
      _warn(f'Old checkpoints are not deleted: {error}')
    return True

  def _try(self, action: Callable[..., Any], *args: Any, **named: Any) -> bool:
    """Does a part of the save; if it fails in a process, fails in all."""
    assert self._saving is not None
    step, writer = self._saving
    reason = ''
    try:
      action(*args, **named)
    except Exception as error:
      reason = describe(error)
    if not any_failed(bool(reason)):
      return True
    self._saving = None
    with contextlib.suppress(Exception):
      # Where the save has started, it fails for want of the other processes.
      writer.close()
    with contextlib.suppress(OSError):
      on_process_0(self._folder.clean_up)
    return self.fail(step, reason or 'another process failed')

  def restore(self, like: Any) -> tuple[int, Any] | None:
    """Restores the newest checkpoint that is sound, on any mesh.

    Newer ones are moved, with a warning, to a folder beside this one. ``like``
    has the shapes and the shardings to restore to.

    Returns:
      Step and state, None if there is no checkpoint.

    Raises:
      UsageError: If there are some but none is sound; they stay in the folder.
      OSError: If a file cannot be read, which does not say that it is damaged.
    """
    self.wait()
    # Their text alone: a traceback would keep the arrays on the devices.
    damaged: dict[int, str] = {}
    for step in reversed(on_process_0(self._folder.steps)):
      try:
        state = restore(self._folder, step, like)
      except DamagedError as error:
        damaged[step] = str(error)
        continue
      self._set_aside(damaged)
      return step, state
    if not damaged:
      return None
    raise UsageError(
      f'No checkpoint in {self._folder.root} can be used; --from-scratch '
      'starts over. '
      + ' '.join(f'Step {step}: {error}.' for step, error in damaged.items())
    )

  def _set_aside(self, damaged: dict[int, str]) -> None:
    """Moves checkpoints away, so that their steps can be saved again."""
    for step, error in damaged.items():
      path = on_process_0(self._folder.set_aside, step)
      _warn(
        f'The checkpoint of step {step} in {self._folder.root} is damaged, so '
        f'one before it is used, and it is moved to {path}: {error}.'
      )


@jax.jit
def _are_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return jax.tree.map(lambda x: jnp.isfinite(x).all(), arrays)


def _warn(text: str) -> None:
  warnings.warn(text, RuntimeWarning, stacklevel=3)
