"""Bytes that an optimizer's update moves on TPUs or GPUs, as compiled.

python -m benchmarks.pod_update --help
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import optax
import tqdm
import tyro

from benchmarks.rounds import write_json
from examples.gpt2.run.command import columns, exit_on_error
from examples.plan import hlo, topology
from examples.plan.collectives import collectives
from examples.plan.traffic import hbm_bytes
import merit_optax


def norms_kept(
  direction: optax.GradientTransformation,
  learning_rate: float,
  specs: Any = None,
) -> optax.GradientTransformation:
  """Returns a chain with which each matrix keeps its l2 norm."""
  return optax.chain(
    direction,
    merit_optax.scale_by_l2_norm_trust_ratio(weight_dimension_numbers=specs),
    optax.scale_by_learning_rate(learning_rate),
    merit_optax.keep_matrix_norms(weight_dimension_numbers=specs),
  )


_MAKERS = {
  'adamw': optax.adamw,
  'lamb': optax.lamb,
  'merit': merit_optax.merit,
  'adam-kept': lambda rate: norms_kept(optax.scale_by_adam(), rate),
  'muon': optax.contrib.muon,
  'muon-kept': lambda rate: norms_kept(optax.contrib.scale_by_muon(), rate),
}
_Name = Literal['adamw', 'lamb', 'merit', 'adam-kept', 'muon', 'muon-kept']


@dataclasses.dataclass(frozen=True)
class Settings:
  """Compiles update and application of one float32 matrix for TPUs or GPUs.

  None is needed, but their compiler: pip install -e '.[pod]', for GPUs
  '.[plan-cuda]'. Shards should be big, or the compiler for TPUs keeps parts of
  them on chip.
  """

  topologies: tuple[str, ...] = ('v5e:4x4', 'v5p:2x2x4')
  """Slices, or hosts x GPUs such as h100:1x8, to compile for."""

  optimizers: tuple[_Name, ...] = ('adamw', 'lamb', 'merit')
  """Optimizers to compile; the kept ones end with ``keep_matrix_norms``."""

  rows: int = 32768
  """Rows of a device's shard."""

  columns: int = 16384
  """Columns of a device's shard."""

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
  write_json(
    settings.out,
    {'shard': [settings.rows, settings.columns], 'rows': rows},
  )


def _row(settings: Settings, name: str, optimizer: str) -> dict[str, Any]:
  mesh = _mesh(topology.devices(name))
  compiled = _compile(settings, _MAKERS[optimizer](1e-3), mesh)
  program = hlo.parse(compiled.as_text())
  found = collectives(program)
  size = settings.rows * settings.columns
  shapes = [shape for x in found for shape in x.shapes]
  # The compiler for GPUs has none.
  cost = compiled.cost_analysis() or {}
  return {
    'topology': name,
    'optimizer': optimizer,
    'bytes moved per parameter': hbm_bytes(program) / size,
    'by cost_analysis': cost.get('bytes accessed', math.nan) / size,
    'temporary bytes per parameter': (
      compiled.memory_analysis().temp_size_in_bytes / size
    ),
    'collectives': ', '.join(sorted({x.kind for x in found})),
    'numbers reduced': sum(map(math.prod, shapes)),
    'bytes sent per parameter': sum(x.sent_bytes for x in found) / size,
  }


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


def _compile(
  settings: Settings, optimizer: optax.GradientTransformation, mesh: Mesh
) -> jax.stages.Compiled:
  def step(
    param: jax.Array, state: Any, gradient: jax.Array
  ) -> tuple[jax.Array, Any]:
    updates, state = optimizer.update(gradient, state, param)
    return optax.apply_updates(param, updates), state

  shape = (
    settings.rows * mesh.shape['rows'],
    settings.columns * (mesh.shape['columns']),
  )
  matrix = jax.ShapeDtypeStruct(
    shape, 'float32', sharding=NamedSharding(mesh, P('rows', 'columns'))
  )
  state = jax.tree.map(
    lambda x: (
      matrix
      if x.shape == shape
      else jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, P())
      )
    ),
    jax.eval_shape(optimizer.init, matrix),
  )
  shardings = jax.tree.map(lambda x: x.sharding, (matrix, state))
  with jax.set_mesh(mesh):
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    return compiled.lower(matrix, state, matrix).compile()


def _text(value: Any) -> str:
  return f'{value:.5g}' if isinstance(value, float) else str(value)


if __name__ == '__main__':
  main()
