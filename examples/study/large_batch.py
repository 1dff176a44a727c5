"""MERIT, LAMB, AdamW and Muon at a million tokens a step.

    python -m examples.study.large_batch dry-run   # a minute on a CPU
    python -m examples.study.large_batch gpu       # a quarter of an hour, H100

Each rule updates hidden matrices only; the same Adam updates all else. Stage A
chooses a learning rate for each rule at a small batch, stage B trains at the
large one. A trial is a line of JSON as soon as it ends, and a trial that has a
line is not run again: repeat a command that was stopped.
"""

from collections.abc import Iterator
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
from pathlib import Path
import time
from typing import Any, TypeAlias

import jax
import tyro

from examples import pretrain
from examples.study.settings import PRESETS, Rule, Settings, Trial
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
  if not settings.large_batch:
    return
  best = {rule: _best(settings, losses, rule) for rule in settings.rules}
  for seed, change, rules in (
    (1, 0, settings.rules),
    (1, 1, ('merit', 'muon')),
    (2, 0, ('merit', 'adamw')),
  ):
    for rule in rules:
      if rule in best:
        yield Trial(rule, best[rule] + change, seed, settings.large_batch)


def _rates(settings: Settings, losses: Losses, rule: Rule) -> Iterator[Trial]:
  """Yields five rates around the middle, and more while an edge is the best."""
  make = functools.partial(
    Trial, rule, seed=0, batch_tokens=settings.small_batch
  )
  powers = [-2, -1, 0, 1, 2]
  for power in powers:
    yield make(power=power)
  for _ in range(4):
    best = _best(settings, losses, rule)
    if min(powers) < best < max(powers):
      return
    powers.append(best + (1 if best == max(powers) else -1))
    yield make(power=powers[-1])


def _best(settings: Settings, losses: Losses, rule: Rule) -> int:
  """Returns the power of two that ended lowest in stage A."""
  tried = {
    trial.power: loss
    for trial, loss in losses.items()
    if (trial.rule, trial.seed) == (rule, 0)
    and trial.batch_tokens == settings.small_batch
  }
  return min(tried, key=lambda power: tried[power])


def facts(settings: Settings, data: str) -> dict[str, Any]:
  """Returns what, beside the trial, decides its losses."""
  free = ('data', 'results', 'rules', 'minutes', 'small_batch', 'large_batch')
  fixed = {k: v for k, v in vars(settings).items() if k not in free}
  # These change rounding only.
  for name in ('micro_batch', 'unroll', 'remat', 'fsdp'):
    del fixed[name]
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
  for name, value, divisor in (
    ('micro_batch', 1, 'context_length'),
    ('small_batch', 1, 'micro_batch'),
    ('large_batch', 1, 'micro_batch'),
    # Evaluations take four batches.
    ('eval_tokens', 4, 'micro_batch'),
  ):
    multiple = value * getattr(settings, divisor)
    if getattr(settings, name) % multiple:
      raise ValueError(
        f'{name} must be a multiple of {multiple}, got '
        f'{getattr(settings, name)}.'
      )
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
    ValueError: If batches are no multiples of the micro-batch.
    FileNotFoundError: If there are no token files.
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
    return settings.steps * batch_tokens / speed / 60

  device = jax.devices()[0].device_kind
  print(
    f'{device}: {speed:,.0f} tokens/s. {len(losses)} trials have ended. A '
    f'trial of stage A takes {minutes(settings.small_batch):.1f} minutes, one '
    f'of stage B {minutes(settings.large_batch):.1f}.',
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
