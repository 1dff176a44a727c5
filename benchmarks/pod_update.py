"""Bytes that an optimizer's update moves on TPUs or GPUs, as compiled.

python -m benchmarks.pod_update --help
"""

from collections.abc import Callable
import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import optax
from optax.contrib import MuonDimensionNumbers
import tqdm
import tyro

from benchmarks.hlo import collectives
from benchmarks.rounds import write_json
from examples.gpt2 import compile_for, sharding
from examples.gpt2.command import UsageError, columns, exit_on_error
import merit_optax

_Make = Callable[[float, Any, NamedSharding], optax.GradientTransformation]
# From a learning rate, which axes are rows and columns, and where they lie.
_MAKERS: dict[str, _Make] = {
  'adamw': lambda rate, *_: optax.adamw(rate),
  'lamb': lambda rate, *_: optax.lamb(rate),
  'merit': lambda rate, specs, _: merit_optax.merit(
    rate, weight_dimension_numbers=specs
  ),
  'muon': lambda rate, specs, _: optax.contrib.muon(
    rate, muon_weight_dimension_numbers=specs
  ),
  'adam-hyperball': lambda rate, specs, _: merit_optax.hyperball(
    optax.scale_by_adam(), rate, weight_dimension_numbers=specs
  ),
  'muon-hyperball': lambda rate, specs, place: merit_optax.hyperball(
    merit_optax.scale_by_muon(weight_dimension_numbers=specs, shardings=place),
    rate,
    weight_dimension_numbers=specs,
  ),
}
_Name = Literal[*_MAKERS]  # type: ignore[valid-type]


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compiles update and application of float32 matrices for TPUs or GPUs.

  None is needed, but their compiler: pip install -e '.[tpu-compiler]' or
  '.[gpu-compiler]'. It is one matrix, or, with --shape, the stacked ones of a
  model's layers. Shards should be big, or the compiler for TPUs keeps parts of
  them on chip.
  """

  topologies: tuple[str, ...] = ('v5e:4x4', 'v5p:2x2x4')
  """Slices, or hosts x GPUs such as h100:1x8, to compile for."""

  optimizers: tuple[_Name, ...] = ('adamw', 'lamb', 'merit')
  """Optimizers to compile; muon is Optax's."""

  rows: int = 32768
  """Rows of a device's shard of one matrix, which is split along both axes."""

  columns: int = 16384
  """Columns of it."""

  shape: tuple[int, int, int] | None = None
  """Number, rows and columns of stacked matrices instead."""

  split: tuple[str, str, str] = ('', 'fsdp', '')
  """Axes of the mesh that split the stack (such as experts), the rows and the
  columns of --shape. By default as the trainer splits them."""

  mesh: str | None = None
  """Mesh for --shape, such as fsdp=64; the rest is the axis data, whose devices
  hold copies. Default: all devices are fsdp."""

  out: Path = Path('benchmarks/results/pod_update.json')
  """File of the results."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings = tyro.cli(Settings, args=args, prog='benchmarks.pod_update')
  with exit_on_error():
    rows = [
      _row(settings, name, optimizer)
      for name in settings.topologies
      for optimizer in tqdm.tqdm(settings.optimizers, name, leave=False)
    ]
  print(columns([{k: _text(x) for k, x in row.items()} for row in rows]))
  write_json(settings.out, _sizes(settings) | {'rows': rows})


def _sizes(settings: Settings) -> dict[str, Any]:
  if settings.shape:
    return {'shape': list(settings.shape)}
  return {'shard': [settings.rows, settings.columns]}


def _row(settings: Settings, name: str, optimizer: str) -> dict[str, Any]:
  """Returns what the devices of a topology do, by parameter that one holds."""
  weights = _weights(settings, compile_for.devices(name))
  compiled = _compile(optimizer, weights)
  found = collectives(compiled)
  size = math.prod(weights.sharding.shard_shape(weights.shape))
  # The compiler for GPUs has none.
  cost = compiled.cost_analysis() or {}
  return {
    'topology': name,
    'mesh': ','.join(
      f'{axis}={n}' for axis, n in weights.sharding.mesh.shape.items()
    ),
    'split': str(weights.sharding.spec),
    'optimizer': optimizer,
    'bytes moved per parameter': cost.get('bytes accessed', math.nan) / size,
    'temporary bytes per parameter': (
      compiled.memory_analysis().temp_size_in_bytes / size
    ),
    'collectives': ', '.join(sorted({x.kind for x in found})),
    'bytes in collectives': sum(x.bytes for x in found),
    'bytes sent per parameter': sum(x.sent_bytes for x in found) / size,
  }


def _weights(
  settings: Settings, devices: list[jax.Device]
) -> jax.ShapeDtypeStruct:
  """Returns shape and sharding of the matrix or of the stacked ones."""
  if settings.shape is None:
    mesh, spec = _mesh(devices), P('rows', 'columns')
    shape: tuple[int, ...] = (
      settings.rows * mesh.shape['rows'],
      settings.columns * mesh.shape['columns'],
    )
  else:
    shape, spec = settings.shape, P(*[axis or None for axis in settings.split])
    mesh = sharding.make_mesh(settings.mesh or f'fsdp={len(devices)}', devices)
    for size, axis in zip(shape, settings.split, strict=True):
      if axis and (axis not in mesh.shape or size % mesh.shape[axis]):
        raise UsageError(
          f'--split must name axes of the mesh {dict(mesh.shape)} that divide '
          f'--shape, got {axis} for {size}.'
        )
  return jax.ShapeDtypeStruct(
    shape, 'float32', sharding=NamedSharding(mesh, spec)
  )


def _mesh(devices: list[jax.Device]) -> Mesh:
  """Returns a mesh of two axes, as near to a square as can be."""
  count = len(devices)
  rows = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
  return jax.make_mesh(
    (rows, count // rows),
    ('rows', 'columns'),
    axis_types=(AxisType.Auto,) * 2,
    devices=devices,
  )


def _compile(name: str, weights: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
  """Compiles an optimizer's update and its application."""
  axes = len(weights.shape)
  specs = MuonDimensionNumbers(axes - 2, axes - 1)
  optimizer = _MAKERS[name](1e-3, specs, weights.sharding)

  def step(
    param: jax.Array, state: Any, gradient: jax.Array
  ) -> tuple[jax.Array, Any]:
    updates, state = optimizer.update(gradient, state, param)
    return optax.apply_updates(param, updates), state

  state = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    jax.eval_shape(optimizer.init, weights),
    merit_optax.state_shardings(optimizer, weights),
  )
  shardings = jax.tree.map(lambda x: x.sharding, (weights, state))
  with jax.set_mesh(weights.sharding.mesh):
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    return compiled.lower(weights, state, weights).compile()


def _text(value: Any) -> str:
  return f'{value:.5g}' if isinstance(value, float) else str(value)


if __name__ == '__main__':
  main()
