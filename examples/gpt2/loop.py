"""The steps of a run: compiles, resumes, evaluates, saves, stops."""

from collections.abc import Iterator, Sequence
import dataclasses
import math
import signal
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from examples.gpt2 import data as data_module, memory
from examples.gpt2.checkpoints import Checkpoints
from examples.gpt2.command import CommandError, format_bytes
from examples.gpt2.config import Config
from examples.gpt2.data import Data, batch_shape, evaluation_batch
from examples.gpt2.diagnostics import Diagnostics
from examples.gpt2.processes import (
  StopRequest,
  is_process_0,
  on_process_0,
  print_once,
  wait_for_all,
)
from examples.gpt2.run import NotFiniteError, RunFolder, StepLog
from examples.gpt2.start import initial_state
from examples.gpt2.step import Trainer, TrainState

_TRACED = (10, 15)
"""First and last step of a trace, after those that were done before."""
_COMPILING_SECONDS = 20.0
"""How often there is a line while programs are compiled."""


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


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
  """Returns a mean of values, of which those of weight 0 may be infinite."""
  terms = [x * y for x, y in zip(values, weights, strict=True) if y]
  return math.fsum(terms) / math.fsum(weights)


class _Programs(NamedTuple):
  """Compiled programs of a run."""

  step: Any  # As Trainer.step.
  sequence_losses: dict[tuple[int, ...], Any]  # By the shape of the tokens.
  diagnostics: Diagnostics


class _Evaluation(NamedTuple):
  """A set to evaluate on."""

  name: str
  weight: float  # Of its loss in the validation loss.
  tokens_ABT: jax.Array
  num_sequences: int  # Those after repeat others.


def run(
  trainer: Trainer,
  config: Config,
  data: Data,
  folder: RunFolder,
  stop: StopRequest,
) -> TrainState:
  """Takes the steps of a run that are left, and returns the final state.

  They go on from the newest sound checkpoint. Without one, the first state is
  saved before the first step, which proves the folder for all processes. All
  programs are compiled first, so that what does not fit fails at the start.

  Raises:
    NotFiniteError: If a loss or gradient is not finite and that is to stop
      the run; the last checkpoint is from before.
    StoppedError: If a signal came; a checkpoint has been saved.
    UnsavedError: If a checkpoint could not be saved.
    UsageError: If there are checkpoints but none is sound, or if what the run
      is to start from cannot be used.
  """
  evaluations = [
    _Evaluation(
      x.name,
      x.weight,
      *evaluation_batch(x.sequences, config, trainer.mesh),
    )
    for x in data.evaluations
  ]
  with Checkpoints(
    folder.checkpoints, config.max_to_keep, config.keep_period
  ) as checkpoints:
    programs = _compile(trainer, config, evaluations)
    done, state = _first(trainer, config, checkpoints)
    tokens_done = folder.keep_metrics(done, config.fork_from)
    batches = data_module.batches(
      data.sequences,
      batch_shape(config, trainer.mesh),
      done * config.batch_size,
    )
    with StepLog(config, trainer, folder, done, tokens_done) as log:
      steps = _Steps(
        config=config,
        programs=programs,
        evaluations=evaluations,
        batches=batches,
        folder=folder,
        checkpoints=checkpoints,
        log=log,
        stop=stop,
        state=state,
        taken=done,
      )
      return steps.take()


def _first(
  trainer: Trainer, config: Config, checkpoints: Checkpoints
) -> tuple[int, TrainState]:
  """Returns the steps that are done, and the state after them."""
  found = checkpoints.restore(trainer.shapes)
  if found is not None:
    print_once(f'going on after step {found[0]}, from its checkpoint')
    return found
  state = initial_state(config, trainer)
  done = int(state.step)
  checkpoints.save(done, state)
  checkpoints.wait()
  return done, state


def _compile(
  trainer: Trainer, config: Config, evaluations: Sequence[_Evaluation]
) -> _Programs:
  start = time.perf_counter()
  ended = threading.Event()
  threading.Thread(target=_say_compiling, args=(ended,), daemon=True).start()
  try:
    programs, temporary = _compile_all(trainer, config, evaluations)
  finally:
    ended.set()
  wait_for_all('compiled')
  print_once(
    f'compiled in {time.perf_counter() - start:.0f} s; beside weights and '
    f'moments a step needs {format_bytes(temporary)} on each device'
  )
  return programs


def _say_compiling(ended: threading.Event) -> None:
  """Prints a line from time to time, since compilation may take minutes."""
  start = time.perf_counter()
  while not ended.wait(_COMPILING_SECONDS):
    if is_process_0():
      seconds = time.perf_counter() - start
      print(f'compiling the step for {seconds:.0f} s', flush=True)


def _compile_all(
  trainer: Trainer, config: Config, evaluations: Sequence[_Evaluation]
) -> tuple[_Programs, int]:
  """Returns the programs, and the temporary bytes of a step on a device."""
  batch = batch_shape(config, trainer.mesh)
  step = trainer.step.lower(trainer.shapes, batch).compile()
  memory.check(step, trainer.mesh)
  # Sets of another size need a program of their own.
  by_shape = {x.tokens_ABT.shape: x.tokens_ABT for x in evaluations}
  sequence_losses = {
    shape: trainer.sequence_losses.lower(trainer.shapes.params, x).compile()
    for shape, x in by_shape.items()
  }
  for program in sequence_losses.values():
    memory.check(program, trainer.mesh, 'an evaluation')
  diagnostics = Diagnostics(config, trainer)
  if config.diagnostics_every:
    memory.check(
      diagnostics.compile(trainer.shapes, batch),
      trainer.mesh,
      'a step with diagnostics (none: --diagnostics-every 0)',
    )
  temporary = step.memory_analysis().temp_size_in_bytes
  return _Programs(step, sequence_losses, diagnostics), temporary


@dataclasses.dataclass
class _Steps:
  """The steps of a run, and what is due after each."""

  config: Config
  programs: _Programs
  evaluations: Sequence[_Evaluation]
  batches: Iterator[jax.Array]
  folder: RunFolder
  checkpoints: Checkpoints
  log: StepLog
  stop: StopRequest
  state: TrainState
  taken: int  # Steps.

  def take(self) -> TrainState:
    """Takes the steps that are left, and returns the last state."""
    done = self.taken
    self._stop_if_asked(done, self.stop.received())
    try:
      if done < self.config.steps:
        self._say_what_is_left(done)
      batch: Any = next(self.batches)
      for step in range(done + 1, self.config.steps + 1):
        if self.config.profile:
          self._trace(step - done)
        batch = self._step(step, batch)
      self.checkpoints.wait()
    except NotFiniteError as error:
      raise self._explained(error) from error
    return self.state

  def _trace(self, number: int) -> None:
    """Starts or ends a trace before a step, by its number in this process."""
    if number == _TRACED[0]:
      jax.profiler.start_trace(str(self.folder.path / 'profile'))
    elif number == _TRACED[1] + 1:
      # A trace that ends while a step is under way can crash the process.
      jax.block_until_ready(self.state)
      jax.profiler.stop_trace()

  def _step(self, step: int, batch: jax.Array) -> jax.Array | None:
    """Takes a step, does what is due after it, and returns the next batch."""
    measured = self._measure(step, batch)
    self.state, metrics = self.programs.step(self.state, batch)
    self.taken = step
    # The host makes the next batch, and logs the step before, while the
    # devices take this one.
    start, following = time.perf_counter(), None
    if step < self.config.steps:
      following = next(self.batches)
    seconds = time.perf_counter() - start
    self.log.begin_step(step, metrics, measured, seconds)
    self._finish(step)
    return following

  def _finish(self, step: int) -> None:
    """Evaluates, saves and stops where that is due."""
    loss = None
    if self._is_due(step, self.config.eval_every):
      loss = self._evaluate(step)
    received = self.stop.received()
    if received or self._is_save_due(step):
      self.log.finish_step()
      with self.log.paused():
        # Lines first, so that a checkpoint never misses one.
        on_process_0(self.folder.metrics.flush)
        self.checkpoints.save(step, self.state, loss)
    self._stop_if_asked(step, received)

  def _is_due(self, step: int, every: int) -> bool:
    return step % every == 0 or step == self.config.steps

  def _is_save_due(self, step: int) -> bool:
    period = self.config.keep_period
    is_kept = period is not None and step % period == 0
    return is_kept or self._is_due(step, self.config.checkpoint_every)

  def _measure(self, step: int, batch: jax.Array) -> dict[str, Any]:
    """Returns the diagnostics of a step, nothing if none are due."""
    every = self.config.diagnostics_every
    if not every or not self._is_due(step, every):
      return {}
    self.log.finish_step()
    with self.log.paused():
      return self.programs.diagnostics(self.state, batch)

  def _evaluate(self, step: int) -> float:
    """Logs and returns the mean validation loss, nats a token."""
    with self.log.paused():
      losses, loss = self._validation_losses()
    evaluation: dict[str, Any] = {'val_loss': loss}
    if len(losses) > 1:
      evaluation['val_losses'] = losses
    self.log.finish_step(evaluation)
    if not math.isfinite(loss):
      raise NotFiniteError(f'at step {step} the validation loss is {loss}.')
    return loss

  def _validation_losses(self) -> tuple[dict[str, float], float]:
    """Returns the loss of each set, and their mean, nats a token."""
    losses, weights = {}, []
    for name, weight, held_out, count in self.evaluations:
      measure = self.programs.sequence_losses[held_out.shape]
      measured = np.asarray(measure(self.state.params, held_out))
      losses[name] = float(np.mean(measured.ravel()[:count], dtype=float))
      weights.append(weight)
    return losses, weighted_mean(list(losses.values()), weights)

  def _say_what_is_left(self, done: int) -> None:
    """Prints the validation loss so far, and about how long the run takes."""
    start = time.perf_counter()
    with self.log.paused():
      _, loss = self._validation_losses()
    evaluation = time.perf_counter() - start
    sequences = sum(math.prod(x.tokens_ABT.shape[:2]) for x in self.evaluations)
    # Forward and backward pass take three times as long as the forward pass.
    step = 3 * evaluation / sequences * self.config.batch_size
    left = self.config.steps - done
    seconds = left * (step + evaluation / self.config.eval_every)
    print_once(
      f'step {done}: validation loss {loss:.4f}, about '
      f'{tqdm.tqdm.format_interval(seconds)} left'
    )

  def _stop_if_asked(self, step: int, received: int | None) -> None:
    """Raises ``StoppedError`` if there was a signal."""
    if received is None:
      return
    self.checkpoints.wait()
    raise StoppedError(
      f'{signal.Signals(received).name}: a checkpoint of step {step} has been '
      'saved; the same command goes on from it.',
      received,
    )

  def _explained(self, error: NotFiniteError) -> NotFiniteError:
    """Returns the error with the state of attention and what to try."""
    measured = self.programs.diagnostics.attention(
      self.state.params, self.evaluations[0].tokens_ABT
    )
    logits = np.array(measured['max_attention_logit'])
    layer = int(np.argmax(logits))
    skip = ', or --not-finite skip (leaves such steps out)'
    return NotFiniteError(
      f'{error} With the weights after step {self.taken}, the largest '
      f'attention logit on held-out text is {logits[layer]:.1f}, in layer '
      f'{layer + 1} of {len(logits)}. The last checkpoint is sound. Try a '
      'smaller --learning-rate or --qk-norm (a new run)'
      + ('.' if self.config.not_finite == 'skip' else f'{skip}.')
    )
