"""The experiments of the paper: which optimizer, at which batch.

    python -m examples.study.large_batch dry-run   # a minute on a CPU
    python -m examples.study.large_batch ladder    # some hours on two cores
    python -m examples.study.large_batch gpu       # ten minutes on an H100

Each rule updates hidden matrices, the same Adam all else; or it updates
everything. Seed 0 chooses a learning rate for each rule at each batch, other
seeds then train with it. A trial is a line of JSON as soon as it ends, and a
trial that has a line is not run again: repeat a command that was stopped.
"""

from collections.abc import Iterator
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import math
import os
from pathlib import Path
import platform
import re
import time
from typing import Any, TypeAlias

import jax
import tyro

from examples.gpt2.sharding import make_mesh
from examples.study import trainer
from examples.study.settings import PRESETS, Settings, Trial

Losses: TypeAlias = dict[Trial, float]
"""Final validation losses, in nats per token, of the trials that have ended."""

REPEATABLE = 0.003
"""How far apart two runs of a trial can end, in nats per token."""


def plan(settings: Settings, losses: Losses) -> Iterator[Trial]:
  """Yields trials in order; a trial's loss must be there before the next one.

  Args:
    settings: Rules and batches.
    losses: Of trials that have ended.

  Yields:
    Trials, those of ``losses`` too.
  """
  for batch_tokens in settings.batches:
    if settings.at:
      for x in itertools.product(settings.seeds, settings.rules, settings.at):
        yield Trial(x[1], x[2], x[0], batch_tokens)
      continue
    for rule in settings.rules:
      yield from _rates(settings, losses, rule, batch_tokens)
    for seed, rule in itertools.product(settings.seeds, settings.rules):
      for power in near_best(tried(losses, rule, batch_tokens), settings.near):
        yield Trial(rule, power, seed, batch_tokens)


def _rates(
  settings: Settings, losses: Losses, rule: str, batch_tokens: int
) -> Iterator[Trial]:
  """Yields rates around the middle, and more while an edge is chosen."""
  powers = list(settings.powers)
  for power in powers:
    yield Trial(rule, power, 0, batch_tokens)
  for _ in range(settings.extensions):
    power, _ = choose(tried(losses, rule, batch_tokens))
    if min(powers) < power < max(powers):
      return
    powers.append(power + (1 if power == max(powers) else -1))
    yield Trial(rule, powers[-1], 0, batch_tokens)


def tried(losses: Losses, rule: str, batch_tokens: int) -> dict[float, float]:
  """Returns the losses of seed 0 by the power of two of their rate."""
  return {
    trial.power: loss
    for trial, loss in sorted(losses.items(), key=lambda x: x[0].power)
    if (trial.rule, trial.seed, trial.batch_tokens) == (rule, 0, batch_tokens)
  }


def choose(by_power: dict[float, float]) -> tuple[float, bool]:
  """Returns the power of two to take, and whether the choice is a close one.

  Losses repeat to 0.003 only, from one CPU to another. So the smallest rate
  whose loss is within it of the lowest is taken.
  """
  limit = min(by_power.values()) + REPEATABLE
  near = [power for power, loss in by_power.items() if loss <= limit]
  return min(near), len(near) > 1


def near_best(by_power: dict[float, float], near: float) -> list[float]:
  """Returns the chosen power of two, and those with losses near its own.

  Args:
    by_power: Losses of seed 0.
    near: How much higher they may be, in nats per token.
  """
  chosen, _ = choose(by_power)
  limit = by_power[chosen] + near
  others = [x for x, loss in by_power.items() if loss <= limit and x != chosen]
  return [chosen, *(others if near else [])]


def facts(settings: Settings, data: str) -> dict[str, Any]:
  """Returns what, beside the trial, decides its losses."""
  free = {'results', 'minutes'}
  free |= {'rules', 'powers', 'extensions', 'batches', 'near', 'at', 'seeds'}
  free |= {'micro_batch', 'unroll', 'remat', 'mesh'}  # These change rounding.
  fixed = {k: v for k, v in vars(settings).items() if k not in free}
  return {**fixed, 'data': data}


def facts_of(line: dict[str, Any]) -> dict[str, Any]:
  """Returns what, beside the trial, decided the losses of a line."""
  # Older lines have a digest of their program too.
  return {k: v for k, v in line['settings'].items() if k != 'code'}


def read(path: Path) -> list[dict[str, Any]]:
  """Returns the trials of a file, if there is one."""
  lines = path.read_text().splitlines() if path.exists() else []
  return [json.loads(line) for line in lines]


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings = tyro.extras.overridable_config_cli(PRESETS, args=args)
  check(settings)
  with jax.set_mesh(make_mesh(settings.mesh)):
    run(settings)


def check(settings: Settings) -> None:
  """Raises an error where sizes do not fit each other, or data are missing."""
  length, most = settings.context_length, settings.micro_batch
  for name, values, divisors in (
    ('micro_batch', (most,), (length,)),
    ('batches', settings.batches, (length, most)),
    ('eval_tokens', (settings.eval_tokens,), (most,)),
  ):
    # A batch below a micro-batch is one.
    if any(x % min(x, y) for x in values for y in divisors):
      raise ValueError(
        f'{name} must be multiples of {" and ".join(map(str, divisors))}, got '
        f'{list(values)}.'
      )
  if settings.tokens < max(settings.batches):
    raise ValueError(f'tokens must be at least a batch, got {settings.tokens}.')
  if not settings.at and (len(settings.powers) < 2 or 0 in settings.seeds):
    raise ValueError(
      'powers must be two or more, and seeds without 0, got '
      f'{settings.powers} and {settings.seeds}.'
    )
  if settings.data != 'stdlib' and not Path(settings.data).exists():
    raise FileNotFoundError(
      f'data: there is no {settings.data}. To build token files: '
      'python -m examples.study.corpus'
    )


def run(settings: Settings) -> None:
  """Runs all trials that have no line yet, while there is time.

  Args:
    settings: Of the comparison.

  Raises:
    ValueError: If the data do not fit the settings.
  """
  start = time.monotonic()
  runner = trainer.Trainer(settings)
  fixed = facts(settings, runner.data)
  losses = {
    Trial(**x['trial']): loss_of(x)
    for x in read(settings.results)
    if facts_of(x) == fixed
  }
  speed = runner.tokens_per_second()
  needed = settings.tokens / speed / 60
  device = device_name()
  print(
    f'{device}: {speed:,.0f} tokens/s, {needed:.1f} minutes a trial. '
    f'{len(losses)} trials have ended.',
    flush=True,
  )
  for trial in plan(settings, losses):
    if trial in losses:
      continue
    left = settings.minutes - (time.monotonic() - start) / 60
    if needed > left:
      print(
        f'{trial} needs {needed:.1f} minutes, {left:.1f} are left. Repeat the '
        'command to go on.'
      )
      return
    record = {
      'trial': dataclasses.asdict(trial),
      'rate': trial.rate(settings),
      'settings': fixed,
      **runner.run(trial),
      'corpus_tokens': runner.corpus_tokens,
      'device': device,
      'versions': {
        name: importlib.metadata.version(name)
        for name in ('jax', 'flax', 'optax')
      },
      'date': datetime.date.today().isoformat(),
    }
    _append(settings.results, record)
    losses[trial] = loss_of(record)
  print(f'All trials have a line in {settings.results}.')


def device_name() -> str:
  """Returns the model of the GPU, or of the CPU and how many cores it has."""
  kind = jax.devices()[0].device_kind
  if kind != 'cpu':
    return kind
  file = Path('/proc/cpuinfo')
  text = file.read_text() if file.exists() else ''
  found = re.search(r'^model name\s*: (.*)', text, re.MULTILINE)
  name = found[1] if found else platform.processor()
  return f'{name or kind}, {os.cpu_count()} cores'


def loss_of(record: dict[str, Any]) -> float:
  """Returns the final loss, infinite where the run diverged."""
  return math.inf if record['loss'] is None else record['loss']


def _append(path: Path, record: dict[str, Any]) -> None:
  """Adds a line by one system call: kills and other commands do not cut it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('ab', buffering=0) as file:
    file.write(f'{json.dumps(record)}\n'.encode())


if __name__ == '__main__':
  main()
