"""Trains a GPT-2 or Llama: python -m examples.gpt2.train --help."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
import tyro

from examples.gpt2.command import exit_on_error
from examples.gpt2.config import Config, FittedConfig, digest, flag
from examples.gpt2.data.tokens import Tokens, load_tokens
from examples.gpt2.devices import hardware, sharding
from examples.gpt2.devices.processes import (
  check_same,
  connect,
  is_process_0,
  on_process_0,
  print_once,
)
from examples.gpt2.generate import sample_text
from examples.gpt2.model.files import Model, write_description, write_weights
from examples.gpt2.optim.optimizers import describe
from examples.gpt2.plot import plot_runs
from examples.gpt2.presets import identity, resolve
from examples.gpt2.run import loop, memory, report
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.proof import prove
from examples.gpt2.run.start import (
  initial_state,
  origin,
  with_model,
  with_vocabulary,
)
from examples.gpt2.run.step import Trainer, TrainState
from examples.gpt2.run.wandb_run import check_login
from examples.gpt2.run.weights import describe_model

# Settings that may differ between processes: where data is, of which what it
# holds is compared, how a process meets the others, and what it alone writes.
_OF_A_PROCESS = (
  'data', 'eval_data', 'cache_dir', 'process_id', 'coordinator', 'distributed',
  'profile', 'describe', 'tensorboard',
)  # fmt: skip


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a file that
      cannot be read or written, 3 if a loss or gradient was not finite, 4 if a
      device ran out of memory, 5 if three checkpoints in a row could not be
      saved, and 128 + the number of the signal (SIGTERM: 143, SIGUSR1: 138,
      control-C: 130) after one.
  """
  config = tyro.cli(Config, args=args, prog='python -m examples.gpt2.train')
  with exit_on_error():
    train(config)


def train(config: Config) -> RunFolder:
  """Trains a model, unless this very run has been done, and reports it.

  Returns:
    The folder of the finished run.

  Raises:
    UsageError: If settings or data are wrong; nothing has been compiled then.
    NotFiniteError: If a loss or gradient is infinite or not a number.
    OutOfMemoryError: If a device has too little memory.
    UnsavedError: If three checkpoints in a row could not be saved.
    StoppedError: After a signal; a checkpoint has been saved.
  """
  config, source = with_model(config)
  resolved = resolve(config)
  connect(resolved)
  check_same(
    {
      flag(name): str(value)
      for name, value in vars(resolved).items()
      if name not in _OF_A_PROCESS
    }
  )
  if config.wandb is not None:
    on_process_0(check_login, config.wandb)
  mesh = sharding.make_mesh(config.mesh)
  return _train_fitted(memory.fit(resolved, mesh), source, mesh)


def _train_fitted(
  config: FittedConfig, source: Model | None, mesh: Mesh
) -> RunFolder:
  tokens = with_vocabulary(config, load_tokens(config), source)
  trainer = Trainer(config, tokens.vocab_size, mesh)
  settings = _settings(config, tokens, trainer)
  path = config.out_dir or default_folder(config, settings)
  with RunFolder(path) as folder, memory.advice(config, trainer):
    start = None
    if not folder.open(settings, from_scratch=config.from_scratch):
      # What cannot be started from leaves the folder as it is.
      with jax.set_mesh(mesh):
        start = initial_state(config, trainer, source)
    folder.start(settings, from_scratch=config.from_scratch)
    if folder.finished:
      print_once(f'This run has been done: {path}')
    else:
      print_once(report.before(config, tokens, trainer, folder))
      prove(folder.checkpoints, trainer.shapes)
      if config.describe:
        print_once(f'\n{describe(config, trainer.shapes.params)}\n')
      _train(trainer, config, tokens, folder, start)
    if is_process_0():
      print(report.after(folder))
  return folder


def _settings(
  config: FittedConfig, tokens: Tokens, trainer: Trainer
) -> dict[str, Any]:
  """Returns what config.json holds."""
  return {
    'config': identity(config)
    | {'corpus_sha256': tokens.sha256}
    | origin(config)
    | tokens.order,
    'corpus': {
      'data': config.data,
      'source': tokens.source,
      'bytes': tokens.num_bytes,
      'sha256': tokens.sha256,
      'train_tokens': len(tokens.train),
      'validation_tokens': len(tokens.validation),
      'vocab_size': tokens.vocab_size,
      'unigram_entropy': tokens.unigram_entropy,
    },
    'parameters': trainer.num_params,
    'micro_batch_size': config.micro_batch_size,
    'mesh': dict(trainer.mesh.shape),
    **hardware.versions(),
  }


def default_folder(config: Config, settings: dict[str, Any]) -> Path:
  """Returns the folder of a run, named after what decides its numbers."""
  end = digest(settings['config'])[:8]
  former, named = (
    Path('runs') / f'{config.preset}-{optimizer}-{end}'
    for optimizer in (settings['config']['optimizer'], config.optimizer)
  )
  # A run from before its optimizer got its name goes on where it is.
  return former if former.exists() else named


def _train(
  trainer: Trainer,
  config: FittedConfig,
  tokens: Tokens,
  folder: RunFolder,
  start: TrainState | None,
) -> None:
  """Trains, and writes weights, picture and, last, the sample."""
  model = describe_model(trainer, tokens)
  # So that other commands can read the checkpoints.
  on_process_0(write_description, folder.path, model)
  with jax.set_mesh(trainer.mesh):
    params = loop.run(trainer, config, tokens, folder, start).params
  folder.flush()  # Or a run could be finished that lacks its last lines.
  arrays = jax.tree.map(sharding.to_host, params)

  def write() -> None:
    write_weights(folder.path, arrays)
    if folder.read_metrics():
      plot_runs((folder.path,), folder.picture)

  on_process_0(write)
  model = dataclasses.replace(model, params=params)
  text = sample_text(model, tokens.validation, trainer.mesh, config.seed)
  on_process_0(folder.write_sample, text)


if __name__ == '__main__':
  main()
