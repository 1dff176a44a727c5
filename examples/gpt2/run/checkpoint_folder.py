"""The folder of a run's checkpoints: which there are, and which stay."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from etils import epath

from examples.gpt2.run.orbax_io import COMMITTED
from examples.gpt2.storage import (
  is_remote,
  make_folder,
  move,
  os_errors,
  unused_path,
)

# What Orbax raises for files that are truncated, missing or garbled.
DAMAGE = (
  AttributeError, FileNotFoundError, KeyError, TypeError, ValueError,
)  # fmt: skip


class CheckpointFolder:
  """Checkpoints, each in a folder that is named by its step.

  On a disk, Orbax gives a checkpoint its name once it is whole. In a store,
  where that would copy it, it writes a last file that says so.

  ``PROOF`` begins the names of those that only prove that a save is possible.

  All methods but ``path`` and ``record`` are for process 0.
  """

  PROOF = 'proof-'

  def __init__(
    self, root: Path, max_to_keep: int = 1, keep_period: int | None = None
  ):
    """Names a folder, and which checkpoints of it stay.

    Args:
      root: The folder, which need not exist.
      max_to_keep: How many of the last.
      keep_period: Those of which multiples of steps besides.
    """
    self.is_remote = is_remote(root)
    self.root = epath.Path(root if self.is_remote else root.absolute())
    self._max_to_keep, self._keep_period = max_to_keep, keep_period

  def path(self, step: int) -> epath.Path:
    """Returns the folder of a checkpoint."""
    return self.root / str(step)

  def record(self, step: int) -> dict[str, Any]:
    """Returns loss, types and checksums of a checkpoint."""
    return json.loads((self.path(step) / 'record' / 'metadata').read_bytes())

  @os_errors()
  def steps(self) -> list[int]:
    """Returns the steps that have a checkpoint, in order."""
    folders = self._folders()
    return sorted(int(x.name) for x in folders if self._is_whole(x))

  def _folders(self) -> list[epath.Path]:
    """Returns the folders of checkpoints, whole or not."""
    if not self.root.exists():
      return []
    return [path for path in self.root.iterdir() if path.name.isdecimal()]

  def _is_whole(self, folder: epath.Path) -> bool:
    if not self.is_remote:
      return True
    return (folder / COMMITTED).exists()

  @os_errors()
  def clean_up(self) -> None:
    """Makes the folder, and deletes what failed or killed saves left."""
    make_folder(self.root)
    unfinished = [x for x in self._folders() if not self._is_whole(x)]
    unfinished += self.root.glob(f'{self.PROOF}*')
    if not self.is_remote:
      unfinished += self.root.glob('*.orbax-checkpoint-tmp*')
    for path in unfinished:
      with contextlib.suppress(OSError):
        path.rmtree()

  @os_errors()
  def delete_old(self) -> None:
    """Deletes all but the last ones, the best and those of multiples."""
    # A writer of Orbax may go on for a moment after its save has failed.
    self.clean_up()
    steps = self.steps()
    best = min(steps, key=lambda x: (self._loss(x), -x), default=None)
    for step in steps[: -self._max_to_keep]:
      if step != best and not self._is_multiple(step):
        self._delete(self.path(step))

  def _is_multiple(self, step: int) -> bool:
    return self._keep_period is not None and step % self._keep_period == 0

  def _delete(self, folder: epath.Path) -> None:
    # First what makes it whole: one that is half deleted is not read.
    if self.is_remote:
      (folder / COMMITTED).unlink()
    folder.rmtree()

  @os_errors()
  def set_aside(self, step: int) -> str:
    """Moves a damaged checkpoint, and returns where it is then."""
    folder = self.root.parent / f'damaged-{self.root.name}'
    make_folder(folder)
    path = unused_path(folder / str(step))
    move(self.path(step), path)
    return str(path)

  def _loss(self, step: int) -> float:
    """Returns the loss of a checkpoint; infinity if that is damaged."""
    try:
      return float(self.record(step)['loss'])
    except DAMAGE:
      return math.inf
