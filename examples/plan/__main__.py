"""Compiles the training step for a TPU slice, without one.

python -m examples.plan --help
"""

import dataclasses
import importlib.metadata
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import tqdm
import tyro

from examples.gpt2.config import Config, UsageError
from examples.gpt2.devices import chips, hardware, sharding
from examples.gpt2.presets import resolve
from examples.gpt2.run import memory
from examples.gpt2.run.command import exit_on_error
from examples.gpt2.run.step import Trainer
from examples.plan import programs, report, topology


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compiles the training step for a TPU slice, without one.

  It prints memory, collectives and a roofline's estimate of the time of a step
  of examples.gpt2.train, whose flags it takes.
  """

  topology: str = 'v5e:16x16'
  """Kind of chip and extents of the slice, such as v5e:16x16 or v5p:4x8x8."""

  sweep: bool = False
  """Try every mesh that the model's sizes allow, and rank them."""

  quick: bool = False
  """Let the compiler make the least effort: several times quicker, with less
  overlap of communication and other traffic. Good for --sweep."""

  out: Path | None = None
  """JSON file of the results."""

  config: tyro.conf.OmitArgPrefixes[Config] = Config()  # noqa: RUF009
  """Flags of examples.gpt2.train."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Args:
    args: Arguments; those of the process by default.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a missing
      compiler, and 4 if the step does not fit into the memory of a device.
  """
  settings = tyro.cli(Settings, args=args, prog='python -m examples.plan')
  with exit_on_error():
    _plan(settings)


def _plan(settings: Settings) -> None:
  """Compiles for one mesh, or for all of them, prints tables, writes JSON."""
  if settings.sweep and settings.config.mesh:
    raise UsageError(
      '--sweep tries every mesh, so --mesh cannot be given, got --mesh '
      f'{settings.config.mesh}.'
    )
  devices = topology.devices(settings.topology)
  kind = devices[0].device_kind
  if math.isnan(chips.find(kind).hbm):
    raise UsageError(
      f'--topology {settings.topology}: the peaks of {kind} are not known to '
      'examples/gpt2/devices/chips.py.'
    )
  # Nothing that was compiled here can be run, or found again by a run.
  jax.config.update('jax_enable_compilation_cache', False)
  results = {
    'topology': settings.topology,
    'devices': len(devices),
    'device_kind': kind,
    'quick': settings.quick,
    'versions': hardware.versions()['versions']
    | {'libtpu': importlib.metadata.version('libtpu')},
  }
  if settings.sweep:
    results |= _sweep(settings, devices)
    print(report.sweep(results))
  else:
    results |= _one(settings.config, devices, quick=settings.quick)
    print(report.one(results))
  if settings.out:
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(results, indent=2) + '\n')


def _one(
  config: Config, devices: list[jax.Device], *, quick: bool
) -> dict[str, Any]:
  """Returns the measurements of one mesh."""
  config, trainer = _trainer(config, devices)
  with memory.advice(config, trainer):
    step = programs.measure_step(config, trainer, quick=quick)
  update = programs.measure_update(trainer)
  share = update['update']['seconds'] / step['step']['seconds']
  return _sizes(config, trainer) | step | update | {'update_share': share}


def _sweep(settings: Settings, devices: list[jax.Device]) -> dict[str, Any]:
  """Returns the measurements of all meshes, the best first."""
  rows, left_out = [], {}
  for mesh in tqdm.tqdm(meshes(len(devices)), 'meshes', leave=False):
    config = dataclasses.replace(settings.config, mesh=mesh)
    try:
      config, trainer = _trainer(config, devices)
      step = programs.measure_step(config, trainer, quick=settings.quick)
    except (UsageError, jax.errors.JaxRuntimeError) as error:
      left_out[mesh] = str(error).splitlines()[0]
    else:
      rows.append(_sizes(config, trainer) | step)
  rows.sort(key=lambda x: (not x['fits'], x['step']['seconds']))
  return {'rows': rows, 'left_out': left_out}


def meshes(num_devices: int) -> list[str]:
  """Returns all meshes of a number of devices, as ``--mesh`` takes them."""
  divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
  return [
    f'data={num_devices // (fsdp * tensor)},fsdp={fsdp},tensor={tensor}'
    for tensor, fsdp in itertools.product(divisors, divisors)
    if num_devices % (fsdp * tensor) == 0
  ]


def _trainer(
  config: Config, devices: list[jax.Device]
) -> tuple[Config, Trainer]:
  """Returns settings and trainer as examples.gpt2.train makes them."""
  config = resolve(config)
  mesh = sharding.make_mesh(config.mesh, devices)
  config = memory.fit(config, mesh)
  return config, Trainer(config, config.vocab_size, mesh)


def _sizes(config: Config, trainer: Trainer) -> dict[str, Any]:
  """Returns what decides the measurements, as JSON values."""
  names = (
    'preset', 'optimizer', 'dtype', 'remat', 'context_length', 'batch_size',
    'micro_batch_size', 'steps',
  )  # fmt: skip
  mesh = ','.join(f'{k}={n}' for k, n in trainer.mesh.shape.items())
  return {name: getattr(config, name) for name in names} | {
    'mesh': mesh,
    'batch_shards': sharding.num_batch_shards(trainer.mesh),
    'num_params': trainer.num_params,
  }


if __name__ == '__main__':
  main()
