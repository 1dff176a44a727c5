from pathlib import Path

import pytest

from examples.gpt2.config import Config, resolve

_WORDS = 'the quick brown fox jumps over a lazy dog while seven wizards sleep'


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
  """About 20 kB of text with some structure to learn."""
  words = _WORDS.split()
  lines = [
    ' '.join(words[(i * j) % len(words)] for j in range(1, 12))
    for i in range(1, 400)
  ]
  path = tmp_path / 'text.txt'
  path.write_text('\n'.join(lines))
  return path


@pytest.fixture
def tiny(tmp_path: Path, text_file: Path) -> Config:
  """Settings of a run that takes a few seconds."""
  return resolve(
    Config(
      data=str(text_file),
      out_dir=tmp_path / 'run',
      cache_dir=tmp_path / 'cache',
      vocab_size=288,
      num_layers=2,
      num_heads=2,
      width=16,
      context_length=16,
      batch_size=16,
      micro_batch_size=16,
      steps=6,
      eval_every=4,
      eval_sequences=24,
    )
  )
