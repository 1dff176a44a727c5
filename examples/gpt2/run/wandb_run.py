"""Numbers for Weights & Biases, which a run can do without."""

from pathlib import Path
from typing import Any
import warnings

from examples.gpt2.config import UsageError
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.metrics import scalars
from examples.gpt2.storage import Mirror, read_bytes, write_whole

FINISH_SECONDS = 30.0
"""How long the end of a run waits for what has not been sent."""


def check_login(project: str) -> None:
  """Raises ``UsageError`` if wandb does not know who it is to log in as.

  It asks no server: one that is away stops no run.
  """
  import wandb  # noqa: PLC0415  Optional.

  try:
    wandb.Settings(project=project)
    wandb.login(verify=False)
  except (wandb.errors.Error, ValueError) as error:
    raise UsageError(
      f'--wandb {project}: {error} (Without an account or a network, set '
      'WANDB_MODE=offline.)'
    ) from error


class WandbRun:
  """Logs the metrics of steps; warns of the first error, and then stops.

  A run that resumes goes on with its run at W&B, whose id is kept in the
  folder. W&B takes each step once and no step before its last: steps that are
  taken again, since they came after the checkpoint, have the same numbers and
  are left out. Steps up to the checkpoint that it lacks, because they were not
  sent before a kill or a part of the run was without it, are sent first.
  """

  def __init__(self, project: str, folder: RunFolder):
    """Opens the run, and sends the steps in the folder that it lacks."""
    self._run: Any = None
    self._mirror = Mirror(folder.path)
    try:
      self._run = _open(project, folder, self._mirror.folder)
      for metrics in folder.read_metrics():
        self.add(metrics)
    except Exception as error:  # Whatever it is: training goes on.
      self._give_up(error)

  def __enter__(self) -> 'WandbRun':
    return self

  def __exit__(self, kind: object, *_: object) -> None:
    if self._run is not None:
      try:
        self._run.finish(exit_code=int(kind is not None))
      except Exception as error:
        self._give_up(error)
    self.upload()

  def upload(self) -> None:
    """Copies wandb's files to a store, if the run is in one."""
    try:
      self._mirror.upload()
    except OSError as error:
      self._give_up(error)

  def add(self, metrics: dict[str, Any]) -> None:
    """Logs each number of a step's metrics by its path, unless it is there."""
    if self._run is None or metrics['step'] < self._run.starting_step:
      return
    try:
      self._run.log(scalars(metrics), step=metrics['step'], commit=True)
    except Exception as error:
      self._give_up(error)

  def _give_up(self, error: Exception) -> None:
    self._run = None
    warnings.warn(
      f'wandb gets no more numbers: {error} (The command that resumes this run '
      'sends what is missing.)',
      stacklevel=2,
    )


def _open(project: str, folder: RunFolder, files: Path) -> Any:
  """Returns the run at W&B: a new one, or that of the folder."""
  import wandb  # noqa: PLC0415  Optional.

  id_file = folder.path / 'wandb' / 'run_id.txt'
  is_new = not id_file.exists()
  settings = folder.read_settings()
  run = wandb.init(
    project=project,
    id=None if is_new else read_bytes(id_file).decode(),
    name=folder.path.name if is_new else None,
    resume='allow',
    dir=files,
    config=settings.pop('config') | settings,
    allow_val_change=True,
    settings=wandb.Settings(
      finish_timeout=FINISH_SECONDS, finish_timeout_raises=True
    ),
  )
  write_whole(id_file, run.id.encode())
  return run
