"""Logs a run: metrics, dashboards and the progress bar."""

from collections.abc import Iterator
import contextlib
import math
import sys
import time
from typing import Any

import jax
import numpy as np
import tqdm

from examples.gpt2.command import CommandError
from examples.gpt2.config import FittedConfig
from examples.gpt2.devices import hardware
from examples.gpt2.devices.processes import is_process_0, print_once
from examples.gpt2.optim.optimizers import make_schedule
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.metrics import Dashboards
from examples.gpt2.run.step import Trainer

MEASURED = ('tokens_per_second', 'mfu', 'waited_share', 'peak_bytes')
"""Metrics that differ between two runs of the same settings."""
_SECONDS = 30.0
"""How often there is a line, at least, where the output is no terminal."""


class NotFiniteError(CommandError):
  """A loss or gradient is infinite or not a number."""

  status = 3


class StepLog(contextlib.ExitStack):
  """Logs one line a step, and leaves the device no time to wait.

  The metrics of a step are fetched after the next one has been dispatched. As a
  context, it closes what it has opened at its end.
  """

  def __init__(
    self,
    config: FittedConfig,
    trainer: Trainer,
    folder: RunFolder,
    done: int,
    tokens_done: int,
  ):
    """Takes the steps that are done, and their tokens, 0 if not known."""
    super().__init__()
    self._config, self._folder = config, folder
    self._tokens_per_step = config.batch_size * config.context_length
    # A fork may have taken its first steps with another batch size.
    usual = done * self._tokens_per_step
    self._excess = tokens_done - usual if tokens_done else 0
    self._peak_tokens_per_second = (
      hardware.peak_flops(jax.devices()[0])
      * jax.device_count()
      / trainer.flops_per_token
    )
    self._learning_rates = np.asarray(
      jax.vmap(make_schedule(config))(np.arange(config.steps))
    )
    self._dashboards: Dashboards | None = None
    if is_process_0():
      self._dashboards = self.enter_context(
        Dashboards(config, folder.path, folder.read_metrics())
      )
    is_terminal = sys.stderr.isatty()
    self._bar = self.enter_context(
      tqdm.tqdm(
        total=config.steps,
        initial=done,
        unit='step',
        mininterval=0.5 if is_terminal else _SECONDS,
        # A line for each, where the output is no terminal.
        bar_format=None
        if is_terminal
        else '{desc}{n_fmt}/{total_fmt} steps, {remaining} left{postfix}\n',
        disable=not is_process_0(),
      )
    )
    self._evaluation = 'none'
    self._running: Any = None
    self._since = time.perf_counter()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves time out of the speed: evaluations, saves and diagnostics."""
    jax.block_until_ready(self._running)
    start = time.perf_counter()
    yield
    self._since += time.perf_counter() - start

  def begin_step(
    self,
    step: int,
    metrics: dict[str, jax.Array],
    diagnostics: dict[str, Any],
    waited: float,
  ) -> None:
    """Remembers a step that has been dispatched, and logs the one before it.

    ``metrics`` may still be on the device; ``waited`` are the seconds in which
    the batch of the next step was made.
    """
    self.finish_step()
    self._running = step, metrics, diagnostics, waited

  def finish_step(self, evaluation: dict[str, Any] | None = None) -> None:
    """Waits for the dispatched step, if there is one, and logs it.

    Raises ``NotFiniteError`` if its loss or gradient is infinite or not a
    number, and such steps are not to be left out.
    """
    if self._running is None:
      return
    step, arrays, diagnostics, waited = self._running
    self._running = None
    values = {k: x.tolist() for k, x in jax.device_get(arrays).items()}
    metrics = self._measure(step, waited) | values | diagnostics
    metrics |= evaluation or {}
    if not all(map(math.isfinite, values.values())):
      self._stop_unless_skipping(step, values)
      metrics['skipped'] = True
    if evaluation:
      self._evaluation = _describe(metrics)
    if self._dashboards is not None:
      self._folder.metrics.add(metrics)
      self._dashboards.add(metrics)
    self._show(metrics)

  def _measure(self, step: int, waited: float) -> dict[str, Any]:
    now = time.perf_counter()
    seconds = max(now - self._since, 1e-9)
    self._since = now
    speed = self._tokens_per_step / seconds
    mfu = speed / self._peak_tokens_per_second
    return {
      'step': step,
      'tokens': step * self._tokens_per_step + self._excess,
      'batch_size': self._config.batch_size,
      'learning_rate': float(self._learning_rates[step - 1]),
      'tokens_per_second': speed,
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
    shown = {
      'loss': f'{metrics["train_loss"]:.3f}',
      'tokens/s': f'{metrics["tokens_per_second"]:,.0f}',
      'MFU': 'n/a' if metrics['mfu'] is None else f'{metrics["mfu"]:.1%}',
    }
    self._bar.set_postfix(shown, refresh=False)
    self._bar.update()
    if 'val_loss' in metrics and is_process_0():
      # Through the bar, which would be in the way on a terminal.
      write = self._bar.write if sys.stderr.isatty() else print_once
      write(_describe(metrics))


def _describe(metrics: dict[str, Any]) -> str:
  """Returns the evaluation of a step as text."""
  text = f'step {metrics["step"]}: validation loss {metrics["val_loss"]:.4f}'
  for name, loss in metrics.get('val_losses', {}).items():
    text += f', {name} {loss:.4f}'
  if 'max_attention_logit' in metrics:
    logits = ' '.join(f'{x:.1f}' for x in metrics['max_attention_logit'])
    text += f', max attention logit by layer {logits}'
  return text
