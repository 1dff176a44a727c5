"""All configurations of a step: mesh, rematerialization, and micro-batch."""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Any, get_args

import jax
import tqdm

from examples.gpt2.config import Config, FittedConfig, Remat, UsageError
from examples.gpt2.run import memory
from examples.gpt2.run.step import Trainer

Make = Callable[[Config], tuple[FittedConfig, Trainer]]
"""Function from settings to those that the trainer completes, and a trainer."""
Measure = Callable[[FittedConfig, Trainer], dict[str, Any]]
"""Function to the measurements of a step."""


def measure_all(
  config: Config, num_devices: int, make: Make, measure: Measure
) -> dict[str, Any]:
  """Returns the measurements of all ways, the quickest first.

  Times without any overlap of compute, memory and network rank them. Meshes
  that the trainer refuses, and ways that the compiler does, mostly for lack of
  memory, are listed by the reason.
  """
  rows: list[dict[str, Any]] = []
  left_out: dict[str, list[str]] = {}
  for way in tqdm.tqdm(ways(config, num_devices), 'compiling', leave=False):
    try:
      rows.append(_measure_largest(way, make, measure))
    except (UsageError, jax.errors.JaxRuntimeError) as error:
      is_refused = isinstance(error, UsageError)
      name = way.mesh if is_refused else f'{way.mesh} {way.remat}'
      names = left_out.setdefault(str(error).splitlines()[0], [])
      if name not in names:
        names.append(name)
  rows.sort(key=lambda x: (not x['fits'], x['seconds_without_overlap']))
  return {'rows': rows, 'left_out': left_out}


def ways(config: Config, num_devices: int) -> list[Config]:
  """Returns every mesh with the rematerialization of the settings or more."""
  values = get_args(Remat)
  return [
    dataclasses.replace(config, mesh=mesh, remat=remat)
    for mesh in meshes(num_devices)
    for remat in values[values.index(config.remat) :]
  ]


def meshes(num_devices: int) -> list[str]:
  """Returns all meshes of a number of devices, as ``--mesh`` takes them."""
  divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
  return [
    f'data={num_devices // (fsdp * tensor)},fsdp={fsdp},tensor={tensor}'
    for tensor, fsdp in itertools.product(divisors, divisors)
    if num_devices % (fsdp * tensor) == 0
  ]


def _measure_largest(
  config: Config, make: Make, measure: Measure
) -> dict[str, Any]:
  """Measures the default micro-batch or, if it does not fit, a smaller one.

  One that is given is the only one.
  """
  completed, trainer = make(config)
  found = _try(completed, trainer, measure)
  size = completed.micro_batch_size
  while not _fits(found) and config.micro_batch_size is None and size > 1:
    sizes = memory.micro_batch_sizes(completed, trainer.mesh)
    size = sizes[sizes.index(size) - 1]
    completed = dataclasses.replace(completed, micro_batch_size=size)
    found = _try(completed, trainer, measure)
  if isinstance(found, Exception):
    raise found
  return found


def _try(
  config: FittedConfig, trainer: Trainer, measure: Measure
) -> dict[str, Any] | jax.errors.JaxRuntimeError:
  """Returns the measurements, or the error of a step that does not fit."""
  try:
    return measure(config, trainer)
  except jax.errors.JaxRuntimeError as error:
    if not memory.is_too_little(error):
      raise
    return error


def _fits(found: dict[str, Any] | Exception) -> bool:
  return isinstance(found, dict) and found['fits']
