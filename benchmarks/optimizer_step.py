"""Time, memory and compilation of an optimizer's step, beside its peers.

python -m benchmarks.optimizer_step --help
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools
from pathlib import Path
import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import tqdm
import tyro

from benchmarks.rounds import Timing, free_memory, race, ratio, write_json
from examples.gpt2 import sharding
from examples.gpt2.command import columns, exit_on_error
from examples.gpt2.optimizers import dimension_numbers
from examples.gpt2.resolve import resolve
from examples.gpt2.step import Trainer
from examples.gpt2.train import parse
import merit_optax

# muon is Optax's, whole-muon the same with ours; products of -bfloat16 are so.
Name = Literal[
  'adamw', 'lamb', 'merit', 'muon', 'whole-muon', 'adam-hyperball',
  'muon-hyperball', 'muon-hyperball-bfloat16',
]  # fmt: skip
_RATE = 1e-3
_PROG = 'benchmarks.optimizer_step'


Layers = Literal['stacked', 'unstacked']


@dataclasses.dataclass(frozen=True)
class Settings:
  """Times update and apply, jitted and donated, in turns.

  Every preset is measured with every layout and depth. Where memory is short,
  steps are compiled only.
  """

  presets: tuple[str, ...] = ('small',)
  """Models whose parameters to update."""

  layers: tuple[Layers, ...] = ('stacked', 'unstacked')
  """Whether the layers' parameters are stacked on a leading axis."""

  num_layers: tuple[int, ...] = ()
  """Layers instead of the presets'."""

  optimizers: tuple[Name, ...] = ('adamw', 'lamb', 'merit')
  """Optimizers; ratios are to the first."""

  steps: int = 2
  """Steps in a round."""

  rounds: int = 7
  """Rounds, in each of which every optimizer has its turn; 0 compiles only."""

  out: Path = Path('benchmarks/results/optimizer_step.json')
  """File of the results; a bar chart stands beside it."""


class Case(NamedTuple):
  """A tree of parameters.

  Attributes:
    name: What it is, for people.
    layers: How the layers lie.
    shapes: Shapes of the parameters.
    num_params: Number of parameters.
  """

  name: str
  layers: Layers
  shapes: Any
  num_params: int


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled step.

  Attributes:
    init: Optimizer's initialization.
    step: From parameters, state (both donated) and gradients to the new ones.
    figures: What the compiler says of it.
  """

  init: Callable[[Any], Any]
  step: Callable[[Any, Any, Any], tuple[Any, Any]]
  figures: dict[str, float]


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings = tyro.cli(Settings, args=args, prog=_PROG)
  rows = []
  for preset, layers, depth in itertools.product(
    settings.presets, settings.layers, settings.num_layers or (None,)
  ):
    with exit_on_error():
      case = make_case(preset, layers, depth)
    rows += _measure(case, settings)
  values = dataclasses.asdict(settings)
  write_json(settings.out, {'settings': values, 'rows': rows})
  _draw(rows, settings.out.with_suffix('.png'))
  print(f'wrote {settings.out} and {settings.out.with_suffix(".png")}')


def make_case(preset: str, layers: Layers, num_layers: int | None) -> Case:
  """Returns the parameters of a preset's model."""
  depth = ['--num-layers', str(num_layers)] if num_layers else []
  config = resolve(parse([preset, *depth], _PROG))
  state = Trainer(
    config, config.model.vocab_size, sharding.make_mesh('')
  ).shapes
  params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(state.params)
  )
  if layers == 'unstacked':
    layer = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params['blocks']
    )
    params['blocks'] = {str(i): layer for i in range(config.model.num_layers)}
  count = sum(x.size for x in jax.tree.leaves(params))
  name = f'{preset}, {config.model.num_layers} layers {layers}'
  return Case(name, layers, params, count)


def _measure(case: Case, settings: Settings) -> list[dict[str, Any]]:
  """Compiles and times the optimizers' steps; prints and returns a table."""
  programs = {
    name: compile_step(make_optimizer(name), case)
    for name in tqdm.tqdm(settings.optimizers, case.name, leave=False)
  }
  timings = {}
  if settings.rounds and _fits(case, programs):
    gradients = _random(case.shapes)
    runs = {
      name: _runner(program, gradients, settings.steps)
      for name, program in programs.items()
    }
    timings = race(runs, settings.rounds)
  rows = [
    {'case': case.name, 'parameters': case.num_params, 'optimizer': name}
    | programs[name].figures
    | _times(name, timings, settings)
    for name in programs
  ]
  print(f'{case.name}, {case.num_params:,} parameters')
  shown = [
    {
      k.replace('_', ' ').replace(' per parameter', '/parameter'): _shown(v)
      for k, v in row.items()
      if k not in ('case', 'parameters')
    }
    for row in rows
  ]
  print(columns(shown))
  return rows


def _fits(case: Case, programs: dict[str, Program]) -> bool:
  """Whether parameters, gradients, states and temporaries fit into memory."""
  temporary = max(
    x.figures['temporary_bytes_per_parameter'] for x in programs.values()
  )
  need = case.num_params * (4 + 12 * len(programs) + temporary)
  has = free_memory()
  if need > has:
    print(
      f'{case.name}: compiled only, since it would take {need / 1e9:.1f} GB '
      f'and {has / 1e9:.1f} GB are free'
    )
  return need <= has


def make_optimizer(name: Name) -> optax.GradientTransformation:
  """Returns an optimizer by its name, with weight decay."""
  specs = functools.partial(dimension_numbers, qkv='fused')
  return {
    'adamw': lambda: optax.adamw(_RATE, b2=0.95, weight_decay=0.01),
    'lamb': lambda: optax.lamb(_RATE, b2=0.95, weight_decay=0.01),
    'merit': lambda: merit_optax.merit(
      _RATE, weight_decay=0.01, weight_dimension_numbers=specs
    ),
    'muon': lambda: optax.contrib.muon(
      _RATE,
      weight_decay=0.01,
      muon_weight_dimension_numbers=lambda params: jax.tree.map(
        lambda _, is_hidden, spec: spec if is_hidden else None,
        params,
        merit_optax.hidden_matrices(params),
        specs(params),
      ),
    ),
    'whole-muon': lambda: _whole_muon(specs),
    'adam-hyperball': lambda: merit_optax.adam_hyperball(
      _RATE, weight_dimension_numbers=specs
    ),
    'muon-hyperball': lambda: merit_optax.muon_hyperball(
      _RATE, weight_dimension_numbers=specs
    ),
    'muon-hyperball-bfloat16': lambda: merit_optax.muon_hyperball(
      _RATE, ns_dtype='bfloat16', weight_dimension_numbers=specs
    ),
  }[name]()


def _whole_muon(specs: Callable[[Any], Any]) -> optax.GradientTransformation:
  """Returns Optax's Muon with ``merit_optax.scale_by_muon`` in it."""
  muon = optax.chain(
    merit_optax.scale_by_muon(weight_dimension_numbers=specs),
    optax.add_decayed_weights(0.01),
    optax.scale_by_learning_rate(_RATE),
  )
  adam = optax.adamw(_RATE, weight_decay=0.0, nesterov=True)
  parts = {True: muon, False: adam}
  return optax.partition(parts, merit_optax.hidden_matrices)


def compile_step(
  optimizer: optax.GradientTransformation, case: Case
) -> Program:
  """Compiles update and apply, which donate parameters and state."""

  def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  state_shapes = jax.eval_shape(optimizer.init, case.shapes)
  start = time.perf_counter()
  compiled = (
    jax.jit(step, donate_argnums=(0, 1))
    .lower(case.shapes, state_shapes, case.shapes)
    .compile()
  )
  seconds = time.perf_counter() - start
  moved = (compiled.cost_analysis() or {}).get('bytes accessed', 0)
  temporary = compiled.memory_analysis().temp_size_in_bytes
  figures = {
    'compile_seconds': seconds,
    'hlo_kilobytes': len(compiled.as_text() or '') / 1000,
    'bytes_moved_per_parameter': moved / case.num_params,
    'temporary_bytes_per_parameter': temporary / case.num_params,
  }
  return Program(optimizer.init, compiled, figures)


def _runner(program: Program, gradients: Any, steps: int) -> Callable[[], None]:
  """Returns a function that takes steps and waits for their end."""
  params = jax.tree.map(jnp.copy, gradients)
  state = program.init(params)

  def run() -> None:
    nonlocal params, state
    for _ in range(steps):
      params, state = program.step(params, state, gradients)
    jax.block_until_ready(params)

  return run


def _random(shapes: Any) -> Any:
  generator = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jnp.asarray(
      0.02 * generator.standard_normal(x.shape, dtype=x.dtype)
    ),
    shapes,
  )


def _times(
  name: str, timings: dict[str, Timing], settings: Settings
) -> dict[str, float]:
  if not timings:
    return {}
  return {
    'seconds': timings[name].median / settings.steps,
    'spread': timings[name].spread,
    'time_ratio': ratio(timings, name, settings.optimizers[0]),
  }


def _shown(value: Any) -> str:
  return value if isinstance(value, str) else f'{value:.3g}'


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
  """Draws the figures as bars, a group for each case."""
  keys = [
    'time_ratio', 'temporary_bytes_per_parameter', 'bytes_moved_per_parameter',
    'compile_seconds', 'hlo_kilobytes',
  ]  # fmt: skip
  keys = [key for key in keys if any(key in row for row in rows)]
  cases = list(dict.fromkeys(row['case'] for row in rows))
  names = list(dict.fromkeys(row['optimizer'] for row in rows))
  height = 1 / (len(names) + 1)
  size = 2 + 2.6 * len(keys), 1.5 + 0.6 * len(cases)
  figure = Figure(figsize=size, layout='constrained')
  all_axes = figure.subplots(1, len(keys), sharey=True)
  for axes, key in zip(all_axes, keys, strict=True):
    for i, name in enumerate(names):
      bars = {
        cases.index(row['case']) + (i + 0.5) * height: row.get(key, 0)
        for row in rows
        if row['optimizer'] == name
      }
      axes.barh(bars.keys(), bars.values(), 0.9 * height, label=name)
    axes.set_title(key.replace('_', ' '), fontsize=9)
    axes.set_yticks([i + len(names) * height / 2 for i in range(len(cases))])
    axes.set_yticklabels(cases)
  all_axes[0].invert_yaxis()
  figure.legend(
    *all_axes[0].get_legend_handles_labels(),
    loc='outside lower center',
    ncols=len(names),
  )
  figure.savefig(path, dpi=100)


if __name__ == '__main__':
  main()
