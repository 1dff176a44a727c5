"""Bytes that devices send to each other in a training step, by mesh.

python -m benchmarks.communication --help
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import tqdm
import tyro

from benchmarks.hlo import sent_by_kind
from benchmarks.rounds import write_json
from examples.gpt2 import compile_for, sharding
from examples.gpt2.command import columns, exit_on_error
from examples.gpt2.config import Config, Optimizer, by_name, change
from examples.gpt2.resolve import resolve
from examples.gpt2.step import Trainer
from examples.gpt2.train import parse

_PROG = 'benchmarks.communication'


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compiles training steps for emulated CPU devices, and runs none.

  The compiler for CPU combines and places collectives unlike that for TPU, and
  MERIT reduces twice as many numbers there: the trainer's --compile-for is for
  those. The model is that of its arguments, such as a preset and --num-layers.
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
  mesh = sharding.make_mesh(config.mesh)
  config = change(
    config,
    batch_size=settings.devices * settings.micro_batches,
    micro_batch_size=settings.devices // sharding.num_batch_shards(mesh),
    unroll=1,
  )
  fitted = resolve(config, mesh)
  trainer = Trainer(fitted, fitted.model.vocab_size, mesh)
  step = sent_by_kind(compile_for.compile_step(fitted, trainer))
  update = sent_by_kind(compile_for.compile_update(trainer))
  return {
    'mesh': config.mesh,
    'optimizer': config.optimizer,
    'step': step,
    'step_bytes': sum(step.values()),
    'update': update,
    'update_bytes': sum(update.values()),
  }


def _table(rows: list[dict[str, Any]]) -> str:
  """Returns the bytes that a device sends, in MB, by kind."""
  kinds = sorted({kind for row in rows for kind in row['step']})
  return columns(
    [
      {'mesh': row['mesh'], 'optimizer': row['optimizer']}
      | {
        f'{kind}, MB': _megabytes(row['step'].get(kind, 0.0)) for kind in kinds
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
