"""Numbers for Weights & Biases, which a run can do without."""

from pathlib import Path
from typing import Any

from examples.gpt2.config import UsageError
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.metrics import scalars
from examples.gpt2.run.optional import OptionalPart
from examples.gpt2.storage import read_bytes, write_whole

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


class WandbRun(OptionalPart):
  """Logs the metrics of steps.

  A run that resumes goes on with its run at W&B, whose id is kept in the
  folder. W&B takes each step once and no step before its last: steps that are
  taken again, since they came after the checkpoint, have the same numbers and
  are left out. Steps up to the checkpoint that it lacks, because they were not
  sent before a kill or a part of the run was without it, are sent first.
  """

  def __init__(self, project: str, folder: RunFolder):
    """Opens the run, and sends the steps in the folder that it lacks."""
    super().__init__(
      folder.path,
      'wandb gets no more numbers: {} (The command that resumes this run sends '
      'what is missing.)',
    )
    self._run: Any = None
    self.attempt(self._start, project, folder)

  def _start(self, project: str, folder: RunFolder) -> None:
    self._run = _open(project, folder, self.mirror.folder)
    for metrics in folder.read_metrics():
      self._log(metrics)

  def __exit__(self, kind: object, *_: object) -> None:
    self.attempt(lambda: self._run.finish(exit_code=int(kind is not None)))
    self.upload()

  def add(self, metrics: dict[str, Any]) -> None:
    """Logs each number of a step's metrics by its path, unless it is there."""
    self.attempt(self._log, metrics)

  def _log(self, metrics: dict[str, Any]) -> None:
    if metrics['step'] >= self._run.starting_step:
      self._run.log(scalars(metrics), step=metrics['step'], commit=True)


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
