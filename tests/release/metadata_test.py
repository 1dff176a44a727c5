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


def test_addresses_agree():
  urls = _PROJECT['urls']
  owner, name = urls['Repository'].split('/')[-2:]
  assert urls == {
    'Homepage': urls['Documentation'],
    'Repository': f'https://github.com/{owner}/{name}',
    'Documentation': f'https://{owner}.github.io/{name}/',
    'Changelog': f'https://github.com/{owner}/{name}/blob/main/CHANGELOG.md',
    'Issues': f'https://github.com/{owner}/{name}/issues',
  }
  hooks = _PYPROJECT['tool']['hatch']['metadata']['hooks']
  for rule in hooks['fancy-pypi-readme']['substitutions']:
    assert f'{urls["Repository"]}/' in rule['replacement']
  # Elsewhere links are made from it. But who reads these looks nowhere else.
  done = subprocess.run(
    ['git', 'grep', '--untracked', '-Iho', '-e', 'https://github.com/[^/ ]*/'
     f'{name}[^/" )\']*', '--', ':!notebooks'],
    cwd=_ROOT, capture_output=True, text=True, check=True,
  )  # fmt: skip
  assert set(done.stdout.splitlines()) == {urls['Repository']}
  for page in ('README.md', 'docs/getting_started.md'):
    assert f'git+{urls["Repository"]}"' in (_ROOT / page).read_text()


@pytest.mark.parametrize(
  'file, requirements',
  [
    ('constraints-oldest.txt', _PYPROJECT['dependency-groups']['library']),
    (
      'constraints-oldest-examples.txt',
      _PROJECT['optional-dependencies']['examples'],
    ),
  ],
)
def test_oldest_versions_are_the_bounds_of_the_requirements(
  file: str, requirements: list[str]
):
  # The later ones are the higher ones.
  requirements = [*_PROJECT['dependencies'], *requirements]
  bounds = dict(
    re.findall(r'^([\w-]+)>=([\d.]+)(?:,.*)?$', '\n'.join(requirements), re.M)
  )
  lines = (_ROOT / file).read_text().splitlines()
  oldest = dict(x.split('==') for x in lines if not x.startswith('#'))
  assert oldest.pop('jaxlib') == oldest['jax']
  # With three numbers, as releases have.
  assert oldest == {
    name: '.'.join([*version.split('.'), '0', '0'][:3])
    for name, version in bounds.items()
  }


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


@pytest.mark.parametrize(
  'path', sorted(_ROOT.glob('.github/workflows/*.yml')), ids=lambda x: x.name
)
def test_workflows_name_commits_of_actions(path: Path):
  # A tag may move. Dependabot raises the commit and the version beside it.
  used = re.findall(r'uses: (?!\./)(.+)', path.read_text())
  commit = re.compile(r'[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+')
  assert used
  assert [x for x in used if not commit.fullmatch(x)] == []


def test_publishing_alone_may_ask_for_an_identity():
  path = _ROOT / '.github/workflows/publish.yml'
  workflow = yaml.safe_load(path.read_text())
  jobs = workflow['jobs']
  assert workflow['permissions'] == {'contents': 'read'}
  assert {x: job.get('permissions') for x, job in jobs.items()} == {
    'tests': None,
    'package': None,
    'publish': {'id-token': 'write'},
  }
  assert jobs['publish']['environment'] == 'pypi'
  assert set(jobs['publish']['needs']) == {'tests', 'package'}


def test_tests_that_make_names_exist():
  named = re.findall(r'\btests/[\w/.]+', (_ROOT / 'Makefile').read_text())
  assert 'tests/merit_optax' in named
  assert [path for path in named if not (_ROOT / path).exists()] == []


def test_help_says_what_each_target_does():
  done = subprocess.run(
    ['make', 'help'], cwd=_ROOT, capture_output=True, text=True, check=True
  )
  text = (_ROOT / 'Makefile').read_text().replace('\\\n', '')
  (phony,) = re.findall(r'^\.PHONY: (.*)', text, re.M)
  listed = re.findall(r'^make ([\w-]+) +[A-Z].*\.$', done.stdout, re.M)
  assert sorted(listed) == sorted(phony.split())
