"""The committed results, and the pages that quote them."""

import itertools
from pathlib import Path
import re

import pytest

from examples.study.analysis import report
from examples.study.analysis.data import FOLDER, read_json, read_points, select
from examples.study.analysis.tables import tuning_trials

_STUDY = FOLDER.parent
_ROOT = _STUDY.parents[1]
# And how many tables they quote.
_PAGES = {
  'README.md': 1, 'docs/which_optimizer.md': 7, 'docs/hyperparameters.md': 4
}  # fmt: skip


@pytest.fixture(scope='module')
def found():
  return read_points()


def test_the_page_is_what_the_report_writes(found):
  text = (_STUDY / 'RESULTS.md').read_text()
  assert text == report.page(found)
  assert len(text.split()) <= 6000


@pytest.mark.parametrize('name', ['points', 'trials'])
def test_archives_have_no_time(name):
  # So that the same lines are the same bytes.
  assert (FOLDER / f'{name}.jsonl.gz').read_bytes()[4:8] == bytes(4)


def test_the_page_says_how_much_more_muon_was_tuned(found):
  spec = read_json('experiments')['tuning trials']
  trials = {x.pop('optimizer'): x for x in tuning_trials(spec, found)}
  more = [
    int(trials['Muon, tuned again'][batch]) / int(count)
    for name in ('AdamW', 'LAMB', 'MERIT')
    for batch, count in trials[f'{name}, tuned again'].items()
  ]
  assert (round(min(more), 1), round(max(more), 1)) == (1.6, 3.0)
  assert 'Muon got 1.6 to 3 times' in (FOLDER / 'protocol.md').read_text()


def _read_table(lines: list[str]) -> list[dict[str, str]]:
  """Returns the rows of the first table, by the names of the columns."""
  start = next(i for i, x in enumerate(lines) if x.startswith('|'))
  table = itertools.takewhile(lambda x: x.startswith('|'), lines[start:])
  names, _, *rows = [
    [cell.strip() for cell in line.strip('|').split('|')] for line in table
  ]
  return [dict(zip(names, row, strict=True)) for row in rows]


def _quoted(page: str):
  """Yields names of tables, and the rows that a page quotes of them.

  A comment before a table names what it quotes. The name of the first column
  has those that say which row it is, with ``and`` between them.
  """
  lines = (_ROOT / page).read_text().splitlines()
  for i, line in enumerate(lines):
    if line.startswith('<!-- study '):
      name = line.removeprefix('<!-- study ').removesuffix(' -->')
      yield name, _read_table(lines[i:])


@pytest.mark.parametrize(('page', 'count'), _PAGES.items())
def test_pages_say_what_the_tables_say(found, page, count):
  stored = {
    f'{experiment}: {name}': rows
    for experiment, tables in report.all_tables(found).items()
    for name, rows in tables.items()
  }
  quoted = list(_quoted(page))
  assert len(quoted) == count
  for name, rows in quoted:
    for row in rows:
      _assert_quoted(row, stored[name])


def _assert_quoted(row: dict[str, str], table: list[dict[str, str]]) -> None:
  """Asserts that a row has the cells that a row of a table has."""
  first, *others = row
  names = first.split(' and ')
  (same,) = [
    x
    for x in table
    if _plain(row[first]) == ', '.join(filter(None, (x[y] for y in names)))
  ]
  for name in others:
    assert row[name] == same[name], (row[first], name)


def _plain(cell: str) -> str:
  """Returns the text of a cell that may begin with a link."""
  return re.sub(r'^\[(.*?)\]\(.*?\)', r'\1', cell)


def test_tables_of_losses_say_what_they_quote():
  for page in [_ROOT / 'README.md', *(_ROOT / 'docs').glob('*.md')]:
    # Those of the benchmarks are not the study's.
    blocks = page.read_text().split('\n\n') if page.stem != 'benchmarks' else []
    for before, block in itertools.pairwise(['', *blocks]):
      if re.search(
        r'^\|.*(\d\.\d{3} ±|\[[+-]\d\.\d{3}, )', block, re.MULTILINE
      ):
        start = block if block.startswith('<!--') else before
        assert start.startswith('<!-- study '), (page.name, block)


_NAMES = {'Muon Hyperball': 'Hyperball, MERIT’s ratios'}


def test_rates_over_the_rules_are_those_of_the_study(found):
  lines = (_ROOT / 'docs/learning_rates.md').read_text().splitlines()
  rows = _read_table(lines[lines.index('## The number of steps') :])
  for optimizer, rule, *shown in map(dict.values, rows):
    name = _plain(optimizer).partition(' (')[0]
    for varied, text in zip(('batch', 'length'), shown, strict=True):
      points = select(
        found['hyperparameters'],
        optimizer=_NAMES.get(name, name),
        varied=varied,
      )
      over = {
        x.labels['steps']: x.rate * x.labels['steps'] ** 0.5
        for x in points
        if (varied, x.labels['value']) != ('length', 1)
      }
      constant = float(rule.split()[0])
      expected = [f'{over[x] / constant:.1f}' for x in sorted(over)]
      assert text.split(', ') == expected, (name, varied)


def _chosen(text: str) -> dict[str, float]:
  pairs = (x.split('=') for x in text.split(', ') if 'correction' not in x)
  return {name: float(value) for name, value in pairs}


def test_the_recipe_of_muon_is_what_was_chosen(found):
  tables = report.all_tables(found)
  chosen = [
    next(x for x in tables[experiment]['chosen'] if x['optimizer'] == name)
    for experiment, name in (
      ('tuned-initialization', 'Muon'), ('aux', 'Muon, rest tuned'),
    )
  ]  # fmt: skip
  lines = (_ROOT / 'docs/recipes.md').read_text().splitlines()
  start = next(
    i for i, x in enumerate(lines) if x.startswith('| steps (batch)')
  )
  for length, *cells in map(dict.values, _read_table(lines[start:])):
    steps, batch = re.findall(r'\d+', length.replace(',', ''))
    column = f'batch {batch} ({64 * int(batch):,} tokens)'
    best = _chosen(chosen[0][column]) | _chosen(chosen[1][column])
    hidden = best['rate'] * int(steps) ** 0.5
    others = (f'{best[x] * hidden:.2g}' for x in ('embeddings', 'gains'))
    assert cells == [
      f'{best["warmup"]:.0%}'.replace('%', ' %'),
      f'{best["b1"]:g}',
      f'{best["decay"]:g}',
      ', '.join([f'{hidden:.1f}', *others]),
    ]


def test_stale_rows_are_those_of_the_study():
  tables = read_json('closed')['stale-rows']['tables']
  lines = (_ROOT / 'docs/algorithm.md').read_text().splitlines()
  start = next(i for i, x in enumerate(lines) if 'never seen: final' in x)
  shown = [list(x.values())[1:] for x in _read_table(lines[start:])]
  names = [
    'MERIT as published', 'min_norm 0.01', 'min_norm 0.1',
    'decay outside the ratio', 'decay outside the ratio, λ = 0.1',
    'MERIT as published, λ = 0', 'min_norm 0.01, λ = 0', 'AdamW',
  ]  # fmt: skip
  losses, rows = (
    {x['optimizer']: x for x in tables[name]}
    for name in ('losses', 'rows of the embedding')
  )
  for name, cells in zip(names, shown, strict=True):
    loss = losses[name]['loss'].split()[0]
    never = float(rows[name]['never'].split()[0])
    rare = float(re.findall(r'([\d.]+) of live', rows[name]['rare'])[0])
    assert cells == [loss, f'{never:.2g}', f'{rare:.2g}'], name


def test_figures_are_there():
  for name in ('summary', 'hyperparameters'):
    assert Path(_STUDY / f'figures/{name}.png').is_file()
