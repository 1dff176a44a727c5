"""Takes the steps of a run: compiles, resumes, evaluates, saves, stops."""

import contextlib
import functools
import math
import signal
import time
from typing import Any

import jax
import numpy as np

from examples.gpt2.config import Config
from examples.gpt2.data import batches
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices.processes import say
from examples.gpt2.optim.diagnostics import Diagnostics
from examples.gpt2.run import memory
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.run.command import CommandError, format_bytes
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import NotFiniteError, StepLog
from examples.gpt2.run.profile import Profile
from examples.gpt2.run.signals import StopRequest
from examples.gpt2.run.start import initial_params
from examples.gpt2.run.step import Trainer, TrainState


class StoppedError(CommandError):
  """A signal has stopped the run; its number gives the exit status.

  That is 128 more, as shells have it (SIGTERM: 143, SIGUSR1: 138, control-C:
  130).
  """

  def __init__(self, message: str, number: int):
    super().__init__(message, number)
    self.status = 128 + number

  def __str__(self) -> str:
    return str(self.args[0])


class Loop:
  """The steps of a run, from its last checkpoint to its end."""

  def __init__(
    self, trainer: Trainer, config: Config, tokens: Tokens, folder: RunFolder
  ):
    self._trainer = trainer
    self._config = config
    self._folder = folder
    self._make_batch = functools.partial(
      batches.training_batch, tokens.train, config, mesh=trainer.mesh
    )
    self._evaluations = [
      (x, *batches.validation_batch(x.tokens, config, trainer.mesh))
      for x in tokens.evaluations
    ]
    _, self._held_out, _ = self._evaluations[0]
    self._initial_params = initial_params(config, trainer, tokens)
    self._is_saved = True
    self._compile()

  def _compile(self) -> None:
    """Compiles all programs, so that what does not fit fails at the start."""
    start = time.perf_counter()
    trainer = self._trainer
    batch = batches.batch_shape(self._config, trainer.mesh)
    self._take_step = trainer.step.lower(trainer.shapes, batch).compile()
    memory.check(self._take_step, trainer.mesh)
    # Sets of another size need a program of their own.
    by_shape = {
      held_out.shape: held_out for _, held_out, _ in self._evaluations
    }
    self._sequence_losses = {
      shape: trainer.sequence_losses.lower(
        trainer.shapes.params, held_out
      ).compile()
      for shape, held_out in by_shape.items()
    }
    self._diagnostics = Diagnostics(self._config, trainer)
    if self._config.watch_every:
      self._diagnostics.compile(trainer.shapes, batch)
    temporary = self._take_step.memory_analysis().temp_size_in_bytes
    say(
      f'compiled in {time.perf_counter() - start:.0f} s; beside weights and '
      f'moments a step needs {format_bytes(temporary)} on each device'
    )

  def run(self) -> TrainState:
    """Takes the steps that are left, and returns the final state.

    Raises:
      NotFiniteError: If a loss or gradient is not finite and that is to stop
        the run; the last checkpoint is from before.
      StoppedError: If a signal came; a checkpoint has been saved.
      UnsavedError: If three checkpoints in a row could not be saved.
      UsageError: If there are checkpoints but none is sound.
    """
    config, path = self._config, self._folder.path
    with contextlib.ExitStack() as stack:
      self._checkpoints = stack.enter_context(
        Checkpoints(self._folder.checkpoints, config.keep)
      )
      done, self._state = self._restore()
      self._folder.keep_metrics(done)
      self._log = stack.enter_context(
        StepLog(config, self._trainer, self._folder, done)
      )
      self._stop = stack.enter_context(StopRequest())
      if config.profile:
        profile = stack.enter_context(Profile(path / 'profile', done))
      try:
        batch = self._make_batch(done + 1)
        for step in range(done + 1, config.steps + 1):
          if config.profile:
            profile.before(step, self._state)
          batch = self._step(step, batch)
        self._checkpoints.wait()
        self._stop_if_asked(config.steps, self._stop.received())
      except NotFiniteError as error:
        raise self._explained(error) from error
    return self._state

  def _restore(self) -> tuple[int, TrainState]:
    """Returns the number of steps done, and the state after them."""
    params, self._initial_params = self._initial_params, None
    found = self._checkpoints.restore(self._trainer.shapes)
    if found is not None:
      say(f'going on after step {found[0]}, from its checkpoint')
      return found
    state = self._trainer.init()
    return 0, state if params is None else state._replace(params=params)

  def _step(self, step: int, batch: jax.Array) -> jax.Array | None:
    """Takes a step, does what is due after it, and returns the next batch."""
    measured = self._measure(step, batch)
    self._state, metrics = self._take_step(self._state, batch)
    self._taken = step
    # The host makes the next batch, and logs the step before, while the
    # devices take this one.
    start, following = time.perf_counter(), None
    if step < self._config.steps:
      following = self._make_batch(step + 1)
    seconds = time.perf_counter() - start
    self._log.begin_step(step, metrics, measured, seconds)
    self._finish(step)
    return following

  def _finish(self, step: int) -> None:
    """Evaluates, saves and stops where that is due."""
    loss = None
    if self._is_due(step, self._config.eval_every):
      loss = self._evaluate(step)
    received = self._stop.received()
    if received or self._is_due(step, self._config.checkpoint_every):
      self._log.finish_step()
      with self._log.paused():
        self._is_saved = self._save(step, loss)
    self._stop_if_asked(step, received)

  def _is_due(self, step: int, every: int) -> bool:
    return step % every == 0 or step == self._config.steps

  def _measure(self, step: int, batch: jax.Array) -> dict[str, Any]:
    """Returns the diagnostics of a step, nothing if none are due."""
    every = self._config.watch_every
    if not every or not self._is_due(step, every):
      return {}
    self._log.finish_step()
    with self._log.paused():
      return self._diagnostics(self._state, batch)

  def _evaluate(self, step: int) -> float:
    """Logs and returns the mean validation loss, nats a token."""
    losses, terms, weights = {}, [], []
    with self._log.paused():
      for (name, _, weight), held_out, count in self._evaluations:
        measure = self._sequence_losses[held_out.shape]
        measured = np.asarray(measure(self._state.params, held_out))
        losses[name] = float(np.mean(measured.ravel()[:count], dtype=float))
        terms.append(weight * losses[name])
        weights.append(weight)
    loss = math.fsum(terms) / math.fsum(weights)
    evaluation: dict[str, Any] = {'val_loss': loss}
    if len(losses) > 1:
      evaluation['val_losses'] = losses
    if not math.isfinite(loss):
      raise NotFiniteError(f'at step {step} {evaluation}.')
    self._log.finish_step(evaluation)
    return loss

  def _save(self, step: int, val_loss: float | None) -> bool:
    self._log.upload()
    # Lines on the disk first, so that a checkpoint never misses one.
    try:
      self._folder.flush()
    except OSError as error:
      return self._checkpoints.fail(step, str(error))
    return self._checkpoints.save(step, self._state, val_loss)

  def _stop_if_asked(self, step: int, received: int | None) -> None:
    """Raises, with what becomes of the run, if there was a signal."""
    if received is None:
      return
    self._is_saved = self._checkpoints.wait() and self._is_saved
    name, saved = signal.Signals(received).name, 'no checkpoint could be saved'
    if self._is_saved:
      saved = f'a checkpoint of step {step} has been saved'
    raise StoppedError(
      f'{name}: {saved}; the same command goes on from the last one.', received
    )

  def _explained(self, error: NotFiniteError) -> NotFiniteError:
    """Returns the error with the state of attention and what to try."""
    seen = self._diagnostics.attention(self._state.params, self._held_out)
    logits = np.array(seen['max_attention_logit'])
    layer = int(np.argmax(logits))
    has_checkpoint = any(self._folder.checkpoints.glob('[0-9]*'))
    return NotFiniteError(
      f'{error} With the weights after step {self._taken}, the largest '
      f'attention logit on held-out text is {logits[layer]:.1f}, in layer '
      f'{layer + 1} of {len(logits)}. '
      + ('The last checkpoint is sound. ' if has_checkpoint else '')
      + 'Try a smaller --learning-rate or --qk-norm (a new run), or '
      '--not-finite skip (leaves such steps out).'
    )
