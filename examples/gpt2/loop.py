"""The steps of a run: compiles, resumes, evaluates, saves, stops."""

from collections.abc import Callable
import signal
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.gpt2.checkpoints import Checkpoints
from examples.gpt2.command import CommandError, format_bytes
from examples.gpt2.config import Config, batch_sizes
from examples.gpt2.data import Data, batch_shape, step_batches
from examples.gpt2.evaluations import Evaluations
from examples.gpt2.hardware import check_memory
from examples.gpt2.log import StepLog, as_json
from examples.gpt2.processes import (
  StopRequest,
  on_process_0,
  print_once,
  wait_for_all,
)
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.step import Trainer, TrainState

_TRACED = (10, 15)
"""First and last step of a trace, after those that were done before."""


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


class _Programs(NamedTuple):
  """Compiled programs of a run."""

  steps: dict[int, Any]  # As Trainer.step, by the sequences of a step.
  measure: dict[int, Any]  # As the hook of take_steps, by the same.
  evaluate: Evaluations


def take_steps(
  trainer: Trainer,
  config: Config,
  data: Data,
  folder: RunFolder,
  stop: StopRequest,
  *,
  first_state: Callable[[], TrainState],
  measure: Any = None,
) -> TrainState:
  """Takes the steps of a run that are left, and returns the final state.

  They go on from the newest sound checkpoint. Without one, the first state is
  saved before the first step, which proves the folder for all processes. All
  programs are compiled first, so that what does not fit fails at the start.

  Args:
    trainer: Model and optimizer.
    config: Settings.
    data: What to train and evaluate on.
    folder: Where the run is.
    stop: What notes signals.
    first_state: Makes the state that a run without checkpoints starts from.
    measure: Jitted function from a state and a step's tokens to metrics, which
      is called every ``--diagnostics-every`` steps before the step is taken.

  Raises:
    NotFiniteError: If a loss or gradient is not finite and that is to stop
      the run; the last checkpoint is from before.
    StoppedError: If a signal came; a checkpoint has been saved.
    UnsavedError: If a checkpoint could not be saved.
    UsageError: If there are checkpoints but none is sound, or if what the run
      is to start from cannot be used.
  """
  with (
    Checkpoints(
      folder.checkpoints, config.max_to_keep, config.keep_period
    ) as checkpoints,
    StepLog(config, trainer, folder) as log,
  ):
    programs = _compile(trainer, config, data, measure)
    done, state = _first(trainer, first_state, checkpoints)
    tokens_done = on_process_0(folder.keep_metrics, done, config.fork_from)
    _stop_if_asked(stop.received(), done, checkpoints)
    if done < config.steps:
      val_loss = programs.evaluate(state.params)['val_loss']
      print_once(f'step {done}: validation loss {val_loss:.4f}')
    batches = step_batches(config, data.sequences, trainer.mesh, done)
    batch: Any = next(batches, None)
    log.begin(done, tokens_done)
    for step in range(done + 1, config.steps + 1):
      _trace(config, folder, step - done, state)
      size, measured = batch.shape[0] * batch.shape[1], {}
      if size in programs.measure and _is_due(
        config, step, config.diagnostics_every
      ):
        log.finish_step()
        with log.paused():
          measured = as_json(programs.measure[size](state, batch))
      state, metrics = programs.steps[size](state, batch)
      # The host makes the next batch, and logs the step before, while the
      # devices take this one.
      start = time.perf_counter()
      batch = next(batches, None)
      log.begin_step(step, metrics | measured, time.perf_counter() - start)
      val_loss = None
      if _is_due(config, step, config.eval_every):
        with log.paused():
          evaluation = programs.evaluate(state.params)
        log.finish_step(evaluation)
        val_loss = evaluation['val_loss']
      received = stop.received()
      if received or _is_save_due(config, step):
        log.finish_step()
        with log.paused():
          # Lines first, so that a checkpoint never misses one.
          log.flush()
          checkpoints.save(step, state, val_loss)
      _stop_if_asked(received, step, checkpoints)
    return state


def _is_due(config: Config, step: int, every: int) -> bool:
  return every > 0 and (step % every == 0 or step == config.steps)


def _is_save_due(config: Config, step: int) -> bool:
  is_kept = config.keep_period is not None and step % config.keep_period == 0
  return is_kept or _is_due(config, step, config.checkpoint_every)


def _first(
  trainer: Trainer,
  first_state: Callable[[], TrainState],
  checkpoints: Checkpoints,
) -> tuple[int, TrainState]:
  """Returns the steps that are done, and the state after them."""
  found = checkpoints.restore(trainer.shapes)
  if found is not None:
    print_once(f'going on after step {found[0]}, from its checkpoint')
    return found
  state = first_state()
  done = int(state.step)
  checkpoints.save(done, state)
  checkpoints.wait()
  return done, state


def _stop_if_asked(
  received: int | None, step: int, checkpoints: Checkpoints
) -> None:
  """Raises ``StoppedError`` if there was a signal."""
  if received is not None:
    checkpoints.wait()
    raise StoppedError(
      f'{signal.Signals(received).name}: a checkpoint of step {step} has been '
      'saved; the same command goes on from it.',
      received,
    )


def _compile(
  trainer: Trainer, config: Config, data: Data, measure: Any
) -> _Programs:
  """Compiles all programs of a run.

  Raises ``MemoryError`` if a device has too little memory for one of them.
  """
  mesh, shapes, needed = trainer.mesh, trainer.shapes, 0
  evaluate = Evaluations(data.evaluations, config, trainer.model_config, mesh)
  programs = _Programs({}, {}, evaluate)
  start = time.perf_counter()
  print_once('compiling the step, which may take minutes')
  for size in np.unique(batch_sizes(config)).tolist():
    batch = batch_shape(config, mesh, size)
    step = programs.steps[size] = trainer.step.lower(shapes, batch).compile()
    check_memory(step, mesh)
    needed = max(needed, step.memory_analysis().temp_size_in_bytes)
    if measure is not None and config.diagnostics_every:
      programs.measure[size] = measure.lower(shapes, batch).compile()
      check_memory(
        programs.measure[size],
        mesh,
        'a step with diagnostics (none: --diagnostics-every 0)',
      )
  check_memory(evaluate.compile(shapes.params), mesh, 'an evaluation')
  wait_for_all('compiled')
  print_once(
    f'compiled in {time.perf_counter() - start:.0f} s; beside weights and '
    f'moments a step needs {format_bytes(needed)} on each device'
  )
  return programs


def _trace(
  config: Config, folder: RunFolder, number: int, state: TrainState
) -> None:
  """Starts or ends a trace before a step, by its number in this process."""
  if config.profile and number == _TRACED[0]:
    jax.profiler.start_trace(str(folder.path / 'profile'))
  elif config.profile and number == _TRACED[1] + 1:
    # A trace that ends while a step is under way can crash the process.
    jax.block_until_ready(state)
    jax.profiler.stop_trace()
