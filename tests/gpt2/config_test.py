import dataclasses
from pathlib import Path

import pytest
import tyro

from examples.gpt2.config import Config, digest


@pytest.mark.parametrize(
  ('args', 'name', 'value'),
  [
    (['--ratios', 'row', 'column'], 'ratios', ('row', 'column')),
    (['--clip-threshold', 'inf'], 'clip_threshold', float('inf')),
    (['--qk-norm'], 'qk_norm', True),
    (['--untied-head', 'False'], 'untied_head', False),
    (['--out-dir', 'a/b'], 'out_dir', Path('a/b')),
    # Names of 0.2.0.
    (['--watch-every', '7'], 'diagnostics_every', 7),
    (['--keep', '7'], 'max_to_keep', 7),
    (['--fresh'], 'from_scratch', True),
  ],
)
def test_a_flag_sets_its_field_alone(args: list[str], name: str, value):
  expected = dataclasses.replace(Config(), **{name: value})
  assert tyro.cli(Config, args=args) == expected


def test_digests_do_not_change_between_versions():
  # Names of folders and of cached tokens are made of them.
  assert digest({'seed': 0}, 'a').startswith('709139eb')
