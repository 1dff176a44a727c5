"""Takes the steps of a run: compiles, resumes, evaluates, saves, stops."""

import contextlib
import functools
import math
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.gpt2.config import Config, UsageError
from examples.gpt2.data import batches
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices import hardware, sharding
from examples.gpt2.model.files import load_model
from examples.gpt2.optim.diagnostics import Watch
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.run.command import CommandError
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import NotFiniteError, StepLog
from examples.gpt2.run.step import Trainer, TrainState

_PROFILED = (10, 15)
"""First and last step of a trace, after those that were done before."""


class StoppedError(CommandError):
  """A signal has stopped the run.

  Attributes:
    signal: Number of the signal.
    status: 128 more, as shells have it (SIGTERM: 143, control-C: 130).
  """

  def __init__(self, message: str, number: int):
    super().__init__(message)
    self.signal = number
    self.status = 128 + number

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (str(self), self.signal)


class Loop:
  """The steps of a run, from its last checkpoint to its end."""

  def __init__(
    self, trainer: Trainer, config: Config, tokens: Tokens, folder: RunFolder
  ):
    self._trainer = trainer
    self._config = config
    self._folder = folder
    self._watch = Watch(config, trainer)
    by_batch = sharding.batch_sharding(trainer.mesh)
    self._make_batch = functools.partial(
      batches.training_batch, tokens.train, config, sharding=by_batch
    )
    self._held_out, self._num_held_out = batches.validation_batch(
      tokens.validation, config, by_batch
    )
    self._weights = self._load_weights(tokens)
    self._compile()

  def _compile(self) -> None:
    start = time.perf_counter()
    batch = jax.ShapeDtypeStruct(
      (
        self._config.batch_size // self._config.micro_batch_size,
        self._config.micro_batch_size,
        self._config.context_length + 1,
      ),
      np.int32,
      sharding=sharding.batch_sharding(self._trainer.mesh),
    )
    lowered = self._trainer.step.lower(self._trainer.shapes, batch)
    self._take_step = lowered.compile()
    hardware.say(f'compiled in {time.perf_counter() - start:.0f} s')

  def run(self) -> Any:
    """Takes the steps that are left.

    Returns:
      The final parameters.

    Raises:
      NotFiniteError: If a loss or gradient is not finite and that is to stop
        the run; the last checkpoint is from before.
      StoppedError: If a signal came; a checkpoint has been saved.
      UsageError: If there are checkpoints but none is sound.
    """
    with contextlib.ExitStack() as stack:
      self._checkpoints = stack.enter_context(
        Checkpoints(self._folder.checkpoints, self._config.keep)
      )
      done, self._state = self._restore()
      self._first, self._is_tracing = done, False
      stack.callback(self._end_profile)
      self._folder.keep_metrics(done)
      self._log = stack.enter_context(
        StepLog(self._config, self._trainer, self._folder, done)
      )
      self._stop = stack.enter_context(hardware.StopRequest())
      self._batches = stack.enter_context(
        batches.Prefetch(self._make_batch, done + 1, self._config.steps)
      )
      try:
        for step in range(done + 1, self._config.steps + 1):
          self._step(step)
      except NotFiniteError as error:
        raise self._explained(error) from error
    return self._state.params

  def _restore(self) -> tuple[int, TrainState]:
    """Returns the number of steps done, and the state after them."""
    found = self._checkpoints.restore(self._trainer.shapes)
    if found is not None:
      hardware.say(f'going on after step {found[0]}, from its checkpoint')
      return found
    state = self._trainer.init()
    if self._weights is not None:
      params = jax.tree.map(
        lambda x, like: jax.make_array_from_callback(
          x.shape, like.sharding, x.__getitem__
        ),
        self._weights,
        self._trainer.shapes.params,
      )
      state = state._replace(params=params)
    return 0, state

  def _load_weights(self, tokens: Tokens) -> Any:
    """Returns the parameters to start from, None for random ones."""
    path = self._config.init_from
    if path is None:
      return None
    model = load_model(path)
    found, expected = vars(model.config), vars(self._trainer.model_config)
    changes = ', '.join(
      f'{k}: {found[k]} -> {expected[k]}'
      for k in sorted(found)
      if found[k] != expected[k] and k not in ('dtype', 'remat', 'unroll')
    )
    if changes:
      raise UsageError(
        f'--init-from {path} holds another model than the settings say '
        f'({changes}).'
      )
    tokenizers = [x for x in (model.tokenizer, tokens.tokenizer) if x]
    if len({tokenizer.to_str() for tokenizer in tokenizers}) > 1:
      raise UsageError(
        f'--init-from {path} has another tokenizer than --data '
        f'{self._config.data}: make tokens with it, by python -m '
        f'examples.gpt2.prepare --tokenizer {path}.'
      )
    return model.params

  def _step(self, step: int) -> None:
    """Takes a step, and does what is due after it."""
    batch = next(self._batches)
    watched = self._measure(step, batch)
    self._profile(step)
    self._state, metrics = self._take_step(self._state, batch)
    self._log.begin_step(step, metrics, watched, self._batches.waited)
    self._finish(step)

  def _finish(self, step: int) -> None:
    """Evaluates, saves and stops where that is due."""
    is_last = step == self._config.steps
    received = self._stop.received(step)
    evaluation: dict[str, float] = {}
    if is_last or step % self._config.eval_every == 0:
      with self._log.paused():
        evaluation = {'val_loss': self._evaluate()}
      if not math.isfinite(evaluation['val_loss']):
        raise NotFiniteError(f'at step {step} {evaluation}.', step)
      self._log.finish_step(evaluation)
    is_due = step % self._config.checkpoint_every == 0
    if is_last or is_due or received is not None:
      self._log.finish_step()
      with self._log.paused():
        saved = self._save(step, evaluation.get('val_loss'))
      if received is not None and not is_last:
        self._end(step, received, saved)

  def _measure(self, step: int, batch: jax.Array) -> dict[str, Any]:
    """Returns what a watch step measures, nothing on others."""
    every = self._config.watch_every
    is_last = step == self._config.steps
    if not every or (step % every and not is_last):
      return {}
    self._log.finish_step()
    with self._log.paused():
      return self._watch(self._state, batch)

  def _evaluate(self) -> float:
    """Returns the mean validation loss, nats a token."""
    losses = self._trainer.sequence_losses(self._state.params, self._held_out)
    counted = np.asarray(losses).ravel()[: self._num_held_out]
    return float(np.mean(counted, dtype=float))

  def _save(self, step: int, val_loss: float | None) -> bool:
    # Lines on the disk first, so that a checkpoint never misses one.
    try:
      self._folder.flush()
    except OSError as error:
      hardware.say(f'no checkpoint of step {step}: {error}')
      return False
    return self._checkpoints.save(step, self._state, val_loss)

  def _end(self, step: int, received: int, saved: bool) -> None:
    """Raises, with what becomes of the run."""
    self._checkpoints.wait()
    name = signal.Signals(received).name
    what = f'a checkpoint of step {step} has been saved'
    raise StoppedError(
      f'{name}: {what if saved else "no checkpoint could be saved"}; the same '
      'command goes on from the last one.',
      received,
    )

  def _profile(self, step: int) -> None:
    """Starts and ends the trace."""
    if not self._config.profile:
      return
    if step == self._first + _PROFILED[0]:
      jax.profiler.start_trace(str(self._folder.path / 'profile'))
      self._is_tracing = True
    elif step == self._first + _PROFILED[1] + 1:
      self._end_profile()

  def _end_profile(self) -> None:
    if self._is_tracing:
      jax.block_until_ready(self._state)
      jax.profiler.stop_trace()
      self._is_tracing = False

  def _explained(self, error: NotFiniteError) -> NotFiniteError:
    """Returns the error with the state of attention and what to try."""
    seen = self._watch.attention(self._state.params, self._held_out)
    logits = jnp.array(seen['max_attention_logit'])
    layer = int(jnp.argmax(logits))
    has_checkpoint = any(self._folder.checkpoints.glob('[0-9]*'))
    return NotFiniteError(
      f'{error} With the weights before that step, the largest attention '
      f'logit on held-out text is {logits[layer]:.1f}, in layer {layer + 1} of '
      f'{len(logits)}. '
      + ('The last checkpoint is sound. ' if has_checkpoint else '')
      + 'Try a smaller --learning-rate or --qk-norm (a new run), or '
      '--not-finite skip (leaves such steps out).',
      error.step,
    )
