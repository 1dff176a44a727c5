from collections.abc import Callable

import pytest

from examples.gpt2.config import Config

_NAMES = (
  'data', 'cache_dir', 'out_dir', 'vocab_size', 'num_layers', 'num_heads',
  'width', 'context_length', 'batch_size', 'micro_batch_size', 'steps',
  'unroll', 'eval_every', 'eval_sequences', 'diagnostics_every',
  'checkpoint_every',
)  # fmt: skip


@pytest.fixture(scope='session')
def as_flags() -> Callable[[Config], list[str]]:
  """Returns the flags of a command for settings such as ``tiny``."""
  return lambda config: [
    f'--{name.replace("_", "-")}={getattr(config, name)}' for name in _NAMES
  ]
