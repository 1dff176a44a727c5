"""Compiles for a TPU pod that is not there.

python -m examples.plan --help
"""

from collections.abc import Iterator
import dataclasses
import importlib.metadata
import json
import math
from pathlib import Path
import time
from typing import Any

import jax
import tqdm
import tyro

from examples.gpt2.config import Config, UsageError
from examples.gpt2.devices import chips, hardware, sharding
from examples.gpt2.devices.chips import Chip
from examples.gpt2.presets import PRESETS, resolve
from examples.gpt2.run import memory
from examples.gpt2.run.command import exit_on_error
from examples.gpt2.run.step import Trainer
from examples.plan import programs, report, topology


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compiles the training step for a TPU slice, without one.

  It prints memory, collectives and a roofline's estimate of the time of a step,
  and takes the flags of examples.gpt2.train. Without --micro-batch-size the
  micro-batch is as large as --sequences-per-shard says, and without
  --batch-size the preset's is rounded up to whole micro-batches.
  """

  topology: str = 'v5e:16x16'
  """Kind of chip and extents of the slice, such as v5e:16x16 or v5p:4x8x8."""

  sequences_per_shard: int = 1
  """Sequences that each of the data * fsdp shards of a batch processes at
  once."""

  sweep: bool = False
  """Try every mesh that the model's sizes allow, and rank them."""

  quick: bool = False
  """Let the compiler make the least effort: several times quicker, with less
  overlap of communication and some other figures. Good for --sweep."""

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
    plan(settings)


def plan(settings: Settings) -> dict[str, Any]:
  """Compiles for one mesh, or for all of them, prints tables and writes them.

  Args:
    settings: What to compile, and for what.

  Returns:
    The results, as JSON values.

  Raises:
    UsageError: If the settings are wrong or the compiler is missing.
    OutOfMemoryError: If the step on the one mesh does not fit.
  """
  _check(settings)
  devices = topology.devices(settings.topology)
  chip = chips.find(devices[0].device_kind)
  if math.isnan(chip.hbm):
    raise UsageError(
      f'--topology {settings.topology}: the peaks of {devices[0].device_kind} '
      'are not known to examples/gpt2/devices/chips.py.'
    )
  # Nothing that was compiled here can be run, or found again by a run.
  jax.config.update('jax_enable_compilation_cache', False)
  if settings.sweep:
    results = _sweep(settings, devices, chip)
    print(report.sweep(results))
  else:
    results = _one(settings, devices, chip)
    print(report.one(results))
  if settings.out:
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    settings.out.write_text(json.dumps(results, indent=2) + '\n')
  return results


def _check(settings: Settings) -> None:
  if settings.sequences_per_shard < 1:
    raise UsageError(
      '--sequences-per-shard must be at least 1, got '
      f'{settings.sequences_per_shard}.'
    )
  if settings.sweep and settings.config.mesh:
    raise UsageError(
      '--sweep tries every mesh, so --mesh cannot be given, got --mesh '
      f'{settings.config.mesh}.'
    )


def _one(
  settings: Settings, devices: list[jax.Device], chip: Chip
) -> dict[str, Any]:
  """Returns all figures of one mesh."""
  config, trainer = _trainer(settings, settings.config.mesh, devices)
  start = time.perf_counter()
  with memory.advice(config, trainer):
    step = programs.measure_step(config, trainer, chip, quick=settings.quick)
  seconds = time.perf_counter() - start
  update = programs.measure_update(trainer, chip)
  share = update['estimate']['seconds'] / step['estimate']['seconds']
  return {
    **_head(settings, devices),
    **_sizes(config, trainer),
    **step,
    'update': update | {'share_of_step': share},
    'compile_seconds': seconds,
  }


def _sweep(
  settings: Settings, devices: list[jax.Device], chip: Chip
) -> dict[str, Any]:
  """Returns the figures of all meshes, the best first."""
  rows, left_out = [], {}
  for mesh in tqdm.tqdm(meshes(len(devices)), 'meshes', leave=False):
    try:
      config, trainer = _trainer(settings, mesh, devices)
    except UsageError as error:
      left_out[mesh] = str(error)
    else:
      rows.append(_row(settings, config, trainer, chip))
  rows.sort(key=lambda x: (not x['fits'], x.get('seconds', math.inf)))
  return {**_head(settings, devices), 'rows': rows, 'left_out': left_out}


def meshes(num_devices: int) -> list[str]:
  """Returns all meshes of a number of devices, as ``--mesh`` takes them."""

  def divisors(n: int) -> Iterator[int]:
    return (d for d in range(1, n + 1) if n % d == 0)

  return [
    f'data={num_devices // (fsdp * tensor)},fsdp={fsdp},tensor={tensor}'
    for tensor in divisors(num_devices)
    for fsdp in divisors(num_devices // tensor)
  ]


def _row(
  settings: Settings, config: Config, trainer: Trainer, chip: Chip
) -> dict[str, Any]:
  """Returns what the sweep says of a mesh, that it does not fit included."""
  row = _sizes(config, trainer)
  try:
    step = programs.measure_step(config, trainer, chip, quick=settings.quick)
  except jax.errors.JaxRuntimeError as error:
    return row | {'fits': False, 'error': str(error).splitlines()[0]}
  held = {k: step['memory'][k] for k in ('fits', 'needed', 'available')}
  sent = step['bytes_sent_per_device']
  return row | held | step['estimate'] | {'bytes_sent_per_device': sent}


def _trainer(
  settings: Settings, mesh_text: str, devices: list[jax.Device]
) -> tuple[Config, Trainer]:
  """Returns resolved settings that fit a mesh, and their trainer on it."""
  mesh = sharding.make_mesh(mesh_text, devices)
  config = dataclasses.replace(settings.config, mesh=mesh_text)
  shards = sharding.num_batch_shards(mesh)
  config = fit_batch(config, shards * settings.sequences_per_shard)
  sharding.check_sizes(mesh, config)
  return config, Trainer(config, config.vocab_size, mesh)


def fit_batch(config: Config, micro_batch_size: int) -> Config:
  """Resolves settings, with a batch of whole micro-batches.

  Args:
    config: Settings as the user gave them.
    micro_batch_size: Sequences of a micro-batch, if they do not say.

  Raises:
    UsageError: If the settings are wrong.
  """
  micro = config.micro_batch_size or micro_batch_size
  batch = config.batch_size
  if batch is None:
    batch = -(-PRESETS[config.preset]['batch_size'] // micro) * micro
  return resolve(
    dataclasses.replace(config, batch_size=batch, micro_batch_size=micro)
  )


def _head(settings: Settings, devices: list[jax.Device]) -> dict[str, Any]:
  """Returns what was compiled for, and with what."""
  return {
    'topology': settings.topology,
    'devices': len(devices),
    'device_kind': devices[0].device_kind,
    'quick': settings.quick,
    'versions': hardware.versions()['versions']
    | {'libtpu': importlib.metadata.version('libtpu')},
  }


def _sizes(config: Config, trainer: Trainer) -> dict[str, Any]:
  """Returns what decides the figures, as JSON values."""
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
