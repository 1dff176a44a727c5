"""Tables hold to their trials, pages to the tables.

What the ladder states is computed here again from its lines, without
``report``.
"""

import gzip
import itertools
import json
import math
from pathlib import Path
import re
import statistics

import numpy as np
from PIL import Image
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
    for (_, words), *cells in (row.items() for row in rows):
      label = words.replace(' beside tuned Adam', ', rest tuned')
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


@pytest.fixture(scope='module')
def trials():
  """Lines of the ladder by rule, batch and seed, with their rates."""
  lines = (_STUDY / 'data' / 'ladder.jsonl').read_text().splitlines()
  return [json.loads(x) for x in lines]


def _ladder(title: str) -> list[dict[str, str]]:
  text = (_STUDY / 'LADDER.md').read_text()
  part = text.partition(f'## {title}\n')[2].partition('\n## ')[0]
  return _read_table(part.splitlines())


def _tokens(column: str) -> int:
  return int(column.split(maxsplit=1)[0].replace(',', ''))


@pytest.fixture(scope='module')
def tuned(trials):
  """Trials of other seeds at the rates of the page, by rule and batch."""
  found = {}
  for row in _ladder('Losses at tuned rates'):
    for column, cell in [*row.items()][1:]:
      if cell == '–':
        continue
      rule, batch = row['rule'].strip('`'), _tokens(column)
      rate = float(re.search(r'([\d.]+)\)$', cell)[1])
      own = {
        x['trial']['seed']: x
        for x in trials
        if (x['trial']['rule'], x['trial']['batch_tokens']) == (rule, batch)
        and x['trial']['seed']
        and x['rate'] == rate
      }
      losses = [x['loss'] for x in own.values()]
      # A mean may end in a 5, which np.mean's rounding would move.
      mean = statistics.mean(losses)
      expected = f'{mean:.3f} ± {np.std(losses, ddof=1):.3f}'
      assert cell.startswith(expected), (rule, batch)
      found[rule, batch] = own
  return found


def _mean_and_interval(differences: list[float]) -> str:
  mean, n = statistics.mean(differences), len(differences)
  if n == 1:
    return f'{mean:+z.3f}'
  half = stats.t.ppf(0.975, n - 1) * np.std(differences, ddof=1) / math.sqrt(n)
  return f'{mean:+z.3f} [{mean - half:+z.3f}, {mean + half:+z.3f}]'


def _subtract(first: dict, second: dict) -> list[float]:
  return [first[x]['loss'] - second[x]['loss'] for x in first if x in second]


def _logit(own: dict, key: str) -> str:
  return f'{np.mean([max(x[key]) for x in own.values()]):,.0f}'


def test_the_ladder_states_what_its_lines_say(tuned):
  checked = 0
  for row in _ladder('Differences at tuned rates'):
    pair = re.findall('`(.*?)`', row['rule'])
    for column, cell in [*row.items()][1:]:
      if cell != '–':
        both = [tuned[x, _tokens(column)] for x in pair]
        assert cell.startswith(_mean_and_interval(_subtract(*both)))
        checked += 1
  for row in _ladder('What a larger batch costs at tuned rates'):
    for column, cell in [*row.items()][1:]:
      if cell != '–':
        small, large = (
          tuned[row['rule'].strip('`'), _tokens(x)] for x in column.split('→')
        )
        assert cell == _mean_and_interval(_subtract(large, small))
        checked += 1
  for row in _ladder('Logits at tuned rates'):
    for column, cell in [*row.items()][1:]:
      if cell != '–':
        own = tuned[row['rule'].strip('`'), _tokens(column)]
        final, peak = (_logit(own, f'{x}_logits') for x in ('final', 'peak'))
        assert cell == f'{final} ({peak})'
        checked += 1
  assert checked > 50


def test_costs_of_carried_rates_are_those_of_the_lines(trials, tuned):
  checked = 0
  for row in _ladder('Rates carried over'):
    rule, batches = row['rule'].strip('`'), row['tokens'].split('→')
    first, second = map(_tokens, batches)
    if not {(rule, first), (rule, second)} <= set(tuned):
      continue
    base, best = (
      next(iter(tuned[rule, x].values()))['rate'] for x in (first, second)
    )
    for column, power in (('kept', 0), ('× √', 0.5), ('× ratio', 1)):
      rate = base * (second / first) ** power
      at, there = (
        {
          x['trial']['seed']: x
          for x in trials
          if (x['trial']['rule'], x['trial']['batch_tokens']) == (rule, second)
          and abs(x['rate'] / y - 1) < 0.02
        }
        for y in (rate, best)
      )
      if row[column].startswith('the tuned') or row[column] == '–':
        assert row[column] == '–' or abs(rate / best - 1) < 0.02
        continue
      seeds = [x for x in at if x and x in there] or [0]
      at = {x: at[x] for x in seeds}
      expected = _mean_and_interval(_subtract(at, there))
      logit = _logit(at, 'final_logits')
      count = len(seeds) if seeds != [0] else 0
      assert row[column] == f'{expected} ({logit}; {count})', (rule, column)
      checked += 1
  assert checked > 20


# Rules by their names in the pictures.
_RULES = {
  'AdamW': 'adamw-all',
  'LAMB': 'lamb-all',
  'MERIT': 'merit-all',
  'Muon': 'muon',
  'AdamW, hidden': 'adamw',
  'MERIT, hidden': 'merit',
}


def _shown(picture: str) -> dict[str, dict[str, list[float]]]:
  """Returns the numbers that a committed picture shows."""
  with Image.open(_STUDY / picture) as image:
    return json.loads(image.info['Description'])


def test_the_picture_of_tuned_rates_shows_what_the_lines_say(tuned):
  shown = _shown('ladder.png')
  assert [*shown] == ['AdamW', 'LAMB', 'MERIT', 'Muon']
  for name, values in shown.items():
    tokens = [batch for rule, batch in tuned if rule == _RULES[name]]
    assert values['tokens'] == tokens
    for i, batch in enumerate(tokens):
      own = tuned[_RULES[name], batch]
      assert values['loss'][i] == pytest.approx(
        np.mean([x['loss'] for x in own.values()])
      )
      assert f'{values["logit"][i]:,.0f}' == _logit(own, 'final_logits')


def test_the_picture_of_carried_rates_shows_what_the_lines_say(trials, tuned):
  shown = _shown('ladder_carried.png')
  assert [*shown] == [*_RULES]
  for name, values in shown.items():
    rule = _RULES[name]
    small, there = (tuned[rule, x] for x in (1_024, 16_384))
    rate = 4 * next(iter(small.values()))['rate']
    at = {
      x['trial']['seed']: x
      for x in trials
      if (x['trial']['rule'], x['trial']['batch_tokens']) == (rule, 16_384)
      and abs(x['rate'] / rate - 1) < 0.02
      and x['trial']['seed'] in there
    }
    assert len(at) >= 3
    mean, low, high = values['loss']
    assert f'{mean:+z.3f} [{low:+z.3f}, {high:+z.3f}]' == _mean_and_interval(
      _subtract(at, there)
    )
    before = {seed: there[seed] for seed in at}
    assert [f'{x:,.0f}' for x in values['logit']] == [
      _logit(x, 'final_logits') for x in (before, at)
    ]


def test_changes_at_equal_steps_are_those_of_the_lines(trials):
  lines = (_STUDY / 'data' / 'equal_steps.jsonl').read_text().splitlines()
  of_steps = trials + [json.loads(x) for x in lines]
  text = (_STUDY / 'LADDER.md').read_text()
  part = text.partition('## 108 steps at every batch\n')[2].partition('\n## ')[
    0
  ]
  rows = _read_table(part.partition('At one rate')[2].splitlines())
  for row in rows:
    rule, rate = row['rule'].strip('`'), float(row['rate'])
    small, large = (
      {
        x['trial']['seed']: x
        for x in of_steps
        if x['trial'].items() >= {('rule', rule), ('batch_tokens', batch)}
        and x['settings']['tokens'] // batch == 108
        and abs(x['rate'] / rate - 1) < 0.02
        and x['trial']['seed']
      }
      for batch in map(_tokens, row['tokens'].split('→'))
    )
    assert row['seeds'] == str(len(set(small) & set(large)))
    assert row['loss'] == _mean_and_interval(_subtract(large, small))
    logs = [
      math.log(max(x['final_logits']) / max(small[seed]['final_logits']))
      for seed, x in large.items()
      if seed in small
    ]
    half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    mean = np.mean(logs)
    mean, low, high = (math.exp(x) for x in (mean, mean - half, mean + half))
    assert row['largest logit'] == f'× {mean:.2f} [{low:.2f}, {high:.2f}]'
  assert len(rows) >= 4


def test_logits_at_four_times_the_best_rate(trials):
  peaks = {tuple(x['trial'].values()): max(x['peak_logits']) for x in trials}
  text = ' '.join((_ROOT / 'docs/which_optimizer.md').read_text().split())
  muon, adamw, merit, lamb = (
    f'{peaks[rule, power, 0, 16_384]:,.0f}'
    for rule, power in (
      ('muon', 2), ('adamw', 1), ('merit-all', 2), ('lamb-all', 2)
    )
  )  # fmt: skip
  assert (
    f'were {adamw} with AdamW, {muon} with Muon, {merit} with MERIT and '
    f'{lamb} with LAMB'
  ) in text
