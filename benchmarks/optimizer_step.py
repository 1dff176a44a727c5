"""Time, memory and compilation of an optimizer's step, beside its peers.

python -m benchmarks.optimizer_step --help
"""

from collections.abc import Callable
import dataclasses
import functools
from pathlib import Path
import time
from typing import Any, Literal

import jax
import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402
import optax  # noqa: E402
import tqdm  # noqa: E402
import tyro  # noqa: E402

from benchmarks.rounds import Timing, race, ratio, write_json  # noqa: E402
from examples.gpt2 import sharding  # noqa: E402
from examples.gpt2.config import Config, Preset  # noqa: E402
from examples.gpt2.optimizers import dimension_numbers  # noqa: E402
from examples.gpt2.presets import resolve  # noqa: E402
from examples.gpt2.training import Trainer  # noqa: E402
import merit_optax  # noqa: E402

Name = Literal['adamw', 'lamb', 'merit', 'muon']
_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Settings:
  """Times update and apply, jitted and donated, in turns."""

  preset: Preset = 'small'
  """Model whose parameters to update."""

  layers: Literal['stacked', 'unstacked'] = 'stacked'
  """Whether the layers' parameters are stacked on a leading axis."""

  num_layers: int | None = None
  """Layers instead of the preset's."""

  optimizers: tuple[Name, ...] = ('adamw', 'lamb', 'merit')
  """Optimizers; ratios are to the first."""

  steps: int = 3
  """Steps in a round."""

  rounds: int = 7
  """Rounds, in each of which every optimizer has its turn; 0 compiles only."""

  out: Path = Path('benchmarks/results/optimizer_step.json')
  """File of the results; a bar chart stands beside it."""


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled step.

  Attributes:
    run: Function that takes some steps and waits for their end.
    figures: What the compiler says of it.
  """

  run: Callable[[], None]
  figures: dict[str, float]


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings = tyro.cli(Settings, args=args, prog='benchmarks.optimizer_step')
  params = make_shapes(settings)
  programs = {
    name: compile_step(make_optimizer(name, settings.layers), params, settings)
    for name in tqdm.tqdm(settings.optimizers, 'compiling', leave=False)
  }
  timings = {}
  if settings.rounds:
    timings = race({n: p.run for n, p in programs.items()}, settings.rounds)
  rows = [_row(name, programs, timings, settings) for name in programs]
  count = sum(x.size for x in jax.tree.leaves(params))
  print(f'{settings.preset}, {settings.layers}, {count:,} parameters')
  for row in rows:
    print('  '.join(f'{k} {_shown(v)}' for k, v in row.items()))
  values = {k: str(v) for k, v in dataclasses.asdict(settings).items()}
  write_json(settings.out, {'settings': values, 'rows': rows})
  _draw(rows, settings.out.with_suffix('.png'))


def make_shapes(settings: Settings) -> Any:
  """Returns the shapes of the parameters of a model."""
  config = resolve(
    Config(preset=settings.preset, num_layers=settings.num_layers)
  )
  params = Trainer(config, config.vocab_size, sharding.make_mesh('')).shapes
  params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(params.params)
  )
  if settings.layers == 'unstacked':
    layer = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params['blocks']
    )
    params['blocks'] = {str(i): layer for i in range(config.num_layers)}
  return params


def make_optimizer(name: Name, layers: str) -> optax.GradientTransformation:
  """Returns an optimizer by its name, with weight decay."""
  specs = functools.partial(
    dimension_numbers, qkv='fused', stacked=layers == 'stacked'
  )
  return {
    'adamw': lambda: optax.adamw(_RATE, b2=0.95, weight_decay=0.01),
    'lamb': lambda: optax.lamb(_RATE, b2=0.95, weight_decay=0.01),
    'merit': lambda: merit_optax.merit(
      _RATE, weight_decay=0.01, weight_dimension_numbers=specs
    ),
    'muon': lambda: optax.contrib.muon(
      _RATE,
      weight_decay=0.01,
      muon_weight_dimension_numbers=lambda params: _of_hidden_matrices(
        specs(params), params
      ),
    ),
  }[name]()


def _of_hidden_matrices(specs: Any, params: Any) -> Any:
  """Returns the specs of the layers' kernels, and None for the rest."""

  def keep(path: tuple[Any, ...], _: Any, spec: Any) -> Any:
    name = sharding.path_name(path)
    is_kernel = name.startswith('blocks.') and name.endswith('.kernel')
    return spec if is_kernel else None

  return jax.tree.map_with_path(keep, params, specs)


def compile_step(
  optimizer: optax.GradientTransformation, shapes: Any, settings: Settings
) -> Program:
  """Compiles update and apply, which donate parameters and state."""

  def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  state_shapes = jax.eval_shape(optimizer.init, shapes)
  start = time.perf_counter()
  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
    shapes, state_shapes, shapes
  )
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  count = sum(x.size for x in jax.tree.leaves(shapes))
  cost = compiled.cost_analysis() or {}
  memory = compiled.memory_analysis()
  figures = {
    'compile_seconds': seconds,
    'hlo_kilobytes': len(compiled.as_text()) / 1000,
    'bytes_moved_per_parameter': cost.get('bytes accessed', 0) / count,
    'temporary_bytes_per_parameter': memory.temp_size_in_bytes / count,
  }
  return Program(_runner(compiled, optimizer, shapes, settings.steps), figures)


def _runner(
  compiled: Any,
  optimizer: optax.GradientTransformation,
  shapes: Any,
  steps: int,
) -> Callable[[], None]:
  """Returns a function that takes steps; arrays are made on its first call."""
  arrays: list[Any] = []

  def run() -> None:
    if not arrays:
      make = jax.jit(lambda: _random(shapes))
      arrays.extend([make(), optimizer.init(make()), make()])
    params, state, gradients = arrays
    for _ in range(steps):
      params, state = compiled(params, state, gradients)
    jax.block_until_ready(params)
    arrays[:2] = params, state

  return run


def _random(shapes: Any) -> Any:
  leaves, treedef = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(0), len(leaves))
  arrays = [
    0.02 * jax.random.normal(key, x.shape, x.dtype)
    for key, x in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(treedef, arrays)


def _row(
  name: str,
  programs: dict[str, Program],
  timings: dict[str, Timing],
  settings: Settings,
) -> dict[str, Any]:
  row: dict[str, Any] = {'name': name} | programs[name].figures
  if timings:
    row |= {
      'seconds': timings[name].median / settings.steps,
      'spread': timings[name].spread,
      'time_ratio': ratio(timings, name, settings.optimizers[0]),
    }
  return row


def _shown(value: Any) -> str:
  return value if isinstance(value, str) else f'{value:.3g}'


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
  """Draws the figures as bars."""
  names = [key for key in rows[0] if key not in ('name', 'spread', 'seconds')]
  figure, all_axes = plt.subplots(1, len(names), figsize=(3 * len(names), 3))
  for axes, key in zip(all_axes, names, strict=True):
    axes.bar([row['name'] for row in rows], [row[key] for row in rows])
    axes.set_title(key.replace('_', ' '), fontsize=9)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == '__main__':
  main()
