"""Runs of the trainer in tests: their settings, ends and results."""

from collections.abc import Callable
import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

from examples.gpt2 import loop
from examples.gpt2.command import flag
from examples.gpt2.config import Config, by_name
from examples.gpt2.log import MEASURED
from examples.gpt2.run_folder import RunFolder
from examples.gpt2.storage import file_system

# Settings of a run that takes a few seconds.
TINY = dict(
  vocab_size=288, num_layers=2, num_heads=2, width=16, context_length=16,
  batch_size=16, micro_batch_size=1, steps=6, unroll=1, eval_every=4,
  diagnostics_every=0, checkpoint_every=4, eval_sequences=24,
)  # fmt: skip


def as_flags(config: Config) -> list[str]:
  """Returns the flags of settings such as ``tiny``."""
  names = ('out_dir', 'cache_dir', *TINY)
  values = by_name(config)
  flags = [f'{flag(name)}={values[name]}' for name in names]
  return ['--data', *config.data, *flags]


class Killed(BaseException):
  """What ``kill`` raises."""


def kill() -> None:
  """Makes a run end without any clearing up."""
  raise Killed


def during(
  step: int, action: Callable[[], None] = kill
) -> contextlib.AbstractContextManager:
  """Does something while a step is under way, before it is saved."""
  make = loop.step_batches

  def batches(config, sequences, mesh, done):
    for number, batch in enumerate(make(config, sequences, mesh, done), done):
      if number == step:
        action()
      yield batch

  return mock.patch.object(loop, 'step_batches', batches)


def metrics(run: Path) -> list[dict[str, Any]]:
  """Returns the metrics of a run, without what a clock decides."""
  return [
    {k: v for k, v in line.items() if k not in MEASURED}
    for line in RunFolder(run).read_metrics()
  ]


def assert_same_run(found: Path, expected: Path) -> None:
  assert metrics(found) == metrics(expected)
  for name in (
    'weights.safetensors', 'sample.txt', 'model.json', 'tokenizer.json',
  ):  # fmt: skip
    assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def contents(folder: Path) -> dict[str, bytes]:
  """Returns the files of a folder, but those that tell of a claim."""
  store, root = file_system(folder), str(folder).rpartition('://')[2]
  return {
    name.removeprefix(f'{root}/'): store.cat_file(name)
    for name in store.find(root)
    if not name.endswith('/.lock')
  }
