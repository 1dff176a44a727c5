from collections.abc import Callable
from pathlib import Path

import pytest

from examples.gpt2.config import Config
from examples.gpt2.presets import resolve
from examples.gpt2.train import train

_WORDS = 'the quick brown fox jumps over a lazy dog while seven wizards sleep'


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
  """About 20 kB of text with some structure to learn."""
  return _write_text(tmp_path)


@pytest.fixture
def tiny(tmp_path: Path) -> Config:
  """Settings of a run that takes a few seconds."""
  return _tiny(tmp_path)


@pytest.fixture(scope='session')
def make_tiny() -> Callable[[Path], Config]:
  """Makes the settings of ``tiny`` for a folder, also for a whole module."""
  return _tiny


@pytest.fixture(scope='module')
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
  """Settings of a run that has been done, to read and not to change."""
  config = _tiny(tmp_path_factory.mktemp('finished'))
  train(config)
  return config


def _write_text(folder: Path) -> Path:
  words = _WORDS.split()
  lines = [
    ' '.join(words[(i * j) % len(words)] for j in range(1, 12))
    for i in range(1, 400)
  ]
  path = folder / 'text.txt'
  path.write_text('\n'.join(lines))
  return path


def _tiny(folder: Path) -> Config:
  return resolve(
    Config(
      data=str(_write_text(folder)),
      out_dir=folder / 'run',
      cache_dir=folder / 'cache',
      vocab_size=288,
      num_layers=2,
      num_heads=2,
      width=16,
      context_length=16,
      batch_size=16,
      micro_batch_size=1,
      steps=6,
      unroll=1,
      eval_every=4,
      watch_every=4,
      checkpoint_every=4,
      eval_sequences=24,
    )
  )
