"""The code blocks of the documentation run."""

from pathlib import Path
import re

import pytest

_ROOT = Path(__file__).parents[1]


def _blocks() -> list[tuple[str, str]]:
  """Returns the Python blocks of the pages, by page and heading."""
  blocks = []
  for page in (_ROOT / 'README.md', *sorted(_ROOT.glob('docs/*.md'))):
    for section in re.split(r'^## ', page.read_text(), flags=re.MULTILINE)[1:]:
      heading, _, text = section.partition('\n')
      for code in re.findall(r'```python\n(.*?)```', text, re.DOTALL):
        blocks.append((f'{page.name}: {heading}', code))
  return blocks


@pytest.mark.parametrize('code', [pytest.param(c, id=i) for i, c in _blocks()])
def test_block_runs(code: str):
  exec(compile(code, 'block', 'exec'), {})


def test_there_are_blocks():
  assert len(_blocks()) > 5
