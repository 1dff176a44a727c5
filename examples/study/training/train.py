"""Trains a trial with the trainer."""

import dataclasses
import math
from pathlib import Path
import statistics
import time
from typing import Any

import jax
from jax.sharding import Mesh

from examples.gpt2.config import FittedConfig, RunConfig
from examples.gpt2.data.tokens import Tokens, load_tokens
from examples.gpt2.devices import hardware, processes, sharding
from examples.gpt2.run import loop, memory
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import NotFiniteError
from examples.gpt2.run.step import Trainer
from examples.study.trial import Trial


def train(trial: Trial, work: Path) -> dict[str, Any]:
  """Trains a trial, from its last checkpoint if it was killed.

  Args:
    trial: The trial.
    work: Folder in which a folder of the trial holds its checkpoints.

  Returns:
    Its record, JSON values: its label and final loss (None if it diverged), the
    other settings, diagnostics, seconds since it was last started, versions and
    machine.

  Raises:
    OutOfMemoryError: If a device has too little memory.
    StoppedError: After SIGTERM or control-C.
    OSError: If the folder cannot be written.
  """
  start = time.perf_counter()
  found = _train(trial, work)
  # Programs of this trial, which no other has.
  jax.clear_caches()
  return make_record(trial, found, time.perf_counter() - start)


def make_record(
  trial: Trial, found: dict[str, Any], seconds: float
) -> dict[str, Any]:
  """Returns the record of a trial of which this was found, JSON values."""
  settings = {k: v for k, v in trial.identity.items() if k not in trial.label}
  return {
    **trial.label,
    'loss': found['loss'],
    'config': settings,
    **found,
    'seconds': round(seconds, 1),
    'threads': len(hardware.usable_cores()),
    **hardware.versions(),
  }


def _train(trial: Trial, work: Path) -> dict[str, Any]:
  """Trains a trial, and returns what its record says of that."""
  config, tokens, trainer = set_up(trial)
  with RunFolder(work / trial.key) as folder:
    folder.start({'config': trial.identity | {'corpus_sha256': tokens.sha256}})
    has_diverged = False
    try:
      with memory.advice(config, trainer), jax.set_mesh(trainer.mesh):
        loop.run(trainer, config, tokens, folder)
    except NotFiniteError:
      has_diverged = True
    folder.flush()
    lines = processes.on_process_0(folder.read_metrics)
  return {
    'loss': None if has_diverged else round(lines[-1]['val_loss'], 5),
    'corpus_sha256': tokens.sha256,
    'parameters': trainer.num_params,
    'steps_done': len(lines),
    'diagnostics': _diagnostics(trial, lines),
    'tokens_per_second': _median([x['tokens_per_second'] for x in lines]),
  }


def set_up(trial: Trial) -> tuple[FittedConfig, Tokens, Trainer]:
  """Returns settings that fit the devices, the data, and the trainer."""
  config = trial.config
  mesh = sharding.make_mesh(config.mesh)
  if config.micro_batch_size is not None:
    # A scale's micro-batch is that of one device; more may have to take less.
    sequences = config.batch_size // sharding.num_batch_shards(mesh)
    size = math.gcd(sequences, config.micro_batch_size)
    config = dataclasses.replace(config, micro_batch_size=size)
  config = memory.fit(config, mesh)
  tokens = load_tokens(config)
  return config, tokens, make_trainer(trial, config, tokens, mesh)


def make_trainer(
  trial: Trial, config: RunConfig, tokens: Tokens, mesh: Mesh
) -> Trainer:
  """Returns the trainer of a trial, with settings for it."""
  optimizer = trial.chain.make(config) if trial.chain else None
  return Trainer(config, tokens.vocab_size, mesh, optimizer)


def _median(values: list[float]) -> int | None:
  return round(statistics.median(values)) if values else None


def _diagnostics(
  trial: Trial, lines: list[dict[str, Any]]
) -> dict[str, list[Any]]:
  """Returns lists with an entry for each diagnostics step."""
  lines = [line for line in lines if 'layers' in line]
  names = 'step', 'train_loss', 'max_attention_logit', 'attention_entropy'
  found = {name: [_rounded(line[name]) for line in lines] for name in names}
  # The trainer knows only its own MERIT.
  if trial.config.optimizer == 'merit' and trial.chain is None:
    found['clipped'] = [_rounded(x['layers']['clipped']) for x in lines]
  return found


def _rounded(value: Any) -> Any:
  """Returns numbers with four digits, None for those that are not finite."""
  if isinstance(value, list):
    return [_rounded(x) for x in value]
  if value is None or isinstance(value, int):
    return value
  return float(f'{value:.4g}')
