"""The steps of a run: compiles, resumes, evaluates, saves, stops."""

from collections.abc import Iterator, Sequence
import contextlib
import itertools
import math
import signal
import threading
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np
import tqdm

from examples.gpt2 import data as data_module
from examples.gpt2.checkpoints import Checkpoints
from examples.gpt2.command import CommandError, format_bytes
from examples.gpt2.config import Config, batch_sizes
from examples.gpt2.data import Data, batch_shape, evaluation_batch
from examples.gpt2.diagnostics import Diagnostics
from examples.gpt2.hardware import check_memory
from examples.gpt2.processes import (
  StopRequest,
  is_process_0,
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


class _Programs(NamedTuple):
  """Compiled programs of a run."""

  steps: dict[int, Any]  # As Trainer.step, by the sequences of a step.
  diagnostics: dict[int, Diagnostics]  # By the sequences of a step too.
  evaluate: 'Evaluations'


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
  with Checkpoints(
    folder.checkpoints, config.max_to_keep, config.keep_period
  ) as checkpoints:
    programs = _compile(trainer, config, Evaluations(trainer, config, data))
    done, state = _first(trainer, config, checkpoints)
    tokens_done = folder.keep_metrics(done, config.fork_from)
    with StepLog(config, trainer, folder, done, tokens_done) as log:
      _stop_if_asked(stop.received(), done, checkpoints)
      with log.paused():
        _say_what_is_left(config, programs.evaluate, state, done)
      batches = _batches(config, data, trainer.mesh, done)
      trace = _Trace(config, folder)
      return _take_steps(
        config, programs, batches, checkpoints, log, trace, stop, state, done
      )


def _take_steps(
  config: Config,
  programs: _Programs,
  batches: Iterator[jax.Array],
  checkpoints: Checkpoints,
  log: StepLog,
  trace: '_Trace',
  stop: StopRequest,
  state: TrainState,
  done: int,
) -> TrainState:
  """Takes the steps that are left, and after each what is due."""
  batch: Any = next(batches, None)
  try:
    for step in range(done + 1, config.steps + 1):
      trace.before(step - done, state)
      size, measured = batch.shape[0] * batch.shape[1], {}
      if _is_due(config, step, config.diagnostics_every):
        log.finish_step()
        with log.paused():
          measured = programs.diagnostics[size](state, batch)
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
        val_loss = _finite(evaluation['val_loss'], step)
      received = stop.received()
      if received or _is_save_due(config, step):
        log.finish_step()
        with log.paused():
          # Lines first, so that a checkpoint never misses one.
          log.flush()
          checkpoints.save(step, state, val_loss)
      _stop_if_asked(received, step, checkpoints)
  except NotFiniteError as error:
    raise _explained(error, config, programs, state) from error
  return state


def _is_due(config: Config, step: int, every: int) -> bool:
  return every > 0 and (step % every == 0 or step == config.steps)


def _is_save_due(config: Config, step: int) -> bool:
  is_kept = config.keep_period is not None and step % config.keep_period == 0
  return is_kept or _is_due(config, step, config.checkpoint_every)


def _batches(
  config: Config, data: Data, mesh: Mesh, done: int
) -> Iterator[jax.Array]:
  """Yields the batches of the steps that are left.

  Batches that grow take the same sequences, in the same order.
  """
  sizes = batch_sizes(config)
  starts = np.cumsum(sizes) - sizes
  for end in (*(np.flatnonzero(np.diff(sizes)) + 1).tolist(), config.steps):
    if done < end:
      shape = batch_shape(config, mesh, int(sizes[done]))
      batches = data_module.batches(data.sequences, shape, int(starts[done]))
      yield from itertools.islice(batches, end - done)
      done = end


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


def _finite(val_loss: float, step: int) -> float:
  if not math.isfinite(val_loss):
    raise NotFiniteError(f'at step {step} the validation loss is {val_loss}.')
  return val_loss


def _explained(
  error: NotFiniteError, config: Config, programs: _Programs, state: TrainState
) -> NotFiniteError:
  """Returns the error with the state of attention and what to try."""
  diagnostics = next(iter(programs.diagnostics.values()))
  held_out = programs.evaluate.sets[0].tokens_ABT
  measured = diagnostics.attention(state.params, held_out)
  logits = np.array(measured['max_attention_logit'])
  layer = int(np.argmax(logits))
  skip = ', or --not-finite skip (leaves such steps out)'
  return NotFiniteError(
    f'{error} With the weights after step {int(state.step)}, the largest '
    f'attention logit on held-out text is {logits[layer]:.1f}, in layer '
    f'{layer + 1} of {len(logits)}. The last checkpoint is sound. Try a '
    'smaller --learning-rate or --qk-norm (a new run)'
    + ('.' if config.not_finite == 'skip' else f'{skip}.')
  )


def _compile(
  trainer: Trainer, config: Config, evaluations: 'Evaluations'
) -> _Programs:
  """Compiles all programs of a run.

  Raises ``MemoryError`` if a device has too little memory for one of them.
  """
  start, programs, needed = (
    time.perf_counter(),
    _Programs({}, {}, evaluations),
    0,
  )
  with _saying_compiling():
    for size in sorted({*batch_sizes(config).tolist()}):
      batch = batch_shape(config, trainer.mesh, size)
      step = trainer.step.lower(trainer.shapes, batch).compile()
      check_memory(step, trainer.mesh)
      needed = max(needed, step.memory_analysis().temp_size_in_bytes)
      programs.steps[size] = step
      programs.diagnostics[size] = Diagnostics(config, trainer)
      if config.diagnostics_every:
        check_memory(
          programs.diagnostics[size].compile(trainer.shapes, batch),
          trainer.mesh,
          'a step with diagnostics (none: --diagnostics-every 0)',
        )
    evaluations.compile(trainer)
  wait_for_all('compiled')
  print_once(
    f'compiled in {time.perf_counter() - start:.0f} s; beside weights and '
    f'moments a step needs {format_bytes(needed)} on each device'
  )
  return programs


@contextlib.contextmanager
def _saying_compiling() -> Iterator[None]:
  """Prints a line from time to time, since compilation may take minutes."""
  ended, start = threading.Event(), time.perf_counter()

  def say() -> None:
    while not ended.wait(_COMPILING_SECONDS):
      seconds = time.perf_counter() - start
      print(f'compiling the step for {seconds:.0f} s', flush=True)

  if is_process_0():
    threading.Thread(target=say, daemon=True).start()
  try:
    yield
  finally:
    ended.set()


class _Set(NamedTuple):
  """A set to evaluate on."""

  name: str
  weight: float  # Of its loss in the validation loss.
  tokens_ABT: jax.Array
  num_sequences: int  # Those after repeat others.


class Evaluations:
  """Evaluates a model on all sets."""

  def __init__(self, trainer: Trainer, config: Config, data: Data):
    self.sets = [
      _Set(
        x.name,
        x.weight,
        *evaluation_batch(x.sequences, config, trainer.mesh),
      )
      for x in data.evaluations
    ]
    # Sets of another size need a program of their own.
    self._programs: dict[tuple[int, ...], Any] = {}

  def compile(self, trainer: Trainer) -> None:
    """Compiles ahead of time what a call runs."""
    params = trainer.shapes.params
    for x in self.sets:
      if x.tokens_ABT.shape not in self._programs:
        program = trainer.sequence_losses.lower(params, x.tokens_ABT).compile()
        check_memory(program, trainer.mesh, 'an evaluation')
        self._programs[x.tokens_ABT.shape] = program

  def __call__(self, params: Any) -> dict[str, Any]:
    """Returns the validation loss, nats a token, and of several sets each."""
    losses = {}
    for x in self.sets:
      found = self._programs[x.tokens_ABT.shape](params, x.tokens_ABT)
      ours = np.asarray(found).ravel()[: x.num_sequences]
      losses[x.name] = float(np.mean(ours, dtype=float))
    weights = [x.weight for x in self.sets]
    mean = {'val_loss': weighted_mean([*losses.values()], weights)}
    return mean | ({'val_losses': losses} if len(losses) > 1 else {})


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
  """Returns a mean of values, of which those of weight 0 may be infinite."""
  terms = [x * y for x, y in zip(values, weights, strict=True) if y]
  return math.fsum(terms) / math.fsum(weights)


def _say_what_is_left(
  config: Config, evaluate: Evaluations, state: TrainState, done: int
) -> None:
  """Prints the validation loss so far, and about how long the run takes."""
  if done == config.steps:
    return
  start = time.perf_counter()
  loss = evaluate(state.params)['val_loss']
  evaluation = time.perf_counter() - start
  evaluated = sum(math.prod(x.tokens_ABT.shape[:2]) for x in evaluate.sets)
  # Forward and backward pass take three times as long as the forward pass.
  trained = 3 * int(batch_sizes(config)[done:].sum())
  times = trained / evaluated + (config.steps - done) / config.eval_every
  print_once(
    f'step {done}: validation loss {loss:.4f}, about '
    f'{tqdm.tqdm.format_interval(times * evaluation)} left'
  )


class _Trace:
  """Writes a trace of some steps, if the settings ask for one."""

  def __init__(self, config: Config, folder: RunFolder):
    self._is_wanted, self._path = config.profile, folder.path / 'profile'

  def before(self, number: int, state: TrainState) -> None:
    """Starts or ends the trace before a step, by its number in this process."""
    if self._is_wanted and number == _TRACED[0]:
      jax.profiler.start_trace(str(self._path))
    elif self._is_wanted and number == _TRACED[1] + 1:
      # A trace that ends while a step is under way can crash the process.
      jax.block_until_ready(state)
      jax.profiler.stop_trace()
