"""The closed results: tables hold to their trials, pages to the tables."""

import gzip
import itertools
import json
from pathlib import Path
import re
import statistics

import pytest
from scipy import stats

_ROOT = Path(__file__).parents[2]
_STUDY = _ROOT / 'examples' / 'study'
# Experiments in the data by the title of their part of RESULTS.md.
_EXPERIMENTS = {
  'Everything tuned': 'relatives',
  'Initial weights tuned too': 'tuned-initialization',
  'Warm-up and b1 tuned too': 'sensitivity',
  'Loss against batch size': 'batch-scaling',
  'The norm, or the rest?': 'aux',
  'With QK-norm': 'qk-norm',
  'Rows and columns': 'rows',
  'Ablations': 'ablation',
}


def _read_lines(name: str) -> list[dict]:
  file = _STUDY / 'data' / f'{name}.jsonl.gz'
  with gzip.open(file, 'rt', encoding='utf-8') as lines:
    return [json.loads(line) for line in lines]


@pytest.fixture(scope='module')
def losses():
  """Losses of fresh seeds, by experiment, optimizer and sequences a step."""
  trials = {x['key']: x['loss'] for x in _read_lines('trials')}
  return {
    (x['experiment'], x['labels']['optimizer'], x['labels']['batch']): [
      trials[key] for key in x['fresh']
    ]
    for x in _read_lines('points')
    if x.get('fresh') and 'batch' in x['labels'] and 'tried' not in x['labels']
  }


def _read_table(lines: list[str]) -> list[dict[str, str]]:
  """Returns the rows of the first table, by the names of the columns."""
  start = next(i for i, x in enumerate(lines) if x.startswith('|'))
  table = itertools.takewhile(lambda x: x.startswith('|'), lines[start:])
  names, _, *rows = [
    [cell.strip() for cell in line.strip('|').split('|')] for line in table
  ]
  return [dict(zip(names, row, strict=True)) for row in rows]


def _tables(title: str) -> dict[str, list[dict[str, str]]]:
  """Returns the tables of a part of RESULTS.md by their names."""
  text = (_STUDY / 'RESULTS.md').read_text()
  part = text.partition(f'## {title}\n')[2].partition('\n## ')[0]
  return {
    name: _read_table(part.partition(f'\n{name}:\n')[2].splitlines())
    for name in re.findall(r'^([A-Z][a-z ]+):$', part, re.MULTILINE)
  }


@pytest.mark.parametrize(('title', 'experiment'), _EXPERIMENTS.items())
def test_tables_say_what_the_trials_say(losses, title, experiment):
  checked = 0
  for name, rows in _tables(title).items():
    if name not in ('Losses', 'Differences'):
      continue
    for (_, label), *cells in (row.items() for row in rows):
      for column, cell in cells:
        batch = int(re.search(r'batch (\d+)', column)[1])
        found = [losses.get((experiment, x, batch)) for x in label.split(' − ')]
        if not cell:
          continue
        assert cell == _show(*found), (title, label, column)
        checked += 1
  assert checked


def _show(first: list[float], second: list[float] | None = None) -> str:
  """Returns mean and deviation, or the difference and its interval (Welch)."""
  mean = statistics.mean(first)
  if second is None:
    return f'{mean:.3f} ± {statistics.stdev(first):.3f}'
  found = stats.ttest_ind(first, second, equal_var=False)
  low, high = found.confidence_interval(0.95)
  mean -= statistics.mean(second)
  return f'{mean:+z.3f} [{low:+z.3f}, {high:+z.3f}]'


def _quotes() -> list[tuple[str, str, str, list[dict[str, str]]]]:
  """Returns the tables of pages below a comment that names what they quote."""
  found = []
  for page in [_ROOT / 'README.md', *(_ROOT / 'docs').glob('*.md')]:
    lines = page.read_text().splitlines()
    for i, line in enumerate(lines):
      if match := re.fullmatch('<!-- RESULTS, (.*): (.*) -->', line):
        found.append((page.name, *match.groups(), _read_table(lines[i:])))
  return found


@pytest.mark.parametrize('page, title, name, rows', _quotes())
def test_pages_say_what_the_tables_say(page, title, name, rows):
  first, *others = rows[0]
  keys = first.split(' and ')
  table = {
    ', '.join(filter(None, (x[key] for key in keys))): x
    for x in _tables(title)[name]
  }
  for row in rows:
    for column in others:
      assert row[column] == table[row[first]][column], (page, row[first])


def test_pages_quote_some():
  assert len(_quotes()) >= 2
