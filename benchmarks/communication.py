"""Bytes that devices send to each other in a training step, by mesh.

python -m benchmarks.communication --help
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import tqdm
import tyro

from benchmarks.rounds import write_json
from examples.gpt2 import sharding
from examples.gpt2.command import columns, exit_on_error
from examples.gpt2.config import Config, Optimizer, by_name, change
from examples.gpt2.train import parse
from examples.plan import hlo, programs
from examples.plan.collectives import Collective, by_kind, collectives

_PROG = 'benchmarks.communication'


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compiles training steps for emulated CPU devices, and runs none.

  The compiler for CPU combines and places collectives unlike that for TPU, and
  MERIT reduces twice as many numbers there: see examples.plan for TPUs. The
  model is that of the trainer's arguments, such as a preset and --num-layers.
  """

  optimizers: tuple[Optimizer, ...] = ('merit', 'lamb', 'adamw')
  """Optimizers to compile."""

  meshes: tuple[str, ...] = ('data=8', 'fsdp=8', 'data=2,tensor=4')
  """Meshes of all devices."""

  devices: int = 8
  """Number of emulated devices."""

  micro_batches: int = 2
  """Micro-batches of a step, of one sequence a device."""

  out: Path = Path('benchmarks/results/communication.json')
  """File of the results."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings, others = tyro.cli(
    Settings, args=args, prog=_PROG, return_unknown_args=True
  )
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', settings.devices)
  cases = [(m, o) for m in settings.meshes for o in settings.optimizers]
  with exit_on_error():
    model = parse(others, _PROG)
    rows = [
      _row(settings, dataclasses.replace(model, mesh=mesh, optimizer=optimizer))
      for mesh, optimizer in tqdm.tqdm(cases, 'compiling', leave=False)
    ]
  print(_table(rows))
  sizes = {name: by_name(model)[name] for name in ('preset', 'num_layers')}
  values = dataclasses.asdict(settings) | sizes
  write_json(settings.out, {'settings': values, 'rows': rows})


def _row(settings: Settings, config: Config) -> dict[str, Any]:
  """Returns what a step and its update alone send."""
  shards = sharding.num_batch_shards(sharding.make_mesh(config.mesh))
  config = change(
    config,
    batch_size=settings.devices * settings.micro_batches,
    micro_batch_size=settings.devices // shards,
    unroll=1,
  )
  fitted, trainer = programs.make_trainer(config, jax.devices())
  step = _collectives(programs.compile_step(fitted, trainer))
  update = _collectives(programs.compile_update(trainer))
  return {
    'mesh': config.mesh,
    'optimizer': config.optimizer,
    'step': by_kind(step),
    'step_bytes': _sent(step),
    'update': by_kind(update),
    'update_bytes': _sent(update),
    'update_numbers': sum(
      x.executions * math.prod(shape) for x in update for shape in x.shapes
    ),
  }


def _collectives(compiled: jax.stages.Compiled) -> list[Collective]:
  return collectives(hlo.parse(compiled.as_text() or ''))


def _sent(collectives: list[Collective]) -> float:
  return sum(x.sent_bytes for x in collectives)


def _table(rows: list[dict[str, Any]]) -> str:
  """Returns the bytes that a device sends, in MB, by kind."""
  kinds = sorted({kind for row in rows for kind in row['step']})
  return columns(
    [
      {'mesh': row['mesh'], 'optimizer': row['optimizer']}
      | {
        f'{kind}, MB': _megabytes(
          row['step'].get(kind, {}).get('sent_bytes', 0.0)
        )
        for kind in kinds
      }
      | {
        'step, MB': _megabytes(row['step_bytes']),
        'update alone, MB': _megabytes(row['update_bytes']),
        'of the step': f'{row["update_bytes"] / row["step_bytes"]:.2%}',
      }
      for row in rows
    ]
  )


def _megabytes(size: float) -> str:
  return f'{size / 1e6:.3f}'


if __name__ == '__main__':
  main()
