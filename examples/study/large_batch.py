"""The experiments of the paper: which optimizer, at which batch.

    python -m examples.study.large_batch dry-run   # a minute on a CPU
    python -m examples.study.large_batch gpu       # a quarter of an hour, H100

Each rule updates hidden matrices only; the same Adam updates all else. Seed 0
chooses a learning rate for each rule at one batch. Other seeds then train with
it, at the same batch or others. A trial is a line of JSON as soon as it ends,
and a trial that has a line is not run again: repeat a command that was stopped.
"""

from collections.abc import Iterator
import dataclasses
import datetime
import functools
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

from examples import pretrain
from examples.study.settings import PRESETS, Settings, Trial
from examples.study.trainer import Trainer, model_config

Losses: TypeAlias = dict[Trial, float]
"""Final validation losses, in nats per token, of the trials that have ended."""


def plan(settings: Settings, losses: Losses) -> Iterator[Trial]:
  """Yields trials in order; a trial's loss must be there before the next one.

  Args:
    settings: Rules and batches.
    losses: Of trials that have ended.

  Yields:
    Trials, those of ``losses`` too.
  """
  for rule in settings.rules:
    yield from _rates(settings, losses, rule)
  best = {rule: _best(settings, losses, rule) for rule in settings.rules}
  for seed, change, batch_tokens, rule in itertools.product(
    settings.seeds, settings.near, settings.batches, settings.rules
  ):
    yield Trial(rule, best[rule] + change, seed, batch_tokens)


def _rates(settings: Settings, losses: Losses, rule: str) -> Iterator[Trial]:
  """Yields rates around the middle, and more while an edge is the best."""
  make = functools.partial(
    Trial, rule, seed=0, batch_tokens=settings.tuning_batch
  )
  powers = list(settings.powers)
  for power in powers:
    yield make(power=power)
  for _ in range(4):
    best = _best(settings, losses, rule)
    if min(powers) < best < max(powers):
      return
    powers.append(best + (1 if best == max(powers) else -1))
    yield make(power=powers[-1])


def _best(settings: Settings, losses: Losses, rule: str) -> int:
  """Returns the power of two with the lowest loss of seed 0."""
  tried = {
    trial.power: loss
    for trial, loss in losses.items()
    if (trial.rule, trial.seed) == (rule, 0)
    and trial.batch_tokens == settings.tuning_batch
  }
  return min(tried, key=lambda power: tried[power])


def facts(settings: Settings, data: str) -> dict[str, Any]:
  """Returns what, beside the trial, decides its losses."""
  free = {'results', 'minutes'}
  free |= {'rules', 'tuning_batch', 'powers', 'batches', 'near', 'seeds'}
  free |= {'micro_batch', 'unroll', 'remat', 'fsdp'}  # These change rounding.
  fixed = {k: v for k, v in vars(settings).items() if k not in free}
  return {**fixed, 'data': data}


def read(path: Path) -> list[dict[str, Any]]:
  """Returns the trials of a file, if there is one."""
  lines = path.read_text().splitlines() if path.exists() else []
  return [json.loads(line) for line in lines]


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings = tyro.extras.overridable_config_cli(PRESETS, args=args)
  check(settings)
  with jax.set_mesh(pretrain.make_mesh(model_config(settings))):
    run(settings)


def check(settings: Settings) -> None:
  """Raises an error where sizes do not fit each other, or data are missing."""
  batches = (settings.tuning_batch, *settings.batches)
  for name, values, divisor in (
    ('micro_batch', [settings.micro_batch], settings.context_length),
    ('tuning_batch, batches', batches, settings.micro_batch),
    # Evaluations take four batches.
    ('eval_tokens', [settings.eval_tokens], 4 * settings.micro_batch),
  ):
    if any(x % divisor for x in values):
      raise ValueError(
        f'{name} must be multiples of {divisor}, got {list(values)}.'
      )
  if settings.tokens and settings.tokens < max(batches):
    raise ValueError(
      f'tokens must be 0 or a batch at least, got {settings.tokens}.'
    )
  if not settings.powers or 0 in settings.seeds:
    raise ValueError('powers must not be empty, nor seeds hold 0.')
  if settings.data and not (settings.data / 'train.bin').exists():
    raise FileNotFoundError(
      f'data: {settings.data} has no train.bin. To build token files: '
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
  trainer = Trainer(settings)
  fixed = facts(settings, trainer.data)
  losses = {
    Trial(**x['trial']): loss_of(x)
    for x in read(settings.results)
    if x['settings'] == fixed
  }
  speed = trainer.tokens_per_second()

  def minutes(batch_tokens: int) -> float:
    return settings.steps_at(batch_tokens) * batch_tokens / speed / 60

  device = device_name()
  print(
    f'{device}: {speed:,.0f} tokens/s. {len(losses)} trials have ended.',
    *(
      f'At {x:,} tokens a step one takes {minutes(x):.1f} minutes.'
      for x in sorted({settings.tuning_batch, *settings.batches})
    ),
    flush=True,
  )
  for trial in plan(settings, losses):
    if trial in losses:
      continue
    needed = minutes(trial.batch_tokens)
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
      **trainer.run(trial),
      'corpus_tokens': trainer.corpus_tokens,
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
