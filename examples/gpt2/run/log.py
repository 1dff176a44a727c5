"""Follows a run: metrics.jsonl, TensorBoard, the bar, and the watch for NaN."""

from collections.abc import Iterator
import contextlib
import math
import sys
import time
from typing import Any

import jax
import numpy as np
import tqdm

from examples.gpt2.config import Config, UsageError
from examples.gpt2.devices import hardware
from examples.gpt2.optim.optimizers import make_schedule
from examples.gpt2.run.command import CommandError
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.step import Trainer

MEASURED = ('tokens_per_second', 'mfu', 'waited_share', 'peak_bytes')
"""Metrics that differ between two runs of the same settings."""


class NotFiniteError(CommandError):
  """A loss or gradient is infinite or not a number.

  Attributes:
    step: Step whose loss or gradient it is.
  """

  status = 3

  def __init__(self, message: str, step: int):
    super().__init__(message)
    self.step = step

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (str(self), self.step)


class StepLog:
  """Logs one line a step, and leaves the device no time to wait.

  The metrics of a step are fetched after the next one has been dispatched.
  """

  def __init__(
    self, config: Config, trainer: Trainer, folder: RunFolder, done: int
  ):
    """Opens the log of a run.

    Args:
      config: Resolved settings.
      trainer: Trainer of the run.
      folder: Folder of the run.
      done: Steps that have been done before.
    """
    self._config = config
    self._folder = folder
    self._tokens_per_step = config.batch_size * config.context_length
    self._flops_per_token = hardware.flops_per_token(
      trainer.model_config, trainer.shapes.params
    )
    self._learning_rates = np.asarray(
      jax.vmap(make_schedule(config))(np.arange(config.steps))
    )
    self._progress = tqdm.tqdm(
      total=config.steps,
      initial=done,
      unit='step',
      mininterval=0.5 if sys.stderr.isatty() else 10,
      disable=jax.process_index() > 0,
    )
    self._events = _open_events(config, folder, done)
    self._evaluation: dict[str, Any] = {}
    self._running: tuple[int, dict[str, jax.Array], dict[str, Any]] | None
    self._running = None
    self._since = time.perf_counter()
    self._paused = 0.0

  def __enter__(self) -> 'StepLog':
    return self

  def __exit__(self, *_: object) -> None:
    self._progress.close()
    if self._events is not None:
      self._events.close()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves time out of the speed: of evaluations, saves and watch steps."""
    if self._running is not None:
      jax.block_until_ready(self._running[1])
    start = time.perf_counter()
    yield
    self._paused += time.perf_counter() - start

  def begin_step(
    self,
    step: int,
    metrics: dict[str, jax.Array],
    watched: dict[str, Any],
    waited: float,
  ) -> None:
    """Remembers a step that has been dispatched, and logs the one before it.

    Args:
      step: Number of the step.
      metrics: What the step returned, still on the device.
      watched: What was measured before the step.
      waited: Seconds in which the batch of the next step was made.
    """
    self.finish_step()
    self._running = step, metrics, watched
    self._waited_here = waited

  def finish_step(self, evaluation: dict[str, float] | None = None) -> None:
    """Waits for the dispatched step, if there is one, and logs it.

    Args:
      evaluation: Metrics to log with the step.

    Raises:
      NotFiniteError: If its loss or gradient is infinite or not a number, and
        such steps are not to be left out.
    """
    if self._running is None:
      return
    step, arrays, watched = self._running
    self._running = None
    values = {k: float(x) for k, x in jax.device_get(arrays).items()}
    metrics = self._metrics(step) | values | watched | (evaluation or {})
    is_finite = all(map(math.isfinite, [*values.values()]))
    if not is_finite and self._config.not_finite == 'stop':
      self._folder.flush()
      raise NotFiniteError(self._explain(step, values), step)
    if not is_finite:
      metrics['skipped'] = True
    if evaluation:
      self._evaluation = metrics
    self._folder.log(metrics)
    self._show(metrics)

  def _metrics(self, step: int) -> dict[str, Any]:
    now = time.perf_counter()
    seconds = max(now - self._since - self._paused, 1e-9)
    self._since, self._paused = now, 0.0
    speed = self._tokens_per_step / seconds
    peak = hardware.peak_flops(jax.devices()[0]) * jax.device_count()
    mfu = self._flops_per_token * speed / peak
    return {
      'step': step,
      'tokens': step * self._tokens_per_step,
      'batch_size': self._config.batch_size,
      'learning_rate': float(self._learning_rates[step - 1]),
      'tokens_per_second': speed,
      'mfu': mfu if math.isfinite(mfu) else None,
      'waited_share': min(1.0, self._waited_here / seconds),
      'peak_bytes': hardware.peak_memory(),
    }

  def _explain(self, step: int, values: dict[str, float]) -> str:
    found = ', '.join(f'{k} is {v}' for k, v in values.items())
    before = _describe(self._evaluation) if self._evaluation else 'none'
    return (
      f'at step {step} {found} (evaluation before: {before}). Metrics so far '
      f'are in {self._folder.path}.'
    )

  def _show(self, metrics: dict[str, Any]) -> None:
    if self._events is not None:
      for name, value in _scalars(metrics):
        self._events.add_scalar(name, value, metrics['step'])
    shown = {'loss': f'{metrics["train_loss"]:.3f}'}
    if self._evaluation:
      shown['val'] = f'{self._evaluation["val_loss"]:.3f}'
    shown['tokens/s'] = f'{metrics["tokens_per_second"]:,.0f}'
    if metrics['mfu'] is not None:
      shown['MFU'] = f'{metrics["mfu"]:.1%}'
    self._progress.set_postfix(shown, refresh=False)
    self._progress.update()
    if 'val_loss' in metrics and jax.process_index() == 0:
      self._progress.write(_describe(metrics))


def _open_events(config: Config, folder: RunFolder, done: int) -> Any:
  """Opens TensorBoard's file, if it is wanted."""
  if not config.tensorboard or jax.process_index() > 0:
    return None
  try:
    import tensorboardX  # noqa: PLC0415  Others need not have it.
  except ModuleNotFoundError as error:
    raise UsageError(
      '--tensorboard needs a package: pip install tensorboardX'
    ) from error
  return tensorboardX.SummaryWriter(
    str(folder.path / 'tensorboard'), purge_step=done + 1
  )


def _scalars(value: Any, name: str = '') -> Iterator[tuple[str, float]]:
  """Yields the numbers in nested JSON values, by their paths."""
  if isinstance(value, dict):
    items = list(value.items())
  elif isinstance(value, list):
    items = [(str(i + 1), x) for i, x in enumerate(value)]
  else:
    if isinstance(value, int | float):
      yield name, float(value)
    return
  for key, x in items:
    yield from _scalars(x, f'{name}/{key}' if name else key)


def _describe(metrics: dict[str, Any]) -> str:
  """Returns the evaluation of a step as text."""
  text = f'step {metrics["step"]}: validation loss {metrics["val_loss"]:.4f}'
  if 'max_attention_logit' in metrics:
    logits = ' '.join(f'{x:.1f}' for x in metrics['max_attention_logit'])
    text += f', max attention logit by layer {logits}'
  return text
