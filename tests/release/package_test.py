"""The wheel and the sdist are what a user should get."""

import email
import email.message
from pathlib import Path
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

import merit_optax

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]
_NAME = f'merit_optax-{merit_optax.__version__}'


def _build(out: Path, *arguments: str) -> None:
  _python('-m', 'build', '--no-isolation', '--outdir', out, *arguments, _ROOT)


@pytest.fixture(scope='module')
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A folder with the sdist, and the wheel made from it."""
  folder = tmp_path_factory.mktemp('dist')
  _build(folder)
  return folder


@pytest.fixture(scope='module')
def wheel(built: Path) -> Path:
  return built / f'{_NAME}-py3-none-any.whl'


@pytest.fixture(scope='module')
def metadata(wheel: Path) -> email.message.Message:
  with zipfile.ZipFile(wheel) as archive:
    text = archive.read(f'{_NAME}.dist-info/METADATA').decode()
  return email.message_from_string(text)


def _python(*arguments: str | Path, python: Path | str = sys.executable) -> str:
  done = subprocess.run(
    [python, *arguments], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def _files(folder: str) -> set[str]:
  """Returns the Python files of a folder and of those below it."""
  return {str(x.relative_to(_ROOT)) for x in _ROOT.glob(f'{folder}/**/*.py')}


def test_wheel_holds_the_library_only(wheel: Path):
  modules = _files('merit_optax')
  about = {'METADATA', 'RECORD', 'WHEEL', 'licenses/LICENSE'}
  with zipfile.ZipFile(wheel) as archive:
    assert set(archive.namelist()) == (
      modules
      | {'merit_optax/py.typed'}
      | {f'{_NAME}.dist-info/{name}' for name in about}
    )


def test_tree_and_sdist_build_the_same_wheel(wheel: Path, tmp_path: Path):
  _build(tmp_path, '--wheel')
  assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_sdist_holds_the_library_and_its_tests(built: Path):
  sdist = built / f'{_NAME}.tar.gz'
  with tarfile.open(sdist) as archive:
    names = {x.removeprefix(f'{_NAME}/') for x in archive.getnames()}
  expected = _files('merit_optax') | _files('tests/merit_optax')
  assert expected <= names
  assert {'README.md', 'LICENSE', 'CHANGELOG.md', 'CITATION.cff'} <= names
  assert not {x for x in names if x.startswith(('examples', 'benchmarks'))}
  assert sdist.stat().st_size < 2**20


def test_twine_accepts_both(built: Path):
  _python('-m', 'twine', 'check', '--strict', *built.iterdir())


def test_the_library_needs_jax_and_optax_alone(metadata: email.message.Message):
  needed = [x for x in metadata.get_all('Requires-Dist') if 'extra' not in x]
  assert sorted(re.split('[^a-z]', x)[0] for x in needed) == ['jax', 'optax']


def test_links_of_the_readme_work_on_pypi(metadata: email.message.Message):
  text = metadata.get_payload()
  urls = dict(x.split(', ') for x in metadata.get_all('Project-URL'))
  links = re.findall(r'\]\(([^)\s]+)', text) + re.findall(r'src="([^"]*)', text)
  assert links
  assert [x for x in links if not x.startswith(('https://', '#'))] == []
  ours = re.escape(urls['Repository']) + r'/(?:blob|raw)/([^/]+)/([^#]+)'
  for match in filter(None, (re.match(ours, x) for x in links)):
    tag, path = match.groups()
    assert tag == f'v{merit_optax.__version__}'
    assert (_ROOT / path).exists()
  blocks = re.compile(r'```.*?```', re.S)
  readme = (_ROOT / 'README.md').read_text()
  assert blocks.findall(text) == blocks.findall(readme)


@pytest.fixture
def user(wheel: Path, tmp_path: Path) -> Path:
  """The Python of an environment with the wheel; other packages are ours."""
  venv.create(tmp_path / 'user', with_pip=False)
  python = tmp_path / 'user/bin/python'
  (site,) = tmp_path.glob('user/lib/*/site-packages')
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(site)
  # After what is in the folder itself, hence after the wheel.
  ours = [x for x in sys.path if x.endswith('site-packages')]
  (site / 'ours.pth').write_text('\n'.join(ours))
  where = _python(
    '-P', '-c', 'import merit_optax as m; print(m)', python=python
  )
  assert str(site) in where
  return python


_TYPED = """
import jax
import jax.numpy as jnp
import merit_optax

optimizer = merit_optax.merit(0.02, weight_decay=0.01, ratios=("weight",))
params = {"kernel": jnp.ones((4, 3))}
state = optimizer.init(params)
table: str = merit_optax.describe(params)
query = jnp.ones((2, 16, 4, 8))
found = merit_optax.attention_statistics(query, query)
largest: jax.Array = found.max_logit
merit_optax.merit_statistics(0.02, weight_decay=0.01, ratios={"row", "column"})
merit_optax.scale_by_l2_norm_trust_ratio(ratios=["weight"])
rate: float = merit_optax.starting_learning_rate("muon", 400, width=64)
"""


_MISTAKES = {
  'merit_optax.merit()': 'Missing positional argument "learning_rate"',
  'merit_optax.merit(0.1, beta=0.9)': 'Unexpected keyword argument',
  'merit_optax.describe(params) + 1': 'Unsupported operand types',
  'found.logit': 'has no attribute "logit"',
  'merit_optax.lamb': 'has no attribute "lamb"',
  'merit_optax.merit(0.1, ratios="row")': '"Iterable[Literal[',
  'merit_optax.keep_matrix_norms("l1")': "Literal['l2', 'max']",
  'merit_optax.scale_by_lmo("spectral")': "Literal['max', 'row', ",
  'merit_optax.starting_learning_rate("adamw", 9)': "Literal['merit', ",
}


def test_a_users_program_is_type_checked(user: Path, tmp_path: Path):
  program = tmp_path / 'program.py'
  program.write_text(_TYPED + '\n'.join(_MISTAKES))
  done = subprocess.run(
    [sys.executable, '-m', 'mypy', '--strict', '--python-executable', user,
     '--config-file', '', '--cache-dir', tmp_path / 'cache', program],
    cwd=tmp_path, capture_output=True, text=True, check=False,
  )  # fmt: skip
  *complaints, count = done.stdout.splitlines()
  # Nothing is wrong with the lines before them.
  expected = f'Found {len(_MISTAKES)} errors in 1 file'
  assert count.startswith(expected), done.stdout + done.stderr
  first = len(_TYPED.splitlines()) + 1
  for number, expected in enumerate(_MISTAKES.values(), first):
    (found,) = [x for x in complaints if f'program.py:{number}: error' in x]
    assert expected in found
