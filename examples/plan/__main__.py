"""Compiles the training step for TPUs or GPUs, without any.

python -m examples.plan --help
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import tyro

from examples.gpt2 import memory
from examples.gpt2.command import exit_on_error, format_bytes
from examples.gpt2.config import Config, UsageError, resolve
from examples.gpt2.hardware import Chip, find_chip
from examples.gpt2.storage import as_path, make_folder, write_whole
from examples.gpt2.train import parse
from examples.plan import programs, report, sweep, topology

_PROG = 'python -m examples.plan'


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compiles the training step for TPUs or GPUs, without any.

  It prints memory, collectives and a roofline's estimate of the time of a step
  of examples.gpt2.train, and takes all of its arguments too, such as a preset,
  --mesh, --dtype and --remat: see python -m examples.gpt2.train --help.
  """

  # Kind of chip, and extents of the slice, such as v5e:16x16 or v5p:4x8x8, or
  # hosts x GPUs of each, such as h100:8x8; a100, h200 and b200 too.
  topology: str = 'v5e:16x16'
  # Try every mesh that the model's sizes allow, the rematerialization of
  # --remat or more, and the largest micro-batch up to --micro-batch-size that
  # fits, and rank them.
  sweep: bool = False
  # Let the compiler make the least effort: several times quicker, with less
  # overlap of communication and other traffic. Good for --sweep.
  quick: bool = False
  # GB/s of a GPU over NVLink, one way. Default: the data sheet's.
  nvlink: float | None = None
  # GB/s of a GPU to other hosts, one way. Default: 50, an adapter of 400 Gb/s
  # for each; a100: 25.
  network: float | None = None
  # JSON file of the results.
  out: Path | None = None


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a missing
      compiler, and 4 if the step does not fit into the memory of a device.
  """
  with exit_on_error():
    _plan(*read(args))


def read(args: list[str] | None) -> tuple[Settings, Config]:
  """Returns the planner's settings and the trainer's."""
  settings, others = tyro.cli(
    Settings, args=args, prog=_PROG, return_unknown_args=True
  )
  return settings, parse(others, _PROG)


def _plan(settings: Settings, config: Config) -> None:
  """Compiles for one mesh, or for all of them, prints tables, writes JSON."""
  if settings.sweep and config.mesh:
    raise UsageError(
      '--sweep tries every mesh, so --mesh cannot be given, got --mesh '
      f'{config.mesh}.'
    )
  resolve(config)  # Mistakes that another mesh does not mend.
  out = settings.out and as_path(settings.out)
  if out:
    make_folder(out.parent)
  devices = topology.devices(settings.topology)
  chip = _chip(settings, devices[0].device_kind)
  # Nothing that was compiled here can be run, or found again by a run.
  jax.config.update('jax_enable_compilation_cache', False)
  measure = functools.partial(
    programs.measure_step, chip=chip, quick=settings.quick
  )
  results: dict[str, Any] = {
    'topology': settings.topology,
    'devices': len(devices),
    'device_kind': devices[0].device_kind,
    'quick': settings.quick,
    'jax': jax.__version__,
    **topology.compiler(settings.topology),
  }
  if settings.sweep:
    results |= sweep.measure_all(config, devices, measure)
    print(report.sweep(results))
  else:
    results |= _one(config, devices, chip, measure)
    print(report.one(results))
  if out:
    write_whole(out, (json.dumps(results, indent=2) + '\n').encode())
  # The compiler for GPUs compiles what does not fit too.
  if not settings.sweep and not results['fits']:
    needed, available = (
      format_bytes(results[f'{x}_bytes']) for x in ('needed', 'available')
    )
    raise memory.OutOfMemoryError(
      f'out of memory: the step needs {needed} of a device that has {available}'
    )


def _chip(settings: Settings, kind: str) -> Chip:
  """Returns the peaks of a device, with the bandwidths that are given."""
  chip = find_chip(kind)
  if math.isnan(chip.hbm):
    raise UsageError(
      f'--topology {settings.topology}: the peaks of {kind} are not known to '
      'examples/gpt2/hardware.py.'
    )
  given = {
    'link_bandwidth': ('--nvlink', settings.nvlink),
    'network_bandwidth': ('--network', settings.network),
  }
  for name, (flag, value) in given.items():
    if value is None:
      continue
    if math.isnan(chip.network_bandwidth) or not value > 0:
      raise UsageError(f'{flag} is GB/s of a GPU, above 0, got {value}.')
    chip = chip._replace(**{name: value * 1e9})
  return chip


def _one(
  config: Config,
  devices: list[jax.Device],
  chip: Chip,
  measure: sweep.Measure,
) -> dict[str, Any]:
  """Returns the measurements of one mesh."""
  fitted, trainer = programs.make_trainer(config, devices)
  with memory.advice(fitted, trainer):
    step = measure(fitted, trainer)
  update = programs.measure_update(trainer, chip)
  return step | {
    'update': update,
    'update_share': update['seconds'] / step['seconds'],
    'update_bytes_per_parameter': (
      4 * update['hbm_bytes'] / step['memory']['parameters']
    ),
  }


if __name__ == '__main__':
  main()
