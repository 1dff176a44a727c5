"""Checkpoints of a run: written while it goes on, checked when read back.

Orbax writes them, and makes each appear whole or not at all. It does not see a
bit that a disk or a copy has flipped: it restores the wrong number without a
word, and training goes on from it. So every array is saved with a checksum,
which is taken on its devices before the save and again after the restore.
"""

from collections.abc import Callable, Sequence
import contextlib
import itertools
import math
import os
from pathlib import Path
import shutil
import textwrap
from typing import Any
import warnings

import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from examples.gpt2.config import UsageError
from examples.gpt2.devices.sharding import path_name
from examples.gpt2.run.checksums import survey


class Checkpoints:
  """The last few checkpoints of a run, and the one of the smallest loss.

  As a context, it waits at its end for the save under way. In a run of several
  processes, each of them makes the same calls.
  """

  def __init__(self, folder: Path, keep: int):
    """Opens a folder, and clears it of what a killed run left unfinished.

    Args:
      folder: Where the checkpoints are, a folder each; made if need be.
      keep: How many of the last checkpoints to keep, at least 1.
    """
    self._folder = folder.absolute()
    self._keep = keep
    self._saving = 0
    self._open()

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _open(self) -> None:
    """Makes the manager, and reads the losses of the checkpoints there are."""
    self._losses: dict[int, float] = {}
    policy = checkpoint_managers.AnyPreservationPolicy(
      [checkpoint_managers.LatestN(self._keep), _Best(self._losses)]
    )
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    self._clear_up()
    self._manager = ocp.CheckpointManager(self._folder, options=options)
    for step in self._manager.all_steps():
      # Whatever is wrong with one, ``restore`` finds out and says.
      with contextlib.suppress(Exception):
        self._losses[step] = self._load(step)['record']['loss']

  def _clear_up(self) -> None:
    """Deletes unfinished checkpoints; no save must be under way."""
    # Orbax would do so beside the next save, and may hit that.
    if jax.process_index() == 0:
      for unfinished in self._folder.glob('*.orbax-checkpoint-tmp*'):
        shutil.rmtree(unfinished, ignore_errors=True)
    multihost_utils.sync_global_devices('unfinished checkpoints are deleted')

  def save(self, step: int, state: Any, loss: float | None = None) -> bool:
    """Starts a save, once the one before it is over.

    The state may be donated as soon as this returns. Checkpoints that are no
    longer kept are deleted once the new one is whole.

    Args:
      step: Step of the state. A checkpoint that it has already is left alone.
      state: Tree of arrays.
      loss: The best checkpoint has the smallest; without a finite one, a
        checkpoint is never the best.

    Returns:
      False, after a warning, if the state holds a number that is not finite or
      if the save cannot start.
    """
    self.wait()
    self._clear_up()
    if step in self._manager.all_steps():
      return True
    arrays = _by_name(state)
    found = jax.device_get(survey(arrays))
    for name, is_finite in found['finite'].items():
      if not is_finite:
        _warn(f'No checkpoint is made of step {step}: {name} is not finite.')
        return False
    if loss is None or not math.isfinite(loss):
      loss = math.inf
    self._saving, self._losses[step] = step, float(loss)
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(arrays),
      record=ocp.args.JsonSave(
        {
          'loss': float(loss),
          'types': _types(arrays),
          'checksums': {k: int(x) for k, x in found['checksums'].items()},
        }
      ),
    )
    # Without force, Orbax passes over a step before the last one in silence.
    return self._go_on(self._manager.save, step, args=args, force=True)

  def wait(self) -> None:
    """Waits until the save under way is durable; warns if it is not."""
    self._go_on(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits until the save under way is durable, and lets go of the folder."""
    self.wait()
    self._manager.close()

  def _go_on(
    self, action: Callable[..., Any], *args: Any, **named: Any
  ) -> bool:
    """Does a part of a save; if it fails, warns, clears up, returns False."""
    _, reason = _attempt(action, *args, **named)
    if not reason:
      return True
    _warn(
      f'The checkpoint of step {self._saving} is not saved: {reason}. The run '
      'goes on, and the checkpoints before it are kept.'
    )
    # Orbax has forgotten the old checkpoints that it was to delete afterwards,
    # and leaves a part of the new one; a new manager finds and mends both.
    _attempt(self._manager.close)
    _attempt(self._open)
    return False

  def restore(self, like: Any) -> tuple[int, Any] | None:
    """Restores the newest checkpoint that is sound.

    Newer ones are moved, with a warning, to a folder beside this one.

    Args:
      like: Tree of :class:`jax.ShapeDtypeStruct` with the shardings to restore
        to, on any mesh.

    Returns:
      Step and state, None if there is no checkpoint.

    Raises:
      UsageError: If there are some but none is sound; they stay in the folder.
    """
    self.wait()
    damaged: dict[int, str] = {}
    for step in sorted(self._manager.all_steps(), reverse=True):
      state, reason = self._try(step, like)
      if not reason:
        self._set_aside(damaged)
        return step, state
      damaged[step] = reason
    if not damaged:
      return None
    raise UsageError(
      f'No checkpoint in {self._folder} can be used; --fresh starts over. '
      + ' '.join(f'Step {step}: {why}.' for step, why in damaged.items())
    )

  def _try(self, step: int, like: Any) -> tuple[Any, str]:
    """Returns a state, and why it cannot be used, or ''."""
    read, reason = _attempt(self._read, step, like)
    if reason:
      return None, reason
    # Each process has read by itself, but checksums need the devices of all.
    return _attempt(_verified, like, *read)

  def _read(self, step: int, like: Any) -> tuple[dict[str, jax.Array], Any]:
    """Returns arrays by name, and their checksums when they were saved."""
    targets = _by_name(like)
    record = self._load(step)['record']
    found, expected = record['types'], _types(targets)
    for name in sorted(found.keys() | expected.keys()):
      one, other = found.get(name, 'missing'), expected.get(name, 'nothing')
      if one != other:
        raise ValueError(f'{name} is {one}, expected {other}')
    arrays = self._load(step, state=ocp.args.StandardRestore(targets))['state']
    return arrays, record['checksums']

  def _load(self, step: int, **items: Any) -> Any:
    """Returns items of a checkpoint, the record if no others are named."""
    # Without the barriers of the manager, in which the other processes would
    # wait forever for one that failed.
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
      primary_host=me, active_processes={me}
    )
    args = ocp.args.Composite(**items or {'record': ocp.args.JsonRestore()})
    with ocp.Checkpointer(
      ocp.CompositeCheckpointHandler(), multiprocessing_options=alone
    ) as reader:
      return reader.restore(self._folder / str(step), args=args)

  def _set_aside(self, damaged: dict[int, str]) -> None:
    """Moves checkpoints away, so that their steps can be saved again."""
    folder = self._folder.with_name(f'damaged-{self._folder.name}')
    for step, reason in damaged.items():
      names = (f'{step}-{number}' for number in itertools.count(1))
      target = next(folder / n for n in names if not (folder / n).exists())
      _warn(
        f'The checkpoint of step {step} in {self._folder} is damaged, so one '
        f'before it is used, and it is moved to {target}: {reason}.'
      )
      if jax.process_index() == 0:
        folder.mkdir(exist_ok=True)
        os.rename(self._folder / str(step), target)
    multihost_utils.sync_global_devices('damaged checkpoints are moved')
    self._manager.reload()


class _Best(checkpoint_managers.PreservationPolicy):
  """Keeps the checkpoint of the smallest loss, the newest of equal ones.

  ``BestN`` of Orbax has the losses read when the manager is made, which fails
  if a file of any checkpoint is damaged.
  """

  def __init__(self, losses: dict[int, float]):
    self._losses = losses

  def should_preserve(
    self,
    checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
    *,
    context: object,
  ) -> Sequence[bool]:
    """Returns for each checkpoint whether it is the best."""
    del context
    ranks = [(self._losses.get(c.step, math.inf), -c.step) for c in checkpoints]
    return [rank == min(ranks) for rank in ranks]


def _types(arrays: dict[str, Any]) -> dict[str, str]:
  """Returns the types of arrays, such as 'float32[2, 3]'."""
  return {name: f'{x.dtype}{list(x.shape)}' for name, x in arrays.items()}


def _by_name(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths, in the order of the tree."""
  return {path_name(p): x for p, x in jax.tree.leaves_with_path(tree)}


def _verified(
  like: Any, arrays: dict[str, jax.Array], checksums: dict[str, int]
) -> Any:
  """Returns the arrays as a tree; raises if one has another checksum."""
  found = jax.device_get(survey(arrays))['checksums']
  for name, value in found.items():
    if int(value) != checksums[name]:
      raise ValueError(f'{name} is not as it was saved, by its checksum')
  leaves = [arrays[name] for name in _by_name(like)]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _attempt(
  action: Callable[..., Any], *args: Any, **named: Any
) -> tuple[Any, str]:
  """Returns the result of an action, and why it failed in a process, or ''."""
  try:
    result, reason = action(*args, **named), ''
  except Exception as error:
    # Errors of tensorstore go on for pages.
    reason = textwrap.shorten(f'{type(error).__name__}: {error}', 300)
    result = None
  failed = multihost_utils.process_allgather(np.array(bool(reason)))
  return result, reason or ('another process failed' if failed.any() else '')


def _warn(text: str) -> None:
  warnings.warn(text, RuntimeWarning, stacklevel=3)
