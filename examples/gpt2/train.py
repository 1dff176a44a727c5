"""Trains a GPT-2 or Llama: python -m examples.gpt2.train --help."""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import os
from pathlib import Path
import sys
from typing import Any

import jax
import tyro

from examples.gpt2 import compile_for, hardware, loop, sharding
from examples.gpt2.command import (
  UsageError,
  exit_on_error,
  flag,
  format_bytes,
  os_errors,
  refuse_repeated,
  table,
)
from examples.gpt2.config import (
  ROLES,
  Config,
  batch_sizes,
  by_name,
  change,
  digest,
  from_json,
  identity,
  to_json,
)
from examples.gpt2.data import Data, batch_shape, load_data
from examples.gpt2.diagnostics import make_diagnostics
from examples.gpt2.generate import sample_text
from examples.gpt2.init_from import find_model, find_vocabulary, first_state
from examples.gpt2.model_files import (
  Model,
  write_description,
  write_weights,
)
from examples.gpt2.plot import plot_runs
from examples.gpt2.presets import PRESETS
from examples.gpt2.processes import (
  StopRequest,
  check_same,
  connect,
  is_process_0,
  on_process_0,
  print_once,
)
from examples.gpt2.resolve import resolve
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.step import Trainer
from examples.gpt2.storage import as_path, is_remote, resolved
from examples.gpt2.token_files import is_text, parse_sources

_PROG = 'python -m examples.gpt2.train'


def main(args: list[str] | None = None) -> None:
  """Runs the command line.

  Raises:
    SystemExit: With status 2 for a mistake in the settings or a file that
      cannot be read or written, 3 if a loss or gradient was not finite, 4 if a
      device has too little memory, 5 if a checkpoint could not be saved, and
      128 + the number of the signal (SIGTERM: 143, SIGUSR1: 138, SIGHUP: 129,
      control-C: 130) after one.
  """
  with exit_on_error(), StopRequest() as stop:
    config = parse(args)
    if config.compile_for is not None:
      compile_for.compile_run(config, config.compile_for)
    else:
      train(config, stop)


def parse(args: Sequence[str] | None, prog: str = _PROG) -> Config:
  """Reads a preset, by default the demo, or --config, and flags over it.

  Args:
    args: Command line; ``None`` for that of the process.
    prog: Name of the command.

  Raises:
    UsageError: If the file of --config cannot be used.
    SystemExit: If there is no such flag or preset.
  """
  refuse_repeated(args, 'data', 'eval_data', 'batch_ramp')
  start = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  start.add_argument('--config', type=as_path)
  given, rest = start.parse_known_args(sys.argv[1:] if args is None else args)
  conf = (tyro.conf.OmitArgPrefixes,)
  if given.config is not None:
    default = read_config(given.config)
    return tyro.cli(Config, args=rest, prog=prog, default=default, config=conf)
  is_flag = not rest or rest[0].startswith('-')
  if is_flag and rest[:1] not in (['-h'], ['--help']):
    rest = ['demo', *rest]
  return tyro.extras.overridable_config_cli(
    {name: (_describe(preset), preset) for name, preset in PRESETS.items()},
    args=rest,
    prog=prog,
    config=conf,
    description='Trains a GPT-2 or Llama. The first word is a preset, by '
    'default demo, whose settings are the defaults of the flags: see demo '
    '--help. Without it, --config takes the config.json of a run instead.',
  )


def _describe(config: Config) -> str:
  model = config.model
  return (
    f'{model.num_layers} layers of width {model.width}, {config.steps:,} steps '
    f'of {config.batch_size:,} x {model.context_length:,} tokens'
  )


def read_config(path: Path) -> Config:
  """Returns the settings in the config.json of a run, or in its folder.

  Raises:
    UsageError: If the file is not there or holds none.
  """
  try:
    with os_errors():
      path = path / 'config.json' if path.is_dir() else path
      return from_json(json.loads(path.read_text())['settings'])
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise UsageError(
      f'{path} holds no settings of a run: {error!r}.'
    ) from error


def train(config: Config, stop: StopRequest | None = None) -> RunFolder:
  """Trains a model, unless this very run has been done, and reports it.

  Args:
    config: Settings.
    stop: What notes signals; by default nothing does.

  Returns:
    The folder of the finished run.

  Raises:
    UsageError: If settings or data are wrong; nothing has been compiled then.
    NotFiniteError: If a loss or gradient is infinite or not a number.
    OutOfMemoryError: If a device has too little memory.
    UnsavedError: If a checkpoint could not be saved.
    StoppedError: After a signal; a checkpoint has been saved.
  """
  _check_data(config)
  settings = to_json(config)
  _connect(config)
  mesh, source = sharding.make_mesh(config.mesh), find_model(config)
  config = resolve(config, mesh, None if source is None else source.config)
  data = load_data(with_tokens(config))
  vocabulary = find_vocabulary(config, data, source)
  trainer = Trainer(config, data.vocab_size, mesh)
  decides = identity(config) | {'data_sha256': data.sha256}
  # Named after what decides its numbers.
  name = f'{config.preset}-{config.optimizer}-{digest(decides)[:8]}'
  path = config.out_dir or Path('runs', name)
  with RunFolder(path) as folder, hardware.memory_advice():
    facts = {'settings': settings, **_facts(data, trainer)}
    on_process_0(folder.start, config, decides, facts)
    if on_process_0(lambda: folder.finished):
      print_once(f'This run has been done: {path}')
    else:
      print_once(_overview(config, data, trainer, folder))
      model = Model(trainer.model_config, data.vocab_size, None, **vocabulary)
      _train(trainer, config, data, model, folder, stop or StopRequest())
    if is_process_0():
      print_once(_report(folder))
  return folder


def _check_data(config: Config) -> None:
  if config.preset != 'demo' and config.data == Config.data:
    raise UsageError(
      f"{config.preset} needs --data: the text of Python's standard "
      'library is for the demo.'
    )
  if config.out_dir is None:
    return
  sources = [resolved(name) for name, _ in parse_sources(config.data)]
  if resolved(config.out_dir) in sources:
    raise UsageError(
      f'--out-dir {config.out_dir} is the folder of --data, which a run must '
      'not change: choose another.'
    )
  path = as_path(config.out_dir)
  if config.tensorboard and is_remote(path):
    raise UsageError(f'--tensorboard needs --out-dir on a disk, got {path}.')
  if str(config.out_dir).startswith('s3:'):
    raise UsageError(
      f'--out-dir must be on a disk or in gs://, where Orbax can write, got '
      f'{config.out_dir}.'
    )


def with_tokens(config: Config) -> Config:
  """Returns settings with token files, made once, instead of text."""
  evaluated = [x.partition('=')[2] or x for x in config.eval_data]
  if not any(map(is_text, (*config.data, *evaluated))):
    return config
  # Slow to import, and needed here alone.
  from examples.gpt2.prepare import text_to_tokens  # noqa: PLC0415

  given = (
    config.data, config.eval_data, config.model.vocab_size, config.cache_dir
  )  # fmt: skip
  # Process 0 makes the tokens for all that see its cache.
  on_process_0(text_to_tokens, *given)
  return change(config, **text_to_tokens(*given))


def _connect(config: Config) -> None:
  """Joins the processes of the run, which must have the same settings."""
  connect(config)
  is_set = 'JAX_COMPILATION_CACHE_DIR' in os.environ
  if not is_set and jax.default_backend() != 'cpu':
    # Programs for CPUs may not run on another one.
    folder = str(as_path(config.cache_dir) / 'jax')
    jax.config.update('jax_compilation_cache_dir', folder)
  check_same(
    {flag(k): str(x) for k, x in by_name(config).items() if ROLES[k] != 'local'}
  )


def _facts(data: Data, trainer: Trainer) -> dict[str, Any]:
  """Returns what config.json holds beside the settings."""
  return {
    'data': {
      'folders': data.folders,
      'sha256': data.sha256,
      'train_tokens': data.train_tokens,
      'validation_tokens': data.validation_tokens,
      'vocab_size': data.vocab_size,
    },
    'parameters': trainer.num_params,
    'mesh': dict(trainer.mesh.shape),
    **hardware.versions(),
  }


def _train(
  trainer: Trainer,
  config: Config,
  data: Data,
  model: Model,
  folder: RunFolder,
  stop: StopRequest,
) -> None:
  """Trains, and writes weights, picture and, last, the sample."""
  # So that other commands can read the checkpoints.
  on_process_0(write_description, folder.path, model)
  with jax.set_mesh(trainer.mesh):
    state = loop.take_steps(
      trainer, config, data, folder, stop,
      first_state=lambda: first_state(config, trainer),
      measure=make_diagnostics(config, trainer),
    )  # fmt: skip
    params = state.params
  arrays = jax.tree.map(sharding.to_host, params)

  def write() -> None:
    write_weights(folder.path, arrays)
    if folder.read_metrics():
      plot_runs((folder.path,), folder.picture)

  on_process_0(write)
  model = dataclasses.replace(model, params=params)
  start = data.evaluations[0].sequences[0]
  text = sample_text(model, start, trainer.mesh, config.seed)
  on_process_0(folder.finish, text)


def _overview(
  config: Config, data: Data, trainer: Trainer, folder: RunFolder
) -> str:
  """Returns what is to come, as text."""
  devices, model = jax.devices(), config.model
  tokens = int(batch_sizes(config).sum()) * model.context_length
  count, rows, _ = batch_shape(config, trainer.mesh).shape
  ramp = f', ramp {" ".join(config.batch_ramp)}' if config.batch_ramp else ''
  memory = format_bytes(hardware.bytes_per_device(trainer.shapes))
  mesh = ', '.join(f'{k} {n}' for k, n in trainer.mesh.shape.items())
  return table({
    'model': f'{config.preset}, {trainer.num_params:,} parameters',
    'data': f'{" ".join(config.data)}: {data.train_tokens:,} tokens, '
    f'{data.validation_tokens:,} held out, vocabulary {data.vocab_size:,}',
    'steps': f'{config.steps:,} of {count} x {rows} sequences{ramp}, '
    f'{tokens:,} tokens, {tokens / data.train_tokens:.2g} times the data',
    'optimizer': f'{config.optimizer}, learning rate '
    f'{config.learning_rate:g}, weight decay {config.weight_decay:g}',
    'devices': f'{len(devices)} x {devices[0].device_kind} ({mesh}), '
    f'{memory} of weights and moments on each',
    'results': str(folder.path),
  })  # fmt: skip


def _report(folder: RunFolder) -> str:
  """Returns what came out, with the sample, as text."""
  lines = folder.read_metrics()
  loss = lines[-1].get('val_loss') if lines else None
  known = isinstance(loss, float)
  skipped = sum('skipped' in line for line in lines)
  rows = {
    'validation loss': f'{loss:.4f} nats per token'
    if known
    else 'not known, since metrics are lost',
    'results': str(folder.path),
  }
  if skipped:
    rows['left out'] = f'{skipped} steps whose loss or gradient was not finite'
  return f'{table(rows)}\n\n{folder.sample.read_text("utf-8")}'


if __name__ == '__main__':
  main()
