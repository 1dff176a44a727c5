"""Batches of a run: which tokens, where on the devices, and made ahead.

A batch is a pure function of the seed and the step, the same for any number of
devices, processes and micro-batches. Each process reads only the sequences of
its own devices.
"""

from collections.abc import Callable
import queue
import threading
import time

import jax
import numpy as np

from examples.gpt2.config import Config


def training_starts(
  num_tokens: int, length: int, batch_size: int, seed: int, step: int
) -> np.ndarray:
  """Returns where the sequences of a step start, int64, shape (batch size,).

  Args:
    num_tokens: Number of tokens to draw from, above ``length``.
    length: Tokens in a sequence; one more, the last target, follows it.
    batch_size: Sequences in the step.
    seed: Seed of the run, not negative.
    step: Number of the step, not negative.
  """
  generator = np.random.default_rng((seed, step))
  return generator.integers(num_tokens - length, size=batch_size)


def validation_starts(
  num_tokens: int, length: int, max_sequences: int
) -> np.ndarray:
  """Returns where the sequences of an evaluation start, int64, one axis.

  They are spread evenly and share no token but the last target of one, which
  may be the first input of the next.

  Args:
    num_tokens: Number of tokens to take from, above ``length``.
    length: Tokens in a sequence; one more, the last target, follows it.
    max_sequences: Number of sequences, if there are as many.
  """
  available = (num_tokens - 1) // length
  count = min(available, max_sequences)
  return np.arange(count) * available // count * length


def windows(
  tokens: np.ndarray,
  starts: np.ndarray,
  length: int,
  positions: slice = slice(None),
) -> np.ndarray:
  """Reads windows of tokens.

  Args:
    tokens: Tokens, perhaps memory-mapped, shape (tokens,).
    starts: First position of each window, integer, any shape.
    length: Tokens in a window.
    positions: Part of each window to return.

  Returns:
    int32, the shape of ``starts`` and an axis of positions.
  """
  views = np.lib.stride_tricks.sliding_window_view(tokens, length)
  return views[starts][..., positions].astype(np.int32)


def make_batch(
  tokens: np.ndarray,
  starts: np.ndarray,
  length: int,
  micro_batch_size: int,
  sharding: jax.sharding.Sharding,
) -> jax.Array:
  """Makes a batch as one array over all devices and processes.

  Args:
    tokens: Tokens, perhaps memory-mapped, shape (tokens,). Only what the
      devices of this process hold is read, and only once.
    starts: First position of each sequence, a whole number of micro-batches;
      the same in each process.
    length: Tokens in a sequence, T; one more, the last target, follows it.
    micro_batch_size: Sequences in a micro-batch.
    sharding: Sharding of the result.

  Returns:
    int32, shape (micro-batches, micro-batch size, T + 1).

  Raises:
    ValueError: If the last micro-batch is not full, or the sharding does not
      divide the shape.
  """
  starts_AB = starts.reshape(-1, micro_batch_size)
  parts: dict[str, np.ndarray] = {}

  def read(index: tuple[slice, ...]) -> np.ndarray:
    # Devices along a tensor axis hold the same sequences.
    key = str(index)
    if key not in parts:
      starts_ab = starts_AB[index[:-1]]
      parts[key] = windows(tokens, starts_ab, length + 1, index[-1])
    return parts[key]

  shape = (*starts_AB.shape, length + 1)
  return jax.make_array_from_callback(shape, sharding, read, dtype=np.int32)


def training_batch(
  tokens: np.ndarray,
  config: Config,
  step: int,
  sharding: jax.sharding.Sharding,
) -> jax.Array:
  """Makes the batch of a step: random windows, by seed and step alone.

  Args:
    tokens: Training tokens, shape (tokens,).
    config: Resolved settings.
    step: Number of the step.
    sharding: Sharding of the result.

  Returns:
    int32, shape (micro-batches, micro-batch size, context length + 1): inputs
    and, one further, targets.
  """
  length = config.context_length
  starts = training_starts(
    len(tokens), length, config.batch_size, config.seed, step
  )
  return make_batch(tokens, starts, length, config.micro_batch_size, sharding)


def validation_batch(
  tokens: np.ndarray, config: Config, sharding: jax.sharding.Sharding
) -> tuple[jax.Array, int]:
  """Makes the batch of an evaluation, the same at every step.

  Args:
    tokens: Validation tokens, shape (tokens,).
    config: Resolved settings.
    sharding: Sharding of the batch.

  Returns:
    The batch, int32, shape (micro-batches, micro-batch size, context length +
    1), and the number of sequences to count: those after it, in the order of
    the first two axes, repeat others to fill the last micro-batch.
  """
  length, size = config.context_length, config.micro_batch_size
  starts = validation_starts(len(tokens), length, config.eval_sequences)
  # Repeated sequences give no new maximum, where padding would.
  filled = np.resize(starts, -(-len(starts) // size) * size)
  return make_batch(tokens, filled, length, size, sharding), len(starts)


class Prefetch:
  """Makes the batches of consecutive steps ahead, in a thread.

  As a context, it starts the thread and stops it. As an iterator, it gives the
  batches in order.

      with Prefetch(make, first=1, last=100) as batches:
        for batch in batches:
          ...

  Attributes:
    waited: Seconds that ``next`` has waited for batches, in all.
  """

  def __init__(
    self,
    make: Callable[[int], jax.Array],
    first: int,
    last: int,
    ahead: int = 2,
  ):
    """Plans the batches; nothing is made before the context is entered.

    Args:
      make: Function from the number of a step to its batch. It runs in the
        thread, where no mesh is set.
      first: First step.
      last: Last step, itself included.
      ahead: Batches that are made and not yet taken, at the most.
    """
    self.waited = 0.0
    self._make = make
    self._steps = range(first, last + 1)
    self._free = threading.Semaphore(ahead)
    # Holds batches, then at the end what `next` is to raise.
    self._made: queue.SimpleQueue[jax.Array | BaseException]
    self._made = queue.SimpleQueue()
    self._stopping = False
    self._thread = threading.Thread(target=self._run, daemon=True)

  def __enter__(self) -> 'Prefetch':
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Stops the thread, after the batch that it is making."""
    self._stopping = True
    self._free.release()
    self._thread.join()
    # Batches that nobody took go, and with them their device memory.
    self._made = queue.SimpleQueue()
    self._made.put(StopIteration())

  def __iter__(self) -> 'Prefetch':
    return self

  def __next__(self) -> jax.Array:
    """Returns the next batch.

    Raises:
      StopIteration: After the last batch, and once the context has been left.
      RuntimeError: If the context has not been entered.
      Exception: What ``make`` raised.
    """
    if self._thread.ident is None:
      raise RuntimeError('Prefetch makes batches only within a with statement.')
    start = time.perf_counter()
    batch = self._made.get()
    self.waited += time.perf_counter() - start
    if isinstance(batch, BaseException):
      self._made.put(batch)  # For the next call, which would wait for ever.
      raise batch
    self._free.release()
    return batch

  def _run(self) -> None:
    try:
      for step in self._steps:
        self._free.acquire()
        if self._stopping:
          break
        self._made.put(self._make(step))
      self._made.put(StopIteration())
    except BaseException as error:  # Whatever it is, `next` waits for it.
      self._made.put(error)
