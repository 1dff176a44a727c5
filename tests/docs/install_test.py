"""The install lines of the documentation ask for what pyproject.toml does."""

from pathlib import Path
import re
import shlex
import tomllib

from packaging.requirements import Requirement
import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = [
  path
  for pattern in ('*.md', 'docs/*.md', 'examples/*/README.md')
  for path in sorted(_ROOT.glob(pattern))
]
_PROJECT = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
_EXTRAS = _PROJECT['optional-dependencies']
_TRAINER = {x.name: x for x in map(Requirement, _EXTRAS['examples'])}


def _install_lines() -> list[str]:
  """Returns what follows each ``pip install``."""
  return sorted(
    {
      ' '.join(line.split())
      for page in _PAGES
      for line in re.findall(
        r'\bpip install ((?:[^`\n]|\n(?=\S))+?)(?:`|  #|$)',
        page.read_text(),
        re.MULTILINE,
      )
    }
  )


def _requirements(line: str) -> list[Requirement]:
  """Returns the packages of a line; this one is ``.``."""
  words = [x for x in shlex.split(line) if not x.startswith('-')]
  return [Requirement(re.sub(r'^\.', 'merit_optax', word)) for word in words]


@pytest.mark.parametrize('line', _install_lines())
def test_install_line_asks_for_what_the_package_needs(line):
  for requirement in _requirements(line):
    if requirement.name == 'merit_optax':
      assert requirement.extras <= set(_EXTRAS)
    elif requirement.specifier:
      needed = _TRAINER[requirement.name]
      assert requirement.specifier == needed.specifier


@pytest.mark.parametrize('page', ['README.md', 'docs/getting_started.md'])
def test_pages_that_install_the_library_name_the_flax_that_fits(page):
  text = ' '.join((_ROOT / page).read_text().split())
  assert f"pip install . '{_TRAINER['flax']}'" in text
