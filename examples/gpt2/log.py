"""The log of a run: a line for each step, and what takes its numbers."""

from collections.abc import Callable, Iterator
import contextlib
import datetime
import math
from pathlib import Path
import tempfile
import time
from typing import Any

import jax

from examples.gpt2 import hardware
from examples.gpt2.command import CommandError, UsageError, os_errors
from examples.gpt2.config import Config, batch_sizes
from examples.gpt2.processes import is_process_0, on_process_0, print_once
from examples.gpt2.run_folder import METRICS, RunFolder, as_line
from examples.gpt2.schedules import learning_rates
from examples.gpt2.step import Trainer
from examples.gpt2.storage import is_remote, write_whole

MEASURED = ('tokens_per_second', 'mfu', 'waited_share', 'peak_bytes')
"""Metrics that differ between two runs of the same settings."""
_MUST_BE_FINITE = ('train_loss', 'gradient_norm')
"""Metrics that end a run, or have its step left out, unless they are finite."""
_LINE_SECONDS = 10.0
"""How long there is no line on the screen, at the most."""


class NotFiniteError(CommandError):
  """A loss or gradient is infinite or not a number."""

  status = 3

  def __str__(self) -> str:
    return (
      f'{self.args[0]} The last checkpoint is sound. Try a smaller '
      '--learning-rate or --qk-norm (a new run), or --not-finite skip (leaves '
      'such steps out).'
    )


class StepLog(contextlib.ExitStack):
  """Logs one line a step, and leaves the device no time to wait.

  The metrics of a step are fetched after the next one has been dispatched. As a
  context, it closes what it has opened at its end.

  It is made before the programs are compiled, since W&B may refuse the run, and
  ``begin`` is called before the first step.
  """

  def __init__(self, config: Config, trainer: Trainer, folder: RunFolder):
    super().__init__()
    self._config, self._folder = config, folder
    self._sizes = batch_sizes(config)
    self._peak_tokens_per_second = (
      hardware.peak_flops(jax.devices()[0])
      * jax.device_count()
      / trainer.flops_per_token
    )
    self._rates = learning_rates(config)
    self._writers: list[Callable[[dict[str, Any]], None]] = []
    on_process_0(self._open_wandb)  # Other processes may lack the flag.
    self._shown = -math.inf  # When a step was last shown.
    self._evaluation = 'none'
    self._running: Any = None

  def _open_wandb(self) -> None:
    project = self._config.wandb
    if project is not None:
      self._writers.append(_open_wandb(self, project, self._folder))

  def begin(self, done: int, tokens_done: int) -> None:
    """Takes the steps that are done, and their tokens, 0 if not known."""
    length = self._config.model.context_length
    # A fork may have taken its first steps with another batch size.
    self._tokens = tokens_done or int(self._sizes[:done].sum()) * length
    if is_process_0():
      self._open_files(done)
    self._since = time.perf_counter()

  def _open_files(self, done: int) -> None:
    path = self._folder.path
    # W&B gets the lines that it lacks.
    for write in self._writers:
      for metrics in self._folder.read_metrics():
        write(metrics)
    self._file = _MetricsFile(self.enter_context, path / METRICS)
    self._writers.insert(0, self._file.add)
    if self._config.tensorboard:
      self._writers.append(_open_board(self, path, done))

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves time out of the speed: evaluations, saves and diagnostics."""
    jax.block_until_ready(self._running)
    start = time.perf_counter()
    yield
    self._since += time.perf_counter() - start

  def begin_step(
    self, step: int, metrics: dict[str, Any], waited: float
  ) -> None:
    """Remembers a step that has been dispatched, and logs the one before it.

    Args:
      step: Its number.
      metrics: Numbers by name, and lists, arrays and dictionaries of them. They
        may still be on the device.
      waited: Seconds in which the batch of the next step was made.
    """
    self.finish_step()
    self._running = step, metrics, waited

  def finish_step(self, evaluation: dict[str, Any] | None = None) -> None:
    """Waits for the dispatched step, if there is one, and logs it.

    Raises ``NotFiniteError`` if a validation loss is infinite or not a number;
    or if a loss or gradient is, and such steps are not to be left out.
    """
    if self._running is None:
      return
    step, arrays, waited = self._running
    self._running = None
    found = as_json(arrays)
    metrics = self._measure(step, waited) | found | (evaluation or {})
    checked = {name: found[name] for name in _MUST_BE_FINITE}
    if not all(map(math.isfinite, checked.values())):
      self._stop_unless_skipping(step, checked)
      metrics['skipped'] = True
    if evaluation:
      self._evaluation = _describe(metrics)
    for write in self._writers:
      write(metrics)
    self._show(metrics)
    if evaluation and not math.isfinite(evaluation['val_loss']):
      raise NotFiniteError(
        f'at step {step} the validation loss is {evaluation["val_loss"]}.'
      )

  def flush(self) -> None:
    """Makes sure that a store has all lines."""
    # Others have no such file.
    on_process_0(lambda: self._file.flush())  # noqa: PLW0108

  def _measure(self, step: int, waited: float) -> dict[str, Any]:
    now = time.perf_counter()
    seconds = max(now - self._since, 1e-9)
    self._since = now
    size = int(self._sizes[step - 1])
    tokens = size * self._config.model.context_length
    self._tokens += tokens
    mfu = tokens / seconds / self._peak_tokens_per_second
    return {
      'step': step,
      'tokens': self._tokens,
      'batch_size': size,
      'learning_rate': float(self._rates[step - 1]),
      'tokens_per_second': tokens / seconds,
      'mfu': mfu if math.isfinite(mfu) else None,
      'waited_share': min(1.0, waited / seconds),
      'peak_bytes': hardware.peak_memory(),
    }

  def _stop_unless_skipping(self, step: int, values: dict[str, float]) -> None:
    if self._config.not_finite == 'skip':
      return
    found = ', '.join(f'{k} is {v}' for k, v in values.items())
    raise NotFiniteError(
      f'at step {step} {found}; the step changed no weights (evaluation before:'
      f' {self._evaluation}). Metrics so far are in {self._folder.path}.'
    )

  def _show(self, metrics: dict[str, Any]) -> None:
    if 'val_loss' in metrics:
      print_once(self._evaluation)
    step, speed = metrics['step'], metrics['tokens_per_second']
    if self._since < self._shown + _LINE_SECONDS:
      return
    self._shown = self._since
    tokens = int(self._sizes[step:].sum()) * self._config.model.context_length
    left = datetime.timedelta(seconds=round(tokens / speed))
    mfu = 'n/a' if metrics['mfu'] is None else f'{metrics["mfu"]:.1%}'
    print_once(
      f'step {step}/{self._config.steps}: loss {metrics["train_loss"]:.3f}, '
      f'{speed:,.0f} tokens/s, MFU {mfu}, {left} left'
    )


def as_json(metrics: Any) -> Any:
  """Returns numbers and arrays, perhaps on a device, as JSON values."""
  return jax.tree.map(
    lambda x: x.tolist() if hasattr(x, 'tolist') else x, jax.device_get(metrics)
  )


class _MetricsFile:
  """The file of metrics; in a store, which does not append, as of ``flush``."""

  def __init__(self, enter: Callable[[Any], Any], path: Path):
    self._path, self._local = path, path
    if is_remote(path):
      self._local = Path(enter(tempfile.TemporaryDirectory()), path.name)
      self._local.write_bytes(path.read_bytes() if path.exists() else b'')

  def add(self, metrics: dict[str, Any]) -> None:
    with self._local.open('a') as file:
      file.write(as_line(metrics))

  @os_errors()
  def flush(self) -> None:
    if self._local != self._path:
      write_whole(self._path, self._local.read_bytes())


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
  """Returns each number of a step by its path, such as 'layers/clipped/1'."""
  found = {}
  for path, value in jax.tree.leaves_with_path(metrics):
    # Layers count from 1.
    keys = [x.key if hasattr(x, 'key') else str(x.idx + 1) for x in path]
    if isinstance(value, (int, float)):
      found['/'.join(keys)] = float(value)
  return found


def _open_board(
  stack: contextlib.ExitStack, folder: Path, done: int
) -> Callable[[dict[str, Any]], None]:
  """Opens TensorBoard."""
  import tensorboardX  # noqa: PLC0415  Optional.

  board = stack.enter_context(
    tensorboardX.SummaryWriter(str(folder / 'tensorboard'), purge_step=done + 1)
  )

  def write(metrics: dict[str, Any]) -> None:
    for name, value in scalars(metrics).items():
      board.add_scalar(name, value, metrics['step'])

  return write


def _open_wandb(
  stack: contextlib.ExitStack, project: str, folder: RunFolder
) -> Callable[[dict[str, Any]], None]:
  """Opens a new run at Weights & Biases, or that of the folder.

  W&B takes each step once: steps that are taken again have the same numbers and
  are left out. Raises ``UsageError`` if W&B does not know who it is to log in
  as, or refuses the project.
  """
  import wandb  # noqa: PLC0415  Optional.

  id_file = folder.path / 'wandb_id.txt'
  is_new = not id_file.exists()
  try:
    run = wandb.init(
      project=project,
      id=None if is_new else id_file.read_text(),
      name=folder.path.name if is_new else None,
      resume='allow',
      dir=None if is_remote(folder.path) else folder.path,
      config=folder.read_settings(),
      allow_val_change=True,
    )
  except (wandb.errors.Error, ValueError) as error:
    raise UsageError(
      f'--wandb {project}: {error} (Without an account or a network, set '
      'WANDB_MODE=offline.)'
    ) from error
  write_whole(id_file, run.id.encode())
  stack.callback(run.finish)

  def write(metrics: dict[str, Any]) -> None:
    if metrics['step'] >= run.starting_step:
      run.log(scalars(metrics), step=metrics['step'], commit=True)

  return write


def _describe(metrics: dict[str, Any]) -> str:
  """Returns the evaluation of a step as text."""
  text = f'step {metrics["step"]}: validation loss {metrics["val_loss"]:.4f}'
  for name, loss in metrics.get('val_losses', {}).items():
    text += f', {name} {loss:.4f}'
  if 'max_attention_logit' in metrics:
    logits = ' '.join(f'{x:.1f}' for x in metrics['max_attention_logit'])
    text += f', max attention logit by layer {logits}'
  return text
