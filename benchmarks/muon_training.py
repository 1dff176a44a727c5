"""Losses of a GPT-2 by what orthogonalizes: Optax's Muon, ours, bfloat16.

python -m benchmarks.muon_training --help
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools
from pathlib import Path
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
import tyro

from benchmarks.rounds import write_json
from examples.gpt2.command import columns
from examples.gpt2.config import FittedConfig
from examples.gpt2.data.batches import training_batch, validation_batch
from examples.gpt2.data.tokens import Tokens, load_tokens
from examples.gpt2.devices import sharding
from examples.gpt2.optim.optimizers import (
  dimension_numbers,
  make_schedule,
  with_clips,
)
from examples.gpt2.run.memory import fit
from examples.gpt2.run.step import Trainer, TrainState
from examples.study.scales import SCALES
import merit_optax


@dataclasses.dataclass(frozen=True)
class Settings:
  """Trains with Hyperball on Muon's direction, once with each, and seeds.

  The model is the smallest of examples.study, with the initial weights and the
  learning rate of the trainer's muon-hyperball.
  """

  batch_size: int = 128
  """Sequences of a step."""

  seeds: int = 5
  """Seeds of weights and data."""

  steps: int | None = None
  """Steps of a run. Default: 2.5M tokens, 305 steps at batch 128."""

  first_steps: int = 50
  """Steps whose training losses are compared."""

  out: Path = Path('benchmarks/results/muon_training.json')
  """File of the results."""


def _directions(
  config: FittedConfig, specs: Callable[[Any], Any]
) -> dict[str, optax.GradientTransformation]:
  ours = functools.partial(
    merit_optax.scale_by_muon,
    beta=config.b1,
    weight_dimension_numbers=specs,
  )
  theirs = optax.contrib.scale_by_muon(
    beta=config.b1, weight_dimension_numbers=specs
  )
  return {
    'optax': theirs,
    'optax, other order of sums': _reversed(theirs),
    'float32': ours(),
    'bfloat16': ours(ns_dtype='bfloat16'),
  }


def _reversed(
  direction: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns the same rule for matrices whose rows and columns are reversed.

  It differs by the rounding of sums only, and so shows what rounding does.
  """

  def update(
    updates: optax.Updates, state: Any, params: Any = None
  ) -> tuple[optax.Updates, Any]:
    updates, state = direction.update(
      jax.tree.map(jnp.flip, updates), state, params
    )
    return jax.tree.map(jnp.flip, updates), state

  return optax.GradientTransformation(direction.init, update)


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings = tyro.cli(Settings, args=args, prog='benchmarks.muon_training')
  trial = SCALES['nano'].run(
    'muon-hyperball', settings.batch_size, 1.0, init_scale=2.0
  )
  config: Any = trial.config
  steps = settings.steps or config.steps
  rate = merit_optax.starting_learning_rate('muon_hyperball', steps)
  config = dataclasses.replace(config, steps=steps, learning_rate=rate)
  specs = functools.partial(dimension_numbers, qkv=config.qkv)
  mesh = sharding.make_mesh(config.mesh)
  config = fit(config, mesh)
  tokens = load_tokens(config)
  trainers = {
    name: Trainer(
      config,
      tokens.vocab_size,
      mesh,
      _optimizer(config, direction, specs),
    )
    for name, direction in _directions(config, specs).items()
  }
  runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
  cases = itertools.product(range(settings.seeds), trainers)
  total = settings.seeds * len(trainers)
  for seed, name in tqdm.tqdm(cases, 'runs', total):
    seeded = dataclasses.replace(config, seed=seed)
    first = Trainer(seeded, tokens.vocab_size, mesh, trainers[name].optimizer)
    # The seed is that of the first weights and of the data only, so that steps
    # are compiled once.
    run = _train(trainers[name], first.init(), seeded, tokens)
    runs[name].append(run)
  rows = [
    _row(name, runs[name], runs['optax'], settings.first_steps) for name in runs
  ]
  print(columns(rows))
  write_json(
    settings.out,
    {
      'settings': dataclasses.asdict(settings),
      'steps': steps,
      'learning_rate': rate,
      'rows': rows,
      'final_losses': {
        name: [x['loss'] for x in found] for name, found in runs.items()
      },
    },
  )


def _optimizer(
  config: FittedConfig,
  direction: optax.GradientTransformation,
  specs: Callable[[Any], Any],
) -> optax.GradientTransformation:
  """Returns the trainer's muon-hyperball with another direction."""
  rate = make_schedule(config)
  others = optax.chain(
    merit_optax.scale_by_adam(),
    optax.scale_by_learning_rate(lambda step: rate(step) / 3),
  )
  hidden = merit_optax.hyperball(
    direction, rate, weight_dimension_numbers=specs
  )

  parts = {True: hidden, False: others}
  whole = optax.partition(parts, merit_optax.hidden_matrices)
  return with_clips(whole, config)


def _train(
  trainer: Trainer, state: TrainState, config: FittedConfig, tokens: Tokens
) -> dict[str, Any]:
  """Returns the training losses of a run, and its final validation loss."""
  losses = []
  for step in range(config.steps):
    batch = training_batch(tokens.train, config, step, trainer.mesh)
    state, metrics = trainer.step(state, batch)
    losses.append(metrics['train_loss'])
  batch, count = validation_batch(tokens.validation, config, trainer.mesh)
  found = np.asarray(trainer.sequence_losses(state.params, batch))
  return {
    'train_losses': [float(x) for x in losses],
    'loss': float(found.ravel()[:count].mean(dtype=np.float64)),
  }


def _row(
  name: str,
  runs: list[dict[str, Any]],
  base: list[dict[str, Any]],
  first_steps: int,
) -> dict[str, str]:
  """Returns the table's row of a direction, compared with Optax's."""
  finals = [run['loss'] for run in runs]
  changes = [x['loss'] - y['loss'] for x, y in zip(runs, base, strict=True)]
  relative = max(
    abs(a / b - 1)
    for x, y in zip(runs, base, strict=True)
    for a, b in zip(
      x['train_losses'][:first_steps],
      y['train_losses'][:first_steps],
      strict=True,
    )
  )
  return {
    'products': name,
    'final loss': f'{statistics.mean(finals):.4f}',
    'sd of seeds': f'{statistics.stdev(finals):.4f}' if runs[1:] else '-',
    'over optax, mean': f'{statistics.mean(changes):+.4f}',
    'range': f'{min(changes):+.4f} to {max(changes):+.4f}',
    f'largest difference in {first_steps} steps': f'{relative:.1e}',
  }


if __name__ == '__main__':
  main()
