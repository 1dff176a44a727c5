"""What tests of training share."""

import dataclasses
from pathlib import Path

import pytest

from examples.study.scales import SCALES, Scale


@pytest.fixture
def scale(tmp_path: Path) -> Scale:
  """A scale of two-step trials on a text of its own."""
  text = tmp_path / 'text.txt'
  text.write_text('The quick brown fox jumps over the lazy dog.\n' * 400)
  nano = SCALES['nano']
  settings = nano.settings | dict(
    data=str(text), cache_dir=tmp_path / 'cache', num_layers=1, width=16,
    num_heads=2, context_length=16, eval_sequences=12, unroll=1,
    micro_batch_size=None,
  )  # fmt: skip
  return dataclasses.replace(nano, settings=settings, steps=2)
