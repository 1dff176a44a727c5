"""All configurations of a step: mesh, rematerialization, and micro-batch."""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Any, get_args

import jax
import tqdm

from examples.gpt2 import memory
from examples.gpt2.config import Config, Remat, UsageError, change
from examples.gpt2.step import Trainer
from examples.plan import programs

Measure = Callable[[Config, Trainer], dict[str, Any]]
"""Function to the measurements of a step."""


def measure_all(
  config: Config, devices: list[jax.Device], measure: Measure
) -> dict[str, Any]:
  """Returns the measurements of all ways, the quickest first.

  Times without any overlap of compute, memory and network rank them. Meshes
  that the trainer refuses, and ways that the compiler does, mostly for lack of
  memory, are listed by the reason.
  """
  rows: list[dict[str, Any]] = []
  left_out: dict[str, list[str]] = {}
  for way in tqdm.tqdm(ways(config, len(devices)), 'compiling', leave=False):
    try:
      rows.append(_measure_largest(way, devices, measure))
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
    change(config, mesh=mesh, remat=remat)
    for mesh in meshes(num_devices)
    for remat in values[values.index(config.model.remat) :]
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
  config: Config, devices: list[jax.Device], measure: Measure
) -> dict[str, Any]:
  """Measures the largest micro-batch that fits, up to the setting."""
  fitted, trainer = programs.make_trainer(config, devices)
  sizes = [
    n
    for n in memory.micro_batch_sizes(fitted, trainer.mesh)
    if n <= fitted.micro_batch_size
  ]
  while True:
    smaller = dataclasses.replace(fitted, micro_batch_size=sizes.pop())
    try:
      found = measure(smaller, trainer)
    except jax.errors.JaxRuntimeError as error:
      if not sizes or not memory.is_too_little(error):
        raise
      continue
    if found['fits'] or not sizes:
      return found
