"""The steps of a run: compiles, resumes, evaluates, saves, stops."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import math
import signal
import time
from typing import Any, NamedTuple
import warnings

from etils import epath
import jax
import numpy as np

from examples.gpt2.command import CommandError, format_bytes
from examples.gpt2.config import FittedConfig
from examples.gpt2.data import batches
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices import sharding
from examples.gpt2.devices.processes import on_process_0, print_once
from examples.gpt2.model.export import write_hugging_face
from examples.gpt2.model.files import Model
from examples.gpt2.run import memory
from examples.gpt2.run.checkpoint_folder import CheckpointFolder
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.run.diagnostics import Diagnostics
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import NotFiniteError, StepLog
from examples.gpt2.run.profile import Profile
from examples.gpt2.run.signals import StopRequest
from examples.gpt2.run.step import Trainer, TrainState
from examples.gpt2.run.weights import describe_model
from examples.gpt2.storage import new_folder


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
  config: FittedConfig,
  tokens: Tokens,
  folder: RunFolder,
  start: TrainState | None = None,
) -> TrainState:
  """Takes the steps of a run that are left, and returns the final state.

  They go on from the newest sound checkpoint, else from ``start``, else from
  the state of the seed.

  All programs are compiled first, so that what does not fit fails at the start.

  Raises:
    NotFiniteError: If a loss or gradient is not finite and that is to stop
      the run; the last checkpoint is from before.
    StoppedError: If a signal came; a checkpoint has been saved.
    UnsavedError: If three checkpoints in a row could not be saved.
    UsageError: If there are checkpoints but none is sound.
  """
  evaluations = [
    _Evaluation(
      x.name,
      x.weight,
      *batches.validation_batch(x.tokens, config, trainer.mesh),
    )
    for x in tokens.evaluations
  ]
  programs = _compile(trainer, config, evaluations)
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(
      Checkpoints(folder.checkpoints, config.max_to_keep, config.keep_period)
    )
    found = checkpoints.restore(trainer.shapes)
    if found is not None:
      print_once(f'going on after step {found[0]}, from its checkpoint')
      state = found[1]
    else:
      state = trainer.init() if start is None else start
    done = int(state.step)
    tokens_done = folder.keep_metrics(done, config.fork_from, config.fork_step)
    log = StepLog(config, trainer, folder, done, tokens_done)
    stack.enter_context(log)
    stop = stack.enter_context(StopRequest())
    make_batch = functools.partial(
      batches.training_batch, tokens.train, config, mesh=trainer.mesh
    )
    steps = _Steps(
      config=config,
      programs=programs,
      evaluations=evaluations,
      model=describe_model(trainer, tokens),
      make_batch=make_batch,
      folder=folder,
      checkpoints=checkpoints,
      log=log,
      stop=stop,
      state=state,
      taken=done,
    )
    return steps.take()


def _compile(
  trainer: Trainer, config: FittedConfig, evaluations: Sequence[_Evaluation]
) -> _Programs:
  start = time.perf_counter()
  batch = batches.batch_shape(config, trainer.mesh)
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
  print_once(
    f'compiled in {time.perf_counter() - start:.0f} s; beside weights and '
    f'moments a step needs {format_bytes(temporary)} on each device'
  )
  return _Programs(step, sequence_losses, diagnostics)


@dataclasses.dataclass
class _Steps:
  """The steps of a run, and what is due after each."""

  config: FittedConfig
  programs: _Programs
  evaluations: Sequence[_Evaluation]
  model: Model  # Without weights.
  make_batch: Callable[[int], jax.Array]  # From the number of a step.
  folder: RunFolder
  checkpoints: Checkpoints
  log: StepLog
  stop: StopRequest
  state: TrainState
  taken: int  # Steps.
  is_saved: bool = True
  saved_at: float = dataclasses.field(default_factory=time.monotonic)

  def take(self) -> TrainState:
    """Takes the steps that are left, and returns the last state."""
    done = self.taken
    if done and self._is_export_due(done):
      # A signal or a kill may have come between the checkpoint and the export.
      self._export(done)
    with self._profile(done) as profile:
      try:
        batch: Any = self.make_batch(done + 1)
        for step in range(done + 1, self.config.steps + 1):
          if profile is not None:
            profile.before(step)
          batch = self._step(step, batch)
        self.checkpoints.wait()
        self._stop_if_asked(self.config.steps, self.stop.received())
      except NotFiniteError as error:
        with contextlib.suppress(OSError):  # A full disk is not what stops it.
          self.folder.flush()
        raise self._explained(error) from error
    return self.state

  def _profile(self, done: int) -> contextlib.AbstractContextManager[Any]:
    if self.config.profile:
      folder = self.folder.path / 'profile'
      profile = Profile(folder, done, lambda: jax.block_until_ready(self.state))
      if profile.first > self.config.steps:
        warnings.warn(
          f'--profile: there is no trace, which begins with step '
          f'{profile.first}, of a run that has {self.config.steps}.',
          stacklevel=2,
        )
      return profile
    return contextlib.nullcontext()

  def _step(self, step: int, batch: jax.Array) -> jax.Array | None:
    """Takes a step, does what is due after it, and returns the next batch."""
    measured = self._measure(step, batch)
    self.state, metrics = self.programs.step(self.state, batch)
    self.taken = step
    # The host makes the next batch, and logs the step before, while the
    # devices take this one.
    start, following = time.perf_counter(), None
    if step < self.config.steps:
      following = self.make_batch(step + 1)
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
        self.is_saved = self._save(step, loss)
    # After a signal there may be little time: the run exports when it goes on.
    if received is None and self._is_export_due(step):
      self._export(step)
    self._stop_if_asked(step, received)

  def _is_export_due(self, step: int) -> bool:
    every = self.config.hf_every
    return every is not None and self._is_due(step, every)

  def _export(self, step: int) -> None:
    """Writes the weights for Hugging Face."""
    self.log.finish_step()
    with self.log.paused():
      arrays = jax.tree.map(sharding.to_host, self.state.params)
      try:
        on_process_0(self._write_export, step, arrays)
      except OSError as error:
        warnings.warn(
          f'The export of step {step} failed: {error}. python -m '
          'examples.gpt2.convert export makes it of a checkpoint.',
          RuntimeWarning,
          stacklevel=2,
        )

  def _write_export(self, step: int, arrays: Any) -> None:
    folder = self.folder.path / 'hf'
    for unfinished in epath.Path(folder).glob('partial-step-*'):
      unfinished.rmtree()  # What a kill has cut short.
    # Of a step that is taken again, it is there.
    with new_folder(folder / f'step-{step}', replace=True) as scratch:
      write_hugging_face(
        scratch, dataclasses.replace(self.model, params=arrays)
      )

  def _is_due(self, step: int, every: int) -> bool:
    return step % every == 0 or step == self.config.steps

  def _is_save_due(self, step: int) -> bool:
    if self._is_due(step, self.config.checkpoint_every):
      return True
    period = self.config.keep_period
    if period is not None and step % period == 0:
      return True
    minutes = self.config.checkpoint_minutes
    if minutes is None:
      return False
    # All processes save after the same step.
    return on_process_0(
      lambda: time.monotonic() - self.saved_at >= 60 * minutes
    )

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
    losses, weights = {}, []
    with self.log.paused():
      for name, weight, held_out, count in self.evaluations:
        measure = self.programs.sequence_losses[held_out.shape]
        measured = np.asarray(measure(self.state.params, held_out))
        losses[name] = float(np.mean(measured.ravel()[:count], dtype=float))
        weights.append(weight)
    loss = weighted_mean(list(losses.values()), weights)
    evaluation: dict[str, Any] = {'val_loss': loss}
    if len(losses) > 1:
      evaluation['val_losses'] = losses
    self.log.finish_step(evaluation)
    if not math.isfinite(loss):
      raise NotFiniteError(f'at step {step} the validation loss is {loss}.')
    return loss

  def _save(self, step: int, val_loss: float | None) -> bool:
    self.saved_at = time.monotonic()
    self.log.upload()
    # Lines on the disk first, so that a checkpoint never misses one.
    try:
      self.folder.flush()
    except OSError as error:
      return self.checkpoints.fail(step, str(error))
    return self.checkpoints.save(step, self.state, val_loss)

  def _stop_if_asked(self, step: int, received: int | None) -> None:
    """Raises ``StoppedError`` if there was a signal."""
    if received is None:
      return
    self.is_saved = self.checkpoints.wait() and self.is_saved
    name, saved = signal.Signals(received).name, 'no checkpoint could be saved'
    if self.is_saved:
      saved = f'a checkpoint of step {step} has been saved'
    raise StoppedError(
      f'{name}: {saved}; the same command goes on from the last one.', received
    )

  def _explained(self, error: NotFiniteError) -> NotFiniteError:
    """Returns the error with the state of attention and what to try."""
    measured = self.programs.diagnostics.attention(
      self.state.params, self.evaluations[0].tokens_ABT
    )
    logits = np.array(measured['max_attention_logit'])
    layer = int(np.argmax(logits))
    has_checkpoint = bool(
      on_process_0(CheckpointFolder(self.folder.checkpoints).steps)
    )
    skip = ', or --not-finite skip (leaves such steps out)'
    return NotFiniteError(
      f'{error} With the weights after step {self.taken}, the largest '
      f'attention logit on held-out text is {logits[layer]:.1f}, in layer '
      f'{layer + 1} of {len(logits)}. '
      + ('The last checkpoint is sound. ' if has_checkpoint else '')
      + 'Try a smaller --learning-rate or --qk-norm (a new run)'
      + ('.' if self.config.not_finite == 'skip' else f'{skip}.')
    )
