"""The install lines of the documentation ask for what pyproject.toml does."""

from pathlib import Path
import re
import shlex
import tomllib

from packaging.requirements import Requirement
import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = [
  path.read_text().replace('\\\n', '')
  for pattern in ('*.md', 'docs/*.md', 'examples/*/README.md')
  for path in _ROOT.glob(pattern)
]
_PROJECT = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
_EXTRAS = _PROJECT['optional-dependencies']
_TRAINER = {x.name: x for x in map(Requirement, _EXTRAS['examples'])}


# What follows each ``pip install``.
_INSTALL_LINES = sorted(
  {
    ' '.join(line.split())
    for page in _PAGES
    for line in re.findall(
      r'\bpip install ((?:[^`\n]|\n(?=\S))+?)(?:`|  #|$)', page, re.MULTILINE
    )
  }
)


@pytest.mark.parametrize('line', _INSTALL_LINES)
def test_install_line_asks_for_what_the_package_needs(line):
  words = [x for x in shlex.split(line) if not x.startswith('-')]
  for word in words:
    # This package is ``.``.
    requirement = Requirement(re.sub(r'^\.', 'merit_optax', word))
    if requirement.name == 'merit_optax':
      assert requirement.extras <= set(_EXTRAS)
    elif requirement.specifier:
      assert requirement.specifier == _TRAINER[requirement.name].specifier
