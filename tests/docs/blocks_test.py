"""The Python blocks of the documentation run, and its commands exist."""

from collections.abc import Iterator
import functools
import importlib
import inspect
import itertools
from pathlib import Path
import re
import shlex

import pytest
import tyro

_ROOT = Path(__file__).parents[2]
_PAGES = {
  str(path.relative_to(_ROOT)): path.read_text()
  for pattern in ('*.md', 'docs/*.md', 'examples/*/README.md')
  for path in sorted(_ROOT.glob(pattern))
}
_BLOCK = re.compile(r'^```(\w+)\n(.*?)^```', re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r'`((?:\w+=\S+\s)*(?:python -m|make)\s[^`]+)`')


# What the site shows of a line at a width of 1,280 pixels.
_COLUMNS = 80

# By their page and the number of the block on it.
_PYTHON_BLOCKS = {
  f'{page}-{number}': code
  for page, text in _PAGES.items()
  for number, (language, code) in enumerate(_BLOCK.findall(text), 1)
  if language == 'python'
}


@pytest.mark.parametrize('name', _PYTHON_BLOCKS)
def test_block_runs(name):
  exec(compile(_PYTHON_BLOCKS[name], name, 'exec'), {})


@pytest.mark.parametrize('page', _PAGES)
def test_commands_fit_the_page(page):
  for language, code in _BLOCK.findall(_PAGES[page]):
    if language in ('bash', 'sh'):
      assert max(map(len, code.splitlines())) <= _COLUMNS, code


def _commands() -> list[tuple[str, ...]]:
  """Returns the words of each ``python -m`` (from ``-m`` on) and ``make``."""
  commands = set()
  for line in itertools.chain.from_iterable(map(_lines, _PAGES.values())):
    words = list(_words(line))
    for i, word in enumerate(words):
      is_module = word == '-m' and words[i - 1].endswith('python')
      if is_module or (word == 'make' and i == 0):
        rest = itertools.takewhile(lambda x: x not in ('&&', '|'), words[i:])
        commands.add(tuple(rest))
  return sorted(commands)


def _lines(text: str) -> Iterator[str]:
  """Yields the lines of shell blocks, and the code spans that are commands."""
  for language, code in _BLOCK.findall(text):
    if language in ('bash', 'sh'):
      yield from code.replace('\\\n', ' ').splitlines()
  for span in _SPAN.findall(_BLOCK.sub('', text)):
    yield ' '.join(span.split())


def _words(line: str) -> Iterator[str]:
  """Yields the words of a command, and those of commands quoted in it."""
  for word in shlex.split(line, comments=True):
    if 'python -m' in word:
      yield from _words(word)
    else:
      yield word


class _ReadError(Exception):
  """Raised by commands in place of carrying out what their arguments say."""


@pytest.fixture
def reading_only(monkeypatch: pytest.MonkeyPatch) -> None:
  """Ends commands when they have read their arguments."""
  parse, parse_subcommand = tyro.cli, tyro.extras.subcommand_cli_from_dict

  def idle(function):
    return functools.wraps(function)(lambda *_, **__: None)

  def cli(what, **kwargs):
    parse(idle(what) if inspect.isfunction(what) else what, **kwargs)
    raise _ReadError

  def subcommand_cli(subcommands, **kwargs):
    parse_subcommand({k: idle(x) for k, x in subcommands.items()}, **kwargs)
    raise _ReadError

  monkeypatch.setattr(tyro, 'cli', cli)
  monkeypatch.setattr(tyro.extras, 'subcommand_cli_from_dict', subcommand_cli)


@pytest.mark.parametrize(
  'words',
  [x for x in _commands() if x[1].startswith(('benchmarks.', 'examples.'))],
  ids=' '.join,
)
@pytest.mark.usefixtures('reading_only')
def test_command_takes_its_arguments(words):
  _, name, *args = words
  module = importlib.import_module(name)
  if hasattr(module, '__path__'):
    module = importlib.import_module(f'{name}.__main__')
  assert "if __name__ == '__main__':" in inspect.getsource(module)
  if args:
    with pytest.raises((_ReadError, SystemExit)) as raised:
      module.main(args)
    assert getattr(raised.value, 'code', 0) == 0
  else:
    assert callable(module.main)


def test_targets_of_make_exist():
  makefile = (_ROOT / 'Makefile').read_text()
  targets = set(re.findall(r'^([a-z-]+):', makefile, re.MULTILINE))
  named = {
    word
    for program, *words in _commands()
    for word in words
    if program == 'make' and re.fullmatch(r'[a-z][a-z-]*', word)
  }
  assert {'train', 'test'} <= named <= targets
