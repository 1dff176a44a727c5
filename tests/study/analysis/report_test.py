"""The committed results, and the pages that quote them."""

import itertools
import re

import pytest

from examples.study.analysis import report
from examples.study.analysis.data import FOLDER, read_json, read_points, select
from examples.study.analysis.tables import tuning_trials

_STUDY = FOLDER.parent
_ROOT = _STUDY.parents[1]
# And how many tables they quote.
_PAGES = {'docs/which_optimizer.md': 2, 'docs/settings.md': 1}


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
    blocks = page.read_text().split('\n\n') if page.stem != 'api' else []
    for before, block in itertools.pairwise(['', *blocks]):
      if re.search(
        r'^\|.*(\d\.\d{3} ±|\[[+-]\d\.\d{3}, )', block, re.MULTILINE
      ):
        start = block if block.startswith('<!--') else before
        assert start.startswith('<!-- study '), (page.name, block)


_NAMES = {
  'merit': 'MERIT',
  'optax.lamb': 'LAMB',
  'muon': 'Muon',
  'muon_hyperball': 'Hyperball, MERIT’s ratios',
}


def test_best_rates_are_as_near_to_the_rules_as_the_page_says(found):
  text = (_ROOT / 'docs/settings.md').read_text()
  rules = {
    row['optimizer'].strip('`'): row['peak learning rate']
    for row in _read_table(text.splitlines())
  }
  # At a width of 64, where the last factor of Muon's rule is 1.
  ratios = [
    x.rate * x.labels['steps'] ** 0.5 / float(rules[name].split()[0])
    for name, its_name in _NAMES.items()
    for x in select(found['hyperparameters'], optimizer=its_name)
    if x.labels['varied'] != 'width'
  ]
  near = f'was {min(ratios):.1f} to {max(ratios):.1f} times the rule'
  of_adamw = [
    x.rate * 64 for x in select(found['hyperparameters'], optimizer='AdamW')
  ]
  assert f'{near} (AdamW {min(of_adamw):.2g} to {max(of_adamw):.1g}' in text


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
  lines = (_ROOT / 'docs/settings.md').read_text().splitlines()
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


def test_stale_rows_and_ablations_are_those_of_the_study(found):
  text = ' '.join((_ROOT / 'docs/merit.md').read_text().split())
  tables = read_json('closed')['stale-rows']['tables']
  rows = {
    x['optimizer']: x['never'].split()[0]
    for x in tables['rows of the embedding']
  }
  published, bounded = (
    f'{float(rows[x]):.2g}' for x in ('MERIT as published', 'min_norm 0.01')
  )
  assert (
    f'shrank to {published} of their norm in 305 steps, with '
    f'`min_norm=0.01` to {bounded},' in text
  )
  (of_norms,) = [
    x['batch 128 (8,192 tokens)']
    for x in report.all_tables(found)['ablation']['differences']
    if x['difference'] == 'l2 norms, element-wise − MERIT'
  ]
  cost = of_norms.split()[0].lstrip('+')
  assert f'l2 norms instead of maxima cost {cost} nats per byte' in text
