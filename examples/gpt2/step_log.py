"""Follows a run: metrics.jsonl, the progress bar, and the watch for NaN."""

from collections.abc import Callable
import math
import sys
import time
from typing import Any

import jax
import numpy as np
import tqdm

from examples.gpt2.config import Config
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.training import make_schedule


class NotFiniteError(ArithmeticError):
  """The loss is infinite or not a number."""


class StepLog:
  """Logs one line a step, and leaves the device no time to wait.

  The loss of a step is fetched after the next one has been dispatched.
  """

  def __init__(self, config: Config, folder: RunFolder):
    self._folder = folder
    self._tokens_per_step = config.batch_size * config.context_length
    self._learning_rates = np.asarray(
      jax.vmap(make_schedule(config))(np.arange(config.steps))
    )
    self._progress = tqdm.tqdm(
      total=config.steps,
      unit='step',
      mininterval=0.5 if sys.stderr.isatty() else 10,
    )
    self._evaluation: dict[str, Any] = {}
    self._running: tuple[int, jax.Array] | None = None
    self._since = time.perf_counter()

  def __enter__(self) -> 'StepLog':
    return self

  def __exit__(self, *_: object) -> None:
    self._progress.close()

  def begin_step(self, step: int, loss: jax.Array) -> None:
    """Remembers a step that has been dispatched."""
    self._running = step, loss

  def finish_step(
    self, evaluate: Callable[[], dict[str, Any]] | None = None
  ) -> None:
    """Waits for the dispatched step, if there is one, and logs it.

    Args:
      evaluate: Function whose metrics join those of the step; its time does
        not count.

    Raises:
      NotFiniteError: If a loss is infinite or not a number.
    """
    if self._running is None:
      return
    step, loss = self._running
    self._running = None
    metrics = self._metrics(step, float(loss))
    if evaluate is not None:
      metrics |= evaluate()
      self._since = time.perf_counter()
    self._check_finite(metrics)
    if evaluate is not None:
      self._evaluation = metrics
    self._folder.log(metrics)
    self._show(metrics)

  def _metrics(self, step: int, loss: float) -> dict[str, Any]:
    now = time.perf_counter()
    seconds, self._since = now - self._since, now
    return {
      'step': step,
      'tokens': step * self._tokens_per_step,
      'train_loss': loss,
      'learning_rate': float(self._learning_rates[step - 1]),
      'tokens_per_second': self._tokens_per_step / seconds,
    }

  def _check_finite(self, metrics: dict[str, Any]) -> None:
    for name in ('train_loss', 'val_loss'):
      if not math.isfinite(metrics.get(name, 0.0)):
        before = _describe(self._evaluation) if self._evaluation else 'none'
        raise NotFiniteError(
          f'{name} is {metrics[name]} at step {metrics["step"]} (evaluation '
          f'before: {before}). Metrics so far are in {self._folder.path}; no '
          'weights were written. Try a smaller --learning-rate.'
        )

  def _show(self, metrics: dict[str, Any]) -> None:
    shown = {'loss': f'{metrics["train_loss"]:.3f}'}
    if self._evaluation:
      shown['val'] = f'{self._evaluation["val_loss"]:.3f}'
    shown['tokens/s'] = f'{metrics["tokens_per_second"]:,.0f}'
    self._progress.set_postfix(shown, refresh=False)
    self._progress.update()
    if 'val_loss' in metrics:
      self._progress.write(_describe(metrics))


def _describe(metrics: dict[str, Any]) -> str:
  """Returns the evaluation of a step as text."""
  logits = ' '.join(f'{x:.1f}' for x in metrics['max_attention_logit'])
  return (
    f'step {metrics["step"]}: validation loss {metrics["val_loss"]:.4f}, '
    f'max attention logit by layer {logits}'
  )
