"""Checkpoints of a run, on Orbax's manager, each array with a checksum.

Orbax makes each checkpoint appear whole or not at all. It does not see a bit
that a disk or a copy has flipped: it restores the wrong number without a word.
So the checksum of every array is saved with it, and compared after the restore.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import logging
from pathlib import Path
import textwrap
from typing import Any, Self
import warnings

from etils import epath
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from examples.gpt2.checksums import checksums
from examples.gpt2.command import CommandError, UsageError
from examples.gpt2.sharding import by_path
from examples.gpt2.storage import is_remote

# Orbax warns of each folder that it opens to read, and logs pages of what is
# raised anyway.
logging.getLogger('absl').setLevel(logging.CRITICAL)

# How errors of a store begin that do not say that its objects are damaged.
_AWAY = (
  'ABORTED', 'CANCELLED', 'DEADLINE_EXCEEDED', 'INTERNAL', 'PERMISSION_DENIED',
  'RESOURCE_EXHAUSTED', 'UNAUTHENTICATED', 'UNAVAILABLE',
)  # fmt: skip


class UnsavedError(CommandError):
  """A checkpoint could not be saved."""

  status = 5


@dataclasses.dataclass
class _Best:
  """Keeps the checkpoint with the least validation loss.

  Orbax's policy for it reads a file of metrics in each checkpoint: if one is
  damaged, none opens.
  """

  val_losses: dict[int, float]

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    """Returns whether to keep each of the checkpoints."""
    del context
    best = min(self.val_losses, key=self.val_losses.__getitem__, default=None)
    return [x.step == best for x in checkpoints]


class Checkpoints:
  """The checkpoints of a run: the newest, the best, and some in between.

  As a context, it waits at its end for the save under way. All processes make
  the same calls.
  """

  def __init__(
    self,
    folder: Path,
    max_to_keep: int | None = None,
    keep_period: int | None = None,
    *,
    read_only: bool = False,
  ):
    """Opens a folder.

    Args:
      folder: Folder of checkpoints, made if need be.
      max_to_keep: How many of the newest to keep; ``None`` for all. The best by
        validation loss is kept too.
      keep_period: Keeps each checkpoint whose step is a multiple of it.
      read_only: Whether nothing is to be changed.
    """
    self._folder = epath.Path(
      folder if is_remote(folder) else folder.absolute()
    )
    self._val_losses: dict[int, float] = {}
    kept = [managers.LatestN(max_to_keep), _Best(self._val_losses)]
    if keep_period is not None:
      kept.append(managers.EveryNSteps(keep_period))
    self._manager = ocp.CheckpointManager(
      self._folder,
      item_handlers=ocp.PyTreeCheckpointHandler(),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=managers.AnyPreservationPolicy(kept),
        create=not read_only,
        read_only=read_only,
        cleanup_tmp_directories=not read_only,
        # If a folder cannot be made, threads of Orbax would wait for it for
        # five minutes, and the process would not end before them.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
      ),
    )
    # What only reads deletes nothing, and need not know the best.
    for step in () if read_only else self.steps():
      with contextlib.suppress(Exception):  # The checkpoint is damaged.
        loss = self._manager.metadata(step).custom_metadata['val_loss']
        self._val_losses[step] = float(loss)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if kind is None:
      self.wait()
    self._manager.close()

  def steps(self) -> list[int]:
    """Returns the steps that have a checkpoint, in order."""
    return sorted(self._manager.all_steps())

  def save(self, step: int, state: Any, val_loss: float | None = None) -> None:
    """Starts a save, after the end of the one before; the state may be donated.

    Args:
      step: Steps done.
      state: Tree of arrays.
      val_loss: Validation loss, if the step was evaluated.

    Raises:
      UnsavedError: If the state holds a number that is not finite, or if the
        save cannot start, or the one before has failed.
    """
    arrays = by_path(state)
    for name, is_finite in jax.device_get(_are_finite(arrays)).items():
      if not is_finite:
        raise UnsavedError(
          f'{name} is not finite after step {step}, which is not saved.'
        )
    if val_loss is not None:
      self._val_losses[step] = val_loss
    metadata = {'checksums': checksums(arrays), 'val_loss': val_loss}
    with self._unsaved_errors(step):
      self._manager.save(
        step,
        args=ocp.args.PyTreeSave(arrays),
        custom_metadata=metadata,
        force=True,
      )

  def wait(self) -> None:
    """Waits until the save under way is durable; raises ``UnsavedError``."""
    with self._unsaved_errors(self._manager.latest_step()):
      self._manager.wait_until_finished()

  @contextlib.contextmanager
  def _unsaved_errors(self, step: int | None) -> Iterator[None]:
    try:
      yield
    except Exception as error:
      raise UnsavedError(
        f'the checkpoint of step {step} cannot be saved in {self._folder}: '
        f'{_describe(error)}.'
      ) from error

  def restore(self, like: Any) -> tuple[int, Any] | None:
    """Restores the newest sound checkpoint, on any mesh.

    A warning names the newer ones, which are damaged. They are deleted, because
    they would count as the newest.

    Args:
      like: Tree of the shapes and shardings to restore to.

    Returns:
      Step and state, ``None`` if there is no checkpoint.

    Raises:
      UsageError: If there are some but none is sound.
      OSError: If a store is away, which does not say that they are damaged.
    """
    damaged: dict[int, str] = {}
    for step in reversed(self.steps()):
      try:
        state = self.read(step, like)
      except UsageError as error:
        damaged[step] = str(error)
        continue
      if damaged:
        warnings.warn(
          f'{" ".join(damaged.values())} The checkpoint of step {step} is used '
          'instead, and the damaged ones are deleted.',
          RuntimeWarning,
          stacklevel=2,
        )
      for bad in damaged:
        self._manager.delete(bad)
        self._val_losses.pop(bad, None)
      return step, state
    if damaged:
      raise UsageError(' '.join(damaged.values()))
    return None

  def read(self, step: int, like: Any) -> Any:
    """Reads a checkpoint, or a part of it.

    Args:
      step: Its step.
      like: Tree of the shapes and shardings to restore to; it may lack some
        arrays of the checkpoint.

    Returns:
      Tree of arrays.

    Raises:
      UsageError: If the checkpoint is damaged, or does not hold such arrays.
      OSError: If a store is away.
    """
    targets = by_path(like)
    try:
      saved = self._manager.metadata(step).custom_metadata['checksums']
      if missing := [name for name in targets if name not in saved]:
        raise ValueError(f'it has no {", ".join(missing)}')
      arrays = self._manager.restore(
        step,
        args=ocp.args.PyTreeRestore(
          targets,
          restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
          partial_restore=True,
        ),
      )
      found = checksums(arrays)
      wrong = [name for name, x in found.items() if x != saved[name]]
      reason = f'{", ".join(wrong)} is not as it was saved' if wrong else ''
    except Exception as error:
      if _is_away(error):
        raise OSError(_describe(error)) from error
      reason = _describe(error)
    if reason:
      raise UsageError(
        f'The checkpoint of step {step} in {self._folder} is damaged: {reason}.'
      )
    leaves = [arrays[name] for name in targets]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


@jax.jit
def _are_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return jax.tree.map(lambda x: jnp.isfinite(x).all(), arrays)


def _is_away(error: Exception) -> bool:
  """Returns whether an error does not say that a checkpoint is damaged.

  A disk or store cannot be reached, or the memory is full.
  """
  if isinstance(error, (OSError, MemoryError)):
    return not isinstance(error, FileNotFoundError)
  known = isinstance(error, (ValueError, jax.errors.JaxRuntimeError))
  return known and str(error).startswith(_AWAY)


def _describe(error: BaseException) -> str:
  """Returns what an error comes from, as a line of text."""
  while error.__cause__:
    error = error.__cause__
  # Errors of TensorStore go on for pages.
  return textwrap.shorten(f'{type(error).__name__}: {error}', 300)
