"""What the documentation points to exists."""

from pathlib import Path
import re

import pytest

import merit_optax

_ROOT = Path(__file__).parents[2]
_PAGES = sorted(
  path
  for pattern in ('*.md', 'docs/*.md', 'examples/*/*.md')
  for path in _ROOT.glob(pattern)
)
_BLOCK = re.compile(r'^```.*?^```', re.DOTALL | re.MULTILINE)
_LINK = re.compile(r'\]\(([^)\s]+)\)')


def _anchors(page: Path) -> set[str]:
  """Returns the anchors that GitHub gives to the headings of a page."""
  headings = re.findall(
    r'^#+ (.*)', _BLOCK.sub('', page.read_text()), re.MULTILINE
  )
  return {
    re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
    for heading in headings
  }


@pytest.mark.parametrize(
  'page', _PAGES, ids=lambda x: str(x.relative_to(_ROOT))
)
def test_links_lead_somewhere(page):
  for link in _LINK.findall(_BLOCK.sub('', page.read_text())):
    if link.startswith(('http:', 'https:', 'mailto:')):
      continue
    path, _, anchor = link.partition('#')
    target = (page.parent / path) if path else page
    assert target.exists(), link
    if anchor:
      assert anchor in _anchors(target), link


def test_tests_that_pages_name_exist():
  tests = {path.stem for path in _ROOT.glob('tests/**/*_test.py')}
  for page in _PAGES:
    named = set(re.findall(r'\b\w+_test\b', page.read_text()))
    assert named <= tests, page


def test_every_public_name_has_an_entry_in_the_reference():
  text = (_ROOT / 'docs/api.md').read_text()
  entries = re.findall(
    r'^\.\. auto(?:function|class):: (\w+)', text, re.MULTILINE
  )
  assert sorted(entries) == sorted(merit_optax.__all__)
  summary = re.findall(r'^   (\w+)$', text, re.MULTILINE)
  assert sorted(summary) == sorted(merit_optax.__all__)
