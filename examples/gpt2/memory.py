"""How a run fits its devices, and what to try if their memory is too small."""

from collections.abc import Iterator
import contextlib

import jax
from jax.sharding import Mesh

from examples.gpt2 import hardware
from examples.gpt2.command import CommandError, format_bytes
from examples.gpt2.config import Config, UsageError, change
from examples.gpt2.sharding import num_batch_shards
from examples.gpt2.step import Trainer

# Layers whose loop is slower on CPU than they are one by one.
_MOST_UNROLLED = 4


class OutOfMemoryError(CommandError):
  """A device has too little memory; the message says what to change."""

  status = 4


def fit(config: Config, mesh: Mesh) -> Config:
  """Chooses what depends on the devices, and checks it and the mesh.

  That is the micro-batch and, unless it is given, ``unroll``.

  The micro-batch is the largest divisor of a shard's part of the batch up to
  the setting. Raises ``UsageError`` if the mesh does not divide batch or heads.
  """
  shards, tensor = num_batch_shards(mesh), mesh.shape['tensor']
  sequences, rest = divmod(config.batch_size, shards)
  if rest:
    raise UsageError(
      f'data * fsdp = {shards} of --mesh must divide --batch-size '
      f'{config.batch_size}.'
    )
  if config.model.num_kv_heads % tensor:
    raise UsageError(
      f'tensor = {tensor} of --mesh must divide --num-kv-heads '
      f'{config.model.num_kv_heads} (by default --num-heads).'
    )
  most = config.micro_batch_size or sequences
  size = max(n for n in micro_batch_sizes(config, mesh) if n <= most)
  unroll = config.model.unroll or _default_unroll(config, mesh)
  sizes = {'micro_batch_size': size, 'unroll': unroll}
  return change(config, **sizes)


def _default_unroll(config: Config, mesh: Mesh) -> int:
  """Returns the number of layers where that makes steps quicker, else 1.

  On CPU that is so of small models. On GPU a loop over layers fills and copies
  what it stacks for the backward pass. But it bounds how many layers are
  gathered (FSDP) or recomputed at once, which a compiler need not do without.
  """
  platform = mesh.devices.flat[0].platform
  if platform == 'gpu':
    is_quicker = config.model.remat == 'none' and mesh.shape['fsdp'] == 1
  else:
    is_quicker = platform == 'cpu' and config.model.num_layers <= _MOST_UNROLLED
  return config.model.num_layers if is_quicker else 1


def micro_batch_sizes(config: Config, mesh: Mesh) -> list[int]:
  """Returns the micro-batches that divide a shard's sequences, in order."""
  sequences = config.batch_size // num_batch_shards(mesh)
  return [n for n in range(1, sequences + 1) if sequences % n == 0]


def needed_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the bytes of a device that a program needs, arguments included."""
  stats = compiled.memory_analysis()
  results = stats.output_size_in_bytes - stats.alias_size_in_bytes
  return (
    stats.argument_size_in_bytes
    + results
    + stats.temp_size_in_bytes
    + stats.generated_code_size_in_bytes
  )


def is_too_little(error: BaseException) -> bool:
  """Returns whether an error is that of a device with too little memory."""
  if isinstance(error, jax.errors.JaxRuntimeError):
    return 'RESOURCE_EXHAUSTED' in str(error)
  return isinstance(error, MemoryError)


def check(
  compiled: jax.stages.Compiled, mesh: Mesh, what: str = 'the step'
) -> None:
  """Raises ``MemoryError`` for a program that no device has the memory for."""
  needed = needed_bytes(compiled)
  available = hardware.memory_bytes(mesh.local_devices[0])
  if available is not None and needed > available:
    raise MemoryError(
      f'{what} needs {format_bytes(needed)} of a device that has '
      f'{format_bytes(available)}'
    )


@contextlib.contextmanager
def advice(config: Config, trainer: Trainer) -> Iterator[None]:
  """Turns a failed allocation into an ``OutOfMemoryError`` with advice."""
  try:
    yield
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    if not is_too_little(error):
      raise
    first = (str(error).splitlines() or [''])[0]
    raise OutOfMemoryError(
      f'out of memory: {first}\n{explain(config, trainer)}'
    ) from error


def explain(config: Config, trainer: Trainer) -> str:
  """Returns where the memory goes, and what to change, the cheapest first."""
  mesh, size = trainer.mesh, config.micro_batch_size
  params = hardware.bytes_per_device(trainer.shapes.params)
  needed = {
    'weights': params,
    'moments': hardware.bytes_per_device(trainer.shapes) - params,
    'gradients': params,
  }
  more = {'none': 'dots', 'dots': 'full', 'full': None}[config.model.remat]
  tensor = mesh.shape['tensor']
  fsdp = f'fsdp={mesh.size // tensor}'
  if tensor > 1:
    fsdp += f',tensor={tensor}'
  hints = {
    f'--micro-batch-size {size // 2} (same numbers but for rounding)': (
      size % 2 == 0
    ),
    f'--remat {more} (same numbers, recomputes in the backward pass)': more,
    '--dtype bfloat16 (a new run: half the activations)': (
      config.model.dtype == 'float32'
    ),
    f'--mesh {fsdp}': mesh.shape['data'] > 1,
    'more devices, with --mesh fsdp=N': mesh.size == 1,
  }
  return '\n'.join(
    [
      'Beside activations, each device holds:',
      *(f'  {name}: {x / 2**30:.2f} GiB' for name, x in needed.items()),
      'Try, in this order:',
      *(f'  {hint}' for hint, helps in hints.items() if helps),
    ]
  )
