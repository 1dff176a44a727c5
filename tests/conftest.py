"""Settings of all tests, made before one touches a device."""

from collections.abc import Generator, Iterator
import os
from pathlib import Path

import hypothesis
import jax
import pytest

# Its assertions say what differs, as those of tests do.
pytest.register_assert_rewrite('tests.gpt2.runs')

# Eight devices on one CPU, so that tests of sharding run everywhere. It has no
# effect once a backend exists, hence here and not in the tests that need it.
jax.config.update('jax_num_cpu_devices', 8)

# The first example of a shape compiles, which no deadline should count. The
# same examples in every run: a red test then has its cause in the last commit.
for profile, examples in {'tests': 25, 'few': 5}.items():
  hypothesis.settings.register_profile(
    profile, deadline=None, derandomize=True, max_examples=examples
  )
hypothesis.settings.load_profile('tests')

_LONGEST = (
  'loop_test.py',
  'step_test.py',
  'train_test.py',
  'pretrain_test.py',
  'mesh_test.py',
  'blocks_test.py',
  'optax_suite_test.py',
  'together_test.py',
  'compile_for_test.py',
  'report_test.py',
  'benchmarks_test.py',
  'log_test.py',
)


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    '--share', default='0/1', help='I/N: every Nth file with tests, from I on'
  )


@pytest.hookimpl(trylast=True)  # After -m and -k.
def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Keeps a share; begins with files that take longest, for other workers."""
  first, count = map(int, config.getoption('share').split('/'))
  files = sorted({item.path for item in items})[first::count]
  items[:] = [item for item in items if item.path in files]
  ranks = {name: rank for rank, name in enumerate(_LONGEST)}
  items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
  """Skips tests of meshes on a machine whose accelerators are too few."""
  try:
    return (yield)
  except ValueError as error:
    if jax.default_backend() != 'cpu' and 'Number of devices' in str(error):
      pytest.skip(str(error))
    raise


@pytest.fixture
def full_compilation() -> Iterator[None]:
  """Compiles as for users, for tests that look at what the compiler made.

  The others only ask what is computed, so `make test` leaves out most of XLA's
  optimizations, which take longer than they save there.
  """
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture(scope='session', autouse=True)
def compile_once() -> Iterator[None]:
  """Keeps compiled programs, to which most time goes, for the next run.

  Workers of pytest-xdist share them: whoever reads half of a file that another
  one is writing compiles for itself.
  """
  caches = Path(os.environ.get('XDG_CACHE_HOME', Path.home() / '.cache'))
  folder = os.environ.get(
    'JAX_COMPILATION_CACHE_DIR',
    str(caches / 'merit_optax' / f'jax-{jax.__version__}'),
  )
  settings = {
    'jax_compilation_cache_dir': folder,
    'jax_persistent_cache_min_compile_time_secs': 0,
  }
  with pytest.MonkeyPatch.context() as patch:
    for name, value in settings.items():
      jax.config.update(name, value)
      # For processes that tests start.
      patch.setenv(name.upper(), str(value))
    yield
