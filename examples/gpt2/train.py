"""Trains a GPT-2: python -m examples.gpt2.train --help."""

import functools
from pathlib import Path
import sys
import time
from typing import Any

import jax
import numpy as np
import tyro

from examples.gpt2 import sharding
from examples.gpt2.config import Config, UsageError, digest, identity, resolve
from examples.gpt2.plots import plot_curves
from examples.gpt2.run_folder import RunFolder, machine
from examples.gpt2.sample import sample_text
from examples.gpt2.step_log import NotFiniteError, StepLog
from examples.gpt2.tokens import (
  Tokens,
  load_tokens,
  training_batch,
  validation_sequences,
)
from examples.gpt2.training import Trainer
import merit_optax

INTERRUPTED = 130
NOT_FINITE = 3
"""Exit status of a run that was stopped by a loss that is not finite."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Args:
    args: Arguments; those of the process by default.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a file that
      cannot be read or written, ``NOT_FINITE`` for a loss that is not finite,
      and ``INTERRUPTED`` after control-C.
  """
  config = tyro.cli(Config, args=args, prog='python -m examples.gpt2.train')
  try:
    train(config)
  except (UsageError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    raise SystemExit(2) from error
  except NotFiniteError as error:
    print(f'stopped: {error}', file=sys.stderr)
    raise SystemExit(NOT_FINITE) from error
  except KeyboardInterrupt as error:
    print('interrupted', file=sys.stderr)
    raise SystemExit(INTERRUPTED) from error


def train(config: Config) -> RunFolder:
  """Trains a model, unless this very run has been done, and reports it.

  Args:
    config: Settings as the user gave them.

  Returns:
    The folder of the finished run.

  Raises:
    UsageError: If settings or data are wrong; nothing has been compiled then.
    NotFiniteError: If the loss is infinite or not a number.
  """
  config = resolve(config)
  mesh = sharding.make_mesh(config.mesh)
  sharding.check_sizes(mesh, config)
  tokens = load_tokens(config)
  trainer = Trainer(config, tokens.vocab_size, mesh)
  settings = _settings(config, tokens, trainer)
  path = config.out_dir or default_folder(config, settings)
  with RunFolder(path) as folder:
    if folder.start(settings):
      print('An unfinished run was here. It starts over, to the same numbers.')
    if folder.finished:
      print(f'This run has been done: {path}')
    else:
      _run(trainer, config, tokens, folder)
    print(_report(folder))
  return folder


def _run(
  trainer: Trainer, config: Config, tokens: Tokens, folder: RunFolder
) -> None:
  """Says what is to come, trains, and writes the results."""
  print(_summary(config, tokens, trainer, folder))
  if config.describe:
    print('\n' + merit_optax.describe(trainer.param_shapes) + '\n')
  with jax.set_mesh(trainer.mesh):
    params = _run_steps(trainer, config, tokens, folder)
  _finish(trainer, config, tokens, folder, params)


def _settings(
  config: Config, tokens: Tokens, trainer: Trainer
) -> dict[str, Any]:
  """Returns what config.json holds."""
  return {
    'config': identity(config) | {'corpus_sha256': tokens.sha256},
    'corpus': {
      'source': tokens.source,
      'bytes': tokens.num_bytes,
      'sha256': tokens.sha256,
      'train_tokens': len(tokens.train),
      'validation_tokens': len(tokens.validation),
      'vocab_size': tokens.vocab_size,
      'unigram_entropy': tokens.unigram_entropy,
    },
    'parameters': trainer.num_params,
    'mesh': dict(trainer.mesh.shape),
    **machine(),
  }


def default_folder(config: Config, settings: dict[str, Any]) -> Path:
  """Returns the folder of a run, named after what decides its numbers."""
  name = f'{config.preset}-{config.optimizer}-{digest(settings["config"])[:8]}'
  return Path('runs') / name


def _run_steps(
  trainer: Trainer, config: Config, tokens: Tokens, folder: RunFolder
) -> Any:
  """Takes all steps and returns the final parameters."""

  def batch(step: int) -> jax.Array:
    sequences = training_batch(tokens.train, config, step)
    return trainer.put_micro_batches(sequences)

  held_out = validation_sequences(tokens.validation, config)
  state = trainer.init()
  start = time.perf_counter()
  take_step = trainer.step.lower(state, batch(1)).compile()
  print(f'compiled in {time.perf_counter() - start:.0f} s')
  with StepLog(config, folder) as log:
    for step in range(1, config.steps + 1):
      state, loss = take_step(state, batch(step))
      log.finish_step()
      log.begin_step(step, loss)
      if step % config.eval_every == 0 or step == config.steps:
        log.finish_step(
          functools.partial(trainer.evaluate, state.params, held_out)
        )
  return state.params


def _finish(
  trainer: Trainer,
  config: Config,
  tokens: Tokens,
  folder: RunFolder,
  params: Any,
) -> None:
  """Writes weights, picture and, last, the sample."""
  folder.write_weights(
    {
      sharding.path_name(path): np.asarray(param)
      for path, param in jax.tree.leaves_with_path(params)
    }
  )
  plot_curves(
    folder.picture,
    folder.read_metrics(),
    f'{config.preset}, {config.optimizer}',
    tokens.unigram_entropy,
  )
  folder.write_sample(
    sample_text(
      trainer.logits, params, tokens, config.context_length, config.seed
    )
  )


def _summary(
  config: Config, tokens: Tokens, trainer: Trainer, folder: RunFolder
) -> str:
  """Returns what a person wants to know before a run."""
  devices = jax.devices()
  mesh = ', '.join(f'{k} {v}' for k, v in trainer.mesh.shape.items())
  per_step = config.batch_size * config.context_length
  return _table(
    {
      'model': f'{config.preset}, {trainer.num_params:,} parameters, '
      f'{config.num_layers} layers of width {config.width}',
      'text': f'{tokens.source}, {tokens.num_bytes:,} bytes, '
      f'sha256 {tokens.sha256[:16]}',
      'tokens': f'{len(tokens.train):,} to train on, '
      f'{len(tokens.validation):,} held out, vocabulary {tokens.vocab_size:,}, '
      f'unigram entropy {tokens.unigram_entropy:.3f} nats',
      'steps': f'{config.steps:,} of {config.batch_size:,} x '
      f'{config.context_length:,} = {per_step:,} tokens, '
      f'{config.steps * per_step:,} in all',
      'optimizer': f'{config.optimizer}, learning rate '
      f'{config.learning_rate:g}, weight decay {config.weight_decay:g}',
      'devices': f'{len(devices)} x {devices[0].device_kind}',
      'mesh': mesh,
      'results': str(folder.path),
    }
  )


def _report(folder: RunFolder) -> str:
  """Returns what a person wants to know after a run."""
  last = folder.read_metrics()[-1]
  corpus = folder.read_settings()['corpus']
  logits = ', '.join(f'{x:.1f}' for x in last['max_attention_logit'])
  return (
    _table(
      {
        'validation loss': f'{last["val_loss"]:.4f} nats per token '
        f'(unigram entropy {corpus["unigram_entropy"]:.4f})',
        'max attention logit': f'{logits} (first to last layer)',
        'picture': str(folder.picture),
        'sample': str(folder.path / 'sample.txt'),
      }
    )
    + '\n\n'
    + (folder.path / 'sample.txt').read_text()
  )


def _table(rows: dict[str, str]) -> str:
  width = max(map(len, rows))
  return '\n'.join(f'{name:{width}}  {value}' for name, value in rows.items())


if __name__ == '__main__':
  main()
