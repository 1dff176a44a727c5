"""Advice for a run that does not fit into the memory of its devices."""

from collections.abc import Iterator
import contextlib

import jax
import jax.numpy as jnp

from examples.gpt2.config import Config
from examples.gpt2.devices import hardware, sharding
from examples.gpt2.model import loss
from examples.gpt2.run.command import CommandError
from examples.gpt2.run.step import Trainer


class OutOfMemoryError(CommandError):
  """A device has too little memory; the message says what to change."""

  status = 4


@contextlib.contextmanager
def advice(config: Config, trainer: Trainer) -> Iterator[None]:
  """Turns an allocation that failed into advice.

  Args:
    config: Resolved settings.
    trainer: Trainer of the run.

  Raises:
    OutOfMemoryError: If a device had too little memory.
  """
  try:
    yield
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
      first = (str(error).splitlines() or [''])[0]
      raise OutOfMemoryError(
        f'out of memory: {first}\n{explain(config, trainer)}'
      ) from error
    raise


def explain(config: Config, trainer: Trainer) -> str:
  """Returns where the memory goes, and what to change."""
  params = hardware.bytes_per_device(trainer.shapes.params)
  state = hardware.bytes_per_device(trainer.shapes)
  needed = {
    'weights': params,
    'moments': state - params,
    'gradients': params,
    'activations, about': activation_bytes(config, trainer),
  }
  lines = [f'  {k}: {v / 2**30:.2f} GiB' for k, v in needed.items()]
  return '\n'.join(
    ['Estimate for each device:', *lines, 'Try, in this order:']
    + [f'  {hint}' for hint in _hints(config, trainer)]
  )


def activation_bytes(config: Config, trainer: Trainer) -> int:
  """Returns an estimate of the activations that a device holds, in bytes.

  It counts what the backward pass reads: of each layer all, only the products
  with weights (``dots``) or only the residual stream (``full``); of the layer
  that it is in, all once more; and the logits of a chunk of tokens.
  """
  shards = sharding.num_batch_shards(trainer.mesh)
  tensor = trainer.mesh.shape['tensor']
  sequences = config.micro_batch_size // shards
  size = jnp.dtype(config.dtype).itemsize
  up_projections = 2 if config.architecture == 'llama' else 1
  platform = trainer.mesh.devices.flat[0].platform
  whole = _whole_layer_bytes(config, tensor, platform)
  kept = {
    'none': whole,
    'dots': size
    * (
      2 * config.width
      + (3 * config.width + up_projections * config.mlp_width) // tensor
    ),
    'full': size * config.width,
  }[config.remat]
  vocab_size = trainer.model_config.vocab_size
  chunk = loss.chunk_length(sequences, config.context_length, vocab_size)
  layers = config.context_length * (config.num_layers * kept + whole)
  logits = 2 * 4 * chunk * vocab_size // tensor
  return sequences * (layers + logits)


def _whole_layer_bytes(config: Config, tensor: int, platform: str) -> int:
  """Returns the bytes of what the backward pass reads of a layer, by token."""
  size = jnp.dtype(config.dtype).itemsize
  # Norms compute in float32, and so does the softmax.
  stream = config.width * (4 * size + 4 * 4)
  inner = 4 * config.width * size + 6 * config.mlp_width * size
  if not (platform == 'gpu' and config.dtype == 'bfloat16'):
    # On CPU, attention keeps its weights once.
    weights = config.num_heads * config.context_length
    inner += weights * (4 if platform == 'cpu' else size + 4)
  return stream + inner // tensor


def _hints(config: Config, trainer: Trainer) -> Iterator[str]:
  """Yields what to change, the cheapest first."""
  shards = sharding.num_batch_shards(trainer.mesh)
  smaller = config.micro_batch_size // 2
  if smaller and smaller % shards == 0 and config.batch_size % smaller == 0:
    yield f'--micro-batch-size {smaller} (same numbers but for rounding)'
  if config.remat != 'full':
    more = 'dots' if config.remat == 'none' else 'full'
    yield f'--remat {more} (same numbers, recomputes in the backward pass)'
  if config.dtype == 'float32':
    yield '--dtype bfloat16 (a new run: half the activations)'
  mesh = trainer.mesh.shape
  devices = trainer.mesh.size
  if devices > mesh['fsdp'] * mesh['tensor']:
    yield f'--mesh fsdp={devices // mesh["tensor"]}' + (
      f',tensor={mesh["tensor"]}' if mesh['tensor'] > 1 else ''
    )
  if devices == 1:
    yield 'more devices, with --mesh fsdp=N'
