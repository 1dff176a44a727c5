"""What is said in several places is said alike."""

from pathlib import Path
import re
import subprocess
import tomllib

import pytest
import yaml

import merit_optax

_ROOT = Path(__file__).parents[2]
_PYPROJECT = tomllib.loads((_ROOT / 'pyproject.toml').read_text())
_PROJECT = _PYPROJECT['project']
_CITATION = yaml.safe_load((_ROOT / 'CITATION.cff').read_text())
_RELEASE = re.compile(r'^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$', re.M)


def test_version_and_date_agree():
  newest = _RELEASE.findall((_ROOT / 'CHANGELOG.md').read_text())[0]
  assert newest == (_CITATION['version'], str(_CITATION['date-released']))
  assert newest[0] == merit_optax.__version__
  bibtex = (_ROOT / 'docs/citation.md').read_text()
  assert f'version = {{{merit_optax.__version__}}}' in bibtex
  assert f'year = {{{newest[1][:4]}}}' in bibtex


def test_changelog_has_the_headings_of_its_form():
  text = (_ROOT / 'CHANGELOG.md').read_text()
  headings = re.findall(r'^(##+) (.*)$', text, re.M)
  assert headings[0] == ('##', '[Unreleased]')
  releases = [name for level, name in headings if level == '##'][1:]
  assert len(releases) == len(_RELEASE.findall(text))
  assert {name for level, name in headings if level == '###'} <= {
    'Added', 'Changed', 'Deprecated', 'Removed', 'Fixed', 'Security',
  }  # fmt: skip


def test_the_address_of_the_repository_stands_in_one_file():
  address = _PROJECT['urls']['Repository'].removeprefix('https://')
  _, owner, name = address.split('/')
  found = _git_grep('-l', f'{owner}/{name}') + _git_grep(
    '-l', f'{owner}.github'
  )
  # A notebook on Colab knows no other file: its own tests compare its links.
  assert {x for x in found if not x.startswith('notebooks/')} == {
    'pyproject.toml'
  }


def test_addresses_agree():
  urls = _PROJECT['urls']
  owner, name = urls['Repository'].split('/')[-2:]
  assert urls == {
    'Repository': f'https://github.com/{owner}/{name}',
    'Documentation': f'https://{owner}.github.io/{name}/',
    'Changelog': f'https://github.com/{owner}/{name}/blob/main/CHANGELOG.md',
    'Issues': f'https://github.com/{owner}/{name}/issues',
  }
  hooks = _PYPROJECT['tool']['hatch']['metadata']['hooks']
  for rule in hooks['fancy-pypi-readme']['substitutions']:
    assert f'{urls["Repository"]}/' in rule['replacement']


@pytest.mark.parametrize(
  'requirements, constraints',
  [
    (_PROJECT['dependencies'], 'constraints-oldest.txt'),
    (
      _PROJECT['optional-dependencies']['examples'],
      'constraints-oldest-examples.txt',
    ),
  ],
  ids=['library', 'examples'],
)
def test_oldest_versions_are_the_bounds_of_the_requirements(
  requirements: list[str], constraints: str
):
  bounds = re.findall(
    r'^([\w-]+)>=([\d.]+)(?:,.*)?$', '\n'.join(requirements), re.M
  )
  lines = (_ROOT / constraints).read_text().splitlines()
  oldest = dict(x.split('==') for x in lines if not x.startswith('#'))
  assert oldest.pop('jaxlib') == oldest['jax']
  assert oldest == {name: _padded(version) for name, version in bounds}


def _padded(version: str) -> str:
  """Returns a version with three numbers, as releases have."""
  return '.'.join([*version.split('.'), '0', '0'][:3])


def test_every_python_that_is_promised_is_tested():
  workflow = yaml.safe_load((_ROOT / '.github/workflows/tests.yml').read_text())
  matrix = workflow['jobs']['make']['strategy']['matrix']['include']
  promised = re.findall(
    r'Python :: (3\.\d+)', '\n'.join(_PROJECT['classifiers'])
  )
  assert sorted({row['python'] for row in matrix}) == promised
  assert _PROJECT['requires-python'] == f'>={promised[0]}'


@pytest.mark.parametrize(
  'path', sorted(_ROOT.glob('.github/workflows/*.yml')), ids=lambda x: x.name
)
def test_workflows_call_targets_that_make_has(path: Path):
  targets = re.findall(r'^([a-z-]+):', (_ROOT / 'Makefile').read_text(), re.M)
  workflow = yaml.safe_load(path.read_text())
  called = re.findall(r'run: make ([a-z-]+)', path.read_text())
  for job in workflow['jobs'].values():
    matrix = job.get('strategy', {}).get('matrix', {})
    called += [row['target'] for row in matrix.get('include', [])]
  assert called
  assert set(called) <= set(targets)


def test_tests_that_make_names_exist():
  named = re.findall(r'\btests/[\w/.]+', (_ROOT / 'Makefile').read_text())
  assert 'tests/merit_optax' in named
  assert [path for path in named if not (_ROOT / path).exists()] == []


def test_tests_that_run_first_exist():
  text = (_ROOT / 'tests/conftest.py').read_text()
  named = set(re.findall(r"'(\w+_test\.py)'", text))
  assert 'resume_test.py' in named
  assert named <= {path.name for path in _ROOT.glob('tests/**/*_test.py')}


def _git_grep(*arguments: str) -> list[str]:
  done = subprocess.run(
    ['git', 'grep', '--untracked', '-I', *arguments],
    cwd=_ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode in (0, 1), done.stderr
  return done.stdout.splitlines()
