"""The tests that optax shares among its optimizers, run on MERIT.

They ship in the wheel. Their lists of optimizers are read while the class body
runs, so that a list with MERIT alone is written before it, in a copy.
"""

import os
import pathlib
import re
import subprocess
import sys

import jax
import optax
import pytest

# At this learning rate their problems are solved: each step moves a parameter
# by a bounded fraction of its size.
_ENTRY = "{'opt_name': 'merit', 'opt_kwargs': {'learning_rate': 3e-3}"
# At a constant rate their hardest problems end in an oscillation, whose place
# depends on how the compiler rounds; a rate that decays settles it.
_DECAYING = _ENTRY.replace(
  '3e-3', "__import__('optax').cosine_decay_schedule(4e-3, 10_000)"
)
_COMMON = (
  'contrib/_common_test.py',
  'ContribTest',
  f"""
from MODULE import merit
contrib.merit = merit
_MAIN_OPTIMIZERS_UNDER_TEST = _ALL_OPTIMIZERS_UNDER_TEST = (
    {_ENTRY}, 'wrapper_name': None, 'wrapper_kwargs': None}},
)
""",
)
_ALIAS, _OPTIMIZATION = (
  (
    '_src/alias_test.py',
    'AliasTest',
    f"""
from MODULE import merit
alias.merit = merit
_OPTIMIZERS_UNDER_TEST = ({entry}}},)
""",
  )
  for entry in (_ENTRY, _DECAYING)
)
_SHARDING = (
  '_src/sharding_test.py',
  'ShardingTest',
  """
from MODULE import merit
OPTIMIZERS = {'_merit': merit(3e-3)}
""",
)
# These name their optimizers themselves.
_NOT_SHARED = {'test_explicit_dtype', 'test_microbatch_with_explicit_sharding'}


def _write(module, name, test_class, replacement, pattern, path):
  """Writes a test file of optax with a module's MERIT as its only optimizer.

  Returns:
    The names of its shared tests that fit the pattern; there are no others.
  """
  source = pathlib.Path(optax.__file__).parent / name
  text = source.read_text()
  before, begin, after = text.partition(f'\nclass {test_class}(')
  assert begin, f'{name} has no class {test_class}'
  # The class alone: those after it test other things.
  body = re.split(r'^(?=\w)', after.split('\n', 1)[1], flags=re.MULTILINE)[0]
  # A list that the class reads under another name has Optax's own optimizers.
  lists = set(re.findall(r'\b[A-Z_]*OPTIMIZERS[A-Z_]*\b', body))
  assert lists and all(f'{x} = ' in replacement for x in lists), lists
  # As text, '0.10' comes before '0.7.2'.
  body = re.sub(r"jax\.__version__ < '[\d.]+'", 'False', body)
  names = set(re.findall(r'def (test_\w+)\(', body))
  kept = {x for x in names - _NOT_SHARED if re.match(pattern, x)}
  for other in names - kept:
    body = body.replace(f'def {other}(', f'def no_{other}(')
  # Only tests of L-BFGS need it, and it is not installed.
  before = before.replace('\nfrom sklearn import', '\n# from sklearn import')
  replacement = replacement.replace('MODULE', module)
  path.write_text(
    f'{before}{replacement}{begin}parameterized.TestCase):\n{body}'
  )
  return kept


def _run(*paths):
  """Runs test files in a process of their own and returns its output."""
  command = [sys.executable, '-m', 'pytest', '-rA', '-p', 'no:cacheprovider']
  done = subprocess.run(
    [*command, *paths],
    cwd=paths[0].parent,
    env=os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).parents[2])},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


# With the least number of tests, some of which have parameters.
_FILES = {
  # The first, since it sets the number of devices.
  'sharding': (*_SHARDING, 'test_', 3),
  'common': (*_COMMON, 'test_', 16),
  'alias': (*_ALIAS, 'test_(?!optimization$)', 12),
  'optimization': (*_OPTIMIZATION, 'test_optimization$', 4),
}


@pytest.mark.parametrize(
  'module, names',
  [
    ('merit_optax', [*_FILES]),
    # Those of optax.contrib, to which the file could be added.
    ('examples.merit_in_one_file', ['sharding', 'common']),
  ],
)
def test_shared_tests_of_optax_pass(module, names, tmp_path):
  if jax.device_count() == 1:  # Its mesh has two.
    names.remove('sharding')
  paths = [tmp_path / f'optax_{name}_test.py' for name in names]
  expected = {
    name: _write(module, *_FILES[name][:4], path)
    for name, path in zip(names, paths, strict=True)
  }
  output = _run(*paths)
  # A test whose subtest fails is counted as passed.
  bad = r'^(SUBFAILED|SKIPPED(?!.* Only 1 device is available)|XFAIL)'
  assert not re.search(bad, output, re.MULTILINE)
  for name in names:
    passed = re.findall(
      rf'^PASSED optax_{name}_test.py::\w+::(\w+)', output, re.M
    )
    found = {re.sub(r'(\d+|_merit|_)$', '', test) for test in passed}
    assert found == expected[name]
    assert len(passed) >= _FILES[name][-1]
