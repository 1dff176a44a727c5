"""Checkpoints of a run, on Orbax's manager, each array with a checksum.

Orbax makes each checkpoint appear whole or not at all. It does not see a bit
that a disk or a copy has flipped: it restores the wrong number without a word.
So the checksum of every array is saved with it, and compared after the restore.
"""

from collections.abc import Callable
import contextlib
import logging
from pathlib import Path
import textwrap
from typing import Any, Self
import warnings

from etils import epath
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

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


class _Kept:
  """Keeps the newest checkpoints, the best, and some in between.

  Attributes:
    val_losses: Validation losses by step, of those that are known.
    damaged: Steps of damaged checkpoints. They count for nothing, and stay
      until the run comes to their step.
  """

  def __init__(self, max_to_keep: int | None, keep_period: int | None):
    self._max_to_keep, self._keep_period = max_to_keep, keep_period
    self.val_losses: dict[int, float] = {}
    self.damaged: set[int] = set()

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    """Returns whether to keep each of the checkpoints, in order of steps."""
    del context
    steps = [x.step for x in checkpoints]
    sound = [step for step in steps if step not in self.damaged]
    kept = {*self.damaged, *sound[-(self._max_to_keep or len(sound)) :]}
    if evaluated := [step for step in sound if step in self.val_losses]:
      kept.add(min(evaluated, key=self.val_losses.__getitem__))
    if self._keep_period is not None:
      kept |= {step for step in sound if step % self._keep_period == 0}
    return [step in kept for step in steps]


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
    self._kept = _Kept(max_to_keep, keep_period)
    self._manager = ocp.CheckpointManager(
      self._folder,
      item_handlers=ocp.PyTreeCheckpointHandler(),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._kept,
        create=not read_only,
        read_only=read_only,
        cleanup_tmp_directories=not read_only,
      ),
    )
    if not read_only:
      for step in self.steps():
        # That of a damaged checkpoint does not count.
        with contextlib.suppress(Exception):
          loss = self._manager.metadata(step).custom_metadata['val_loss']
          self._kept.val_losses[step] = float(loss)

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
    metadata = {'checksums': checksums(arrays), 'val_loss': val_loss}
    if val_loss is not None:
      self._kept.val_losses[step] = val_loss

    def start() -> None:
      if step in self._kept.damaged:
        self._manager.delete(step)
        self._kept.damaged.remove(step)
      self._manager.save(
        step,
        args=ocp.args.PyTreeSave(arrays),
        custom_metadata=metadata,
        force=True,
      )

    self._try(start, step)

  def wait(self) -> None:
    """Waits until the save under way is durable; raises ``UnsavedError``."""
    self._try(self._manager.wait_until_finished, self._manager.latest_step())

  def _try(self, action: Callable[[], None], step: int | None) -> None:
    try:
      action()
    except Exception as error:
      raise UnsavedError(
        f'the checkpoint of step {step} cannot be saved in {self._folder}: '
        f'{_describe(error)}. The one before it is sound.'
      ) from error

  def restore(self, like: Any) -> tuple[int, Any] | None:
    """Restores the newest sound checkpoint, on any mesh.

    Newer ones, which are damaged, are named in a warning.

    Args:
      like: Tree of the shapes and shardings to restore to.

    Returns:
      Step and state, ``None`` if there is no checkpoint.

    Raises:
      UsageError: If there are some but none is sound.
      OSError: If a store is away, which does not say that they are damaged.
    """
    reasons = []
    for step in reversed(self.steps()):
      try:
        state = self.read(step, like)
      except UsageError as error:
        reasons.append(str(error))
        self._kept.damaged.add(step)
        continue
      if reasons:
        warnings.warn(
          f'{" ".join(reasons)} That of step {step} is used instead.',
          RuntimeWarning,
          stacklevel=2,
        )
      return step, state
    if reasons:
      raise UsageError(' '.join(reasons))
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
      # None in those of examples/pretrain.py, which makes no checksums.
      if missing := [
        name for name in targets if name not in (saved or targets)
      ]:
        raise ValueError(f'it has no {", ".join(missing)}')
      arrays = self._manager.restore(
        step,
        args=ocp.args.PyTreeRestore(
          targets,
          restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
          partial_restore=True,
        ),
      )
      found = checksums(arrays) if saved else {}
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
  """Returns whether an error says that a disk or store cannot be reached."""
  if isinstance(error, OSError):
    return not isinstance(error, FileNotFoundError)
  return isinstance(error, ValueError) and str(error).startswith(_AWAY)


def _describe(error: BaseException) -> str:
  """Returns what an error comes from, as a line of text."""
  while error.__cause__:
    error = error.__cause__
  # Errors of TensorStore go on for pages.
  return textwrap.shorten(f'{type(error).__name__}: {error}', 300)


def checksums(arrays: dict[str, jax.Array]) -> dict[str, int]:
  """Returns the checksum of each array by name, see :func:`checksum`."""
  return jax.tree.map(int, jax.device_get(_on_devices(arrays)))


@jax.jit
def _on_devices(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return jax.tree.map(checksum, arrays)


def checksum(x: jax.Array) -> jax.Array:
  """Returns a checksum of an array, the same however it is sharded.

  Each 32 bits are mixed, one to one, with their position into a number, and
  these are summed in integers, whose order is free. A change within 32 bits is
  always seen; another is missed with a probability of about 2**-32. The array
  has any shape, and is of bool or a type of whole bytes.
  """
  words = _words(x)
  # From the index along each axis: a flat one needs a reshape, and that would
  # gather a sharded array.
  position = jnp.uint32(0)
  for axis, size in enumerate(words.shape):
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position = position * jnp.uint32(size % 2**32) + index
  return jnp.sum(_mix(words + _mix(position)), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32, longer ones along a new axis."""
  if jnp.iscomplexobj(x):
    x = jnp.stack([x.real, x.imag])
  if x.dtype == bool:
    return x.astype(jnp.uint32)
  word = f'uint{8 * min(x.dtype.itemsize, 4)}'
  return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """Scrambles uint32 one to one, as the last step of MurmurHash3 does."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
