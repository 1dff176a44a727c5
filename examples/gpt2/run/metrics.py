"""The metrics of a run: a line of JSON for each step, TensorBoard and W&B."""

import contextlib
import json
from pathlib import Path
from typing import Any

import jax

from examples.gpt2.config import RunConfig, UsageError
from examples.gpt2.storage import is_remote, os_errors, write_whole


class MetricsFile:
  """The file of metrics; in a store, which does not append, as of ``flush``."""

  def __init__(self, path: Path):
    self._path = path
    self._lines: list[str] = []

  def replace(self, lines: list[dict[str, Any]]) -> None:
    """Makes these the lines of the file."""
    self._lines = [_line(x) for x in lines]
    self._write()

  def add(self, metrics: dict[str, Any]) -> None:
    """Adds the line of a step."""
    line = _line(metrics)
    self._lines.append(line)
    if not is_remote(self._path):
      with self._path.open('a') as file:
        file.write(line)

  def flush(self) -> None:
    """Makes sure that a store has all lines."""
    if is_remote(self._path):
      self._write()

  @os_errors()
  def _write(self) -> None:
    write_whole(self._path, ''.join(self._lines).encode())


def _line(metrics: dict[str, Any]) -> str:
  # JSON has no numbers that are not finite: they become null.
  finite = json.loads(json.dumps(metrics), parse_constant=lambda _: None)
  return json.dumps(finite) + '\n'


def read_metrics(path: Path) -> list[dict[str, Any]]:
  """Returns the lines of a file of metrics, but for a torn one; [] if none."""
  try:
    with os_errors():
      text = path.read_bytes().decode(errors='replace')
  except FileNotFoundError:
    return []
  lines = []
  for line in text.splitlines():
    with contextlib.suppress(ValueError):
      lines.append(json.loads(line))
  return [x for x in lines if isinstance(x, dict) and 'step' in x]


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
  """Returns each number of a step by its path, such as 'layers/clipped/1'."""
  found = {}
  for path, value in jax.tree.leaves_with_path(metrics):
    # Layers count from 1.
    keys = [x.key if hasattr(x, 'key') else str(x.idx + 1) for x in path]
    found['/'.join(keys)] = float(value)
  return found


class Dashboards(contextlib.ExitStack):
  """TensorBoard and Weights & Biases, where a run asks for them.

  A run that resumes goes on with its run at W&B, whose id is in the folder. W&B
  takes each step once: steps that are taken again have the same numbers and are
  left out, and those that it lacks are sent first.
  """

  def __init__(
    self,
    config: RunConfig,
    folder: Path,
    lines: list[dict[str, Any]],
  ):
    """Opens them.

    Args:
      config: Settings of the run.
      folder: Folder of the run.
      lines: Metrics of the steps that are done.

    Raises:
      UsageError: If W&B does not know who it is to log in as.
    """
    super().__init__()
    self._board = self._wandb = None
    if config.tensorboard:
      self._board = self.enter_context(_open_board(folder, len(lines)))
    if config.wandb is not None:
      self._wandb = _open_wandb(config.wandb, folder)
      self.callback(self._wandb.finish)
      for metrics in lines:
        self._send(metrics)

  def add(self, metrics: dict[str, Any]) -> None:
    """Logs each number of a step's metrics, by its path."""
    if self._board is not None:
      for name, value in scalars(metrics).items():
        self._board.add_scalar(name, value, metrics['step'])
    if self._wandb is not None:
      self._send(metrics)

  def _send(self, metrics: dict[str, Any]) -> None:
    if metrics['step'] >= self._wandb.starting_step:
      self._wandb.log(scalars(metrics), step=metrics['step'], commit=True)


def _open_board(folder: Path, done: int) -> Any:
  import tensorboardX  # noqa: PLC0415  Optional.

  if is_remote(folder):
    raise UsageError(f'--tensorboard needs --out-dir on a disk, got {folder}.')
  return tensorboardX.SummaryWriter(
    str(folder / 'tensorboard'), purge_step=done + 1
  )


def _open_wandb(project: str, folder: Path) -> Any:
  """Returns the run at W&B: a new one, or that of the folder."""
  import wandb  # noqa: PLC0415  Optional.

  id_file = folder / 'wandb_id.txt'
  is_new = not id_file.exists()
  try:
    run = wandb.init(
      project=project,
      id=None if is_new else id_file.read_text(),
      name=folder.name if is_new else None,
      resume='allow',
      dir=None if is_remote(folder) else folder,
      config=json.loads((folder / 'config.json').read_text()),
      allow_val_change=True,
    )
  except (wandb.errors.Error, ValueError) as error:
    raise UsageError(
      f'--wandb {project}: {error} (Without an account or a network, set '
      'WANDB_MODE=offline.)'
    ) from error
  write_whole(id_file, run.id.encode())
  return run
