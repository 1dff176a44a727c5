"""The folder of a run's checkpoints: which there are, and which stay."""

import json
import math
import os
from pathlib import Path
import shutil
from typing import Any

from examples.gpt2.run.folder import unused_path

# What Orbax raises for files that are truncated, missing or garbled.
DAMAGE = (
  AttributeError, FileNotFoundError, KeyError, TypeError, ValueError,
)  # fmt: skip


class CheckpointFolder:
  """Checkpoints on disk, each a folder that is named by its step.

  All methods but ``path`` and ``record`` are for process 0.
  """

  def __init__(self, root: Path, keep: int):
    self.root = root.absolute()
    self._keep = keep

  def path(self, step: int) -> Path:
    """Returns the folder of a checkpoint."""
    return self.root / str(step)

  def record(self, step: int) -> dict[str, Any]:
    """Returns loss, types and checksums of a checkpoint."""
    return json.loads((self.path(step) / 'record' / 'metadata').read_bytes())

  def steps(self) -> list[int]:
    """Returns the steps that have a checkpoint, in order."""
    names = [path.name for path in self.root.iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())

  def clean_up(self) -> None:
    """Makes the folder, and deletes what failed or killed saves left."""
    self.root.mkdir(parents=True, exist_ok=True)
    for unfinished in self.root.glob('*.orbax-checkpoint-tmp*'):
      shutil.rmtree(unfinished, ignore_errors=True)

  def delete_old(self) -> None:
    """Deletes all checkpoints but the last ones and the best."""
    # A writer of Orbax may go on for a moment after its save has failed.
    self.clean_up()
    steps = self.steps()
    best = min(steps, key=lambda x: (self._loss(x), -x), default=None)
    for step in steps[: -self._keep]:
      if step != best:
        shutil.rmtree(self.path(step))

  def set_aside(self, step: int) -> str:
    """Moves a damaged checkpoint, and returns where it is then."""
    folder = self.root.with_name(f'damaged-{self.root.name}')
    folder.mkdir(exist_ok=True)
    path = unused_path(folder / str(step))
    os.rename(self.path(step), path)
    return str(path)

  def _loss(self, step: int) -> float:
    """Returns the loss of a checkpoint; infinity if that is damaged."""
    try:
      return float(self.record(step)['loss'])
    except DAMAGE:
      return math.inf
