"""Tables hold to their trials, pages to the tables.

What the pages state is computed here again from the raw lines, without
``report``.
"""

import collections
from collections.abc import Callable
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
from scipy import interpolate, stats

_ROOT = Path(__file__).parents[2]
_STUDY = _ROOT / 'examples' / 'study'
_WHICH = _ROOT / 'docs' / 'which_optimizer.md'
_PAGES = ('LADDER', 'RESULTS', 'EARLIER')
# What stands in the column "tuned" of RESULTS.md: an experiment of the data,
# and what the names of its optimizers end in.
_STAGES = {
  'rate': ('batch-scaling', ''),
  'rate, warm-up, b1, weights': ('tuned-initialization', ''),
  'decay too': ('relatives', ''),
  'all again': ('relatives', ', tuned again'),
}


def _read_lines(name: str) -> list[dict]:
  file = _STUDY / 'data' / f'{name}.jsonl.gz'
  with gzip.open(file, 'rt', encoding='utf-8') as lines:
    return [json.loads(line) for line in lines]


@pytest.fixture(scope='module')
def find() -> Callable[..., list[dict]]:
  """Returns a function that finds the trials of a point by its labels.

  Those of fresh seeds; where there are none, that of the chosen rate.
  """
  trials = {x['key']: x for x in _read_lines('trials')}
  points = [
    (x['labels'] | {'experiment': x['experiment']}, x)
    for x in _read_lines('points')
    if 'tried' not in x['labels']
  ]

  def find(**labels) -> list[dict]:
    point, *_ = [x for own, x in points if own.items() >= labels.items()]
    keys = point['fresh'] or point['tuning']
    found = [trials[x] for x in keys]
    if not point['fresh']:
      found = [x for x in found if x['learning_rate'] == point['rate']]
    return found

  return find


def _losses(trials: list[dict]) -> list[float]:
  return [x['loss'] for x in trials]


def _read_table(lines: list[str]) -> list[dict[str, str]]:
  """Returns the rows of the first table, by the names of the columns."""
  start = next(i for i, x in enumerate(lines) if x.startswith('|'))
  table = itertools.takewhile(lambda x: x.startswith('|'), lines[start:])
  names, _, *rows = [
    [cell.strip() for cell in line.strip('|').split('|')] for line in table
  ]
  return [dict(zip(names, row, strict=True)) for row in rows]


def _part(page: str, title: str) -> list[str]:
  """Returns the lines of a page below a heading."""
  text = (_ROOT / page).read_text()
  found = re.search(rf'^##+ {title}\n(.*?)(?=^##|\Z)', text, re.M | re.S)
  return found[1].splitlines()


def _results(title: str) -> list[dict[str, str]]:
  return _read_table(_part('examples/study/RESULTS.md', title))


def _show(first: list[float], second: list[float] | None = None) -> str:
  """Returns mean and deviation, or the difference and its interval (Welch)."""
  mean = statistics.mean(first)
  if second is None:
    return f'{mean:.3f} ± {statistics.stdev(first):.3f}'
  found = stats.ttest_ind(first, second, equal_var=False)
  low, high = found.confidence_interval(0.95)
  mean -= statistics.mean(second)
  return f'{mean:+z.3f} [{low:+z.3f}, {high:+z.3f}]'


@pytest.mark.parametrize(
  'title', ['Losses', 'Differences', 'Parts of Muon and Hyperball']
)
def test_everything_tuned(find, title):
  rows = _results(title)
  for row in rows:
    (_, names), *cells = row.items()
    for column, cell in cells:
      if cell:
        found = [
          _tuned(find, x, int(column.split()[1])) for x in names.split(' − ')
        ]
        assert cell == _show(*map(_losses, found)), (names, column)
  assert len(rows) > 4


def _tuned(find, name: str, batch: int) -> list[dict]:
  """Returns the trials of an optimizer by its name on the page."""
  old = name.replace(' beside tuned Adam', ', rest tuned')
  for x in (f'{name}, tuned again', old.removesuffix(', first pass')):
    for experiment in ('relatives', 'qk-norm', 'aux', 'rows'):
      try:
        return find(experiment=experiment, optimizer=x, batch=batch)
      except ValueError:
        continue
  raise LookupError(name)


def test_what_tuning_changes(find):
  rows = _results('What tuning changes')
  for row in rows:
    (_, names), (_, stage), *cells = row.items()
    experiment, suffix = _STAGES[stage]
    for column, cell in cells:
      found = [
        find(
          experiment=experiment,
          optimizer=x + suffix,
          batch=int(column.split()[1]),
        )
        for x in names.split(' − ')
      ]
      assert cell == _show(*map(_losses, found)), (names, stage, column)
  assert {x['tuned'] for x in rows} == set(_STAGES)


def test_tokens_for_a_loss(find):
  difference, ratio = _results('Muon’s tokens for a loss of Hyperball')
  lengths = [*difference][1:]
  muon, hyperball = (
    [
      find(experiment='tokens', optimizer=f'{x}, rest tuned', tokens=length)
      for length in lengths
    ]
    for x in ('Muon', 'Hyperball')
  )
  means = [statistics.mean(_losses(x)) for x in hyperball]
  steps = [x[0]['steps'] for x in hyperball]
  curve = interpolate.PchipInterpolator(means[::-1], np.log(steps[::-1]))

  def steps_of(loss: float) -> float:
    end = min(max(loss, means[-1]), means[0])
    return math.exp(curve(end) + curve(end, 1) * (loss - end))

  for i, length in enumerate(lengths):
    first, second = _losses(muon[i]), _losses(hyperball[i])
    assert difference[length] == _show(second, first)
    found = stats.ttest_ind(first, second, equal_var=False)
    gaps = statistics.mean(first) - means[i], *found.confidence_interval(0.95)
    mean, low, high = (steps[i] / steps_of(means[i] + x) for x in gaps)
    assert ratio[length] == f'{mean:.2f} [{low:.2f}, {high:.2f}]'


def test_schedules(find):
  for row in _results('Schedules'):
    (_, name), *cells = row.items()
    name = name.replace(' beside tuned Adam', ', rest tuned')
    for column, cell in cells:
      words = column.replace('line', 'linear')
      pair, batch = words.split(', batch ')
      if cell:
        found = [
          find(
            experiment='schedule', optimizer=f'{name}, {x}', batch=int(batch)
          )
          for x in pair.split(' − ')
        ]
        assert cell == _show(*map(_losses, found)), (name, column)


def test_other_models(find):
  for row in _results('Other models'):
    name = row['optimizer']
    llama = find(experiment='llama', optimizer=name, model='Llama')
    assert row['Llama, batch 256'] == _show(_losses(llama))
    for batch in (128, 512):
      (own,) = find(experiment='larger-gpt-2', optimizer=name, batch=batch)
      assert row[f'GPT-2 of 2.2M, batch {batch}'] == f'{own["loss"]:.3f}'


def test_rates_and_logits(find):
  rows = _results('Wrong rates and attention logits')
  for row in rows:
    name, _, bound = row['optimizer'].partition(' with ')
    for column, cell in [*row.items()][1:]:
      labels = {'optimizer': name, 'factor': float(column.split()[1])}
      labels |= (
        {'experiment': 'attention-logits', 'bound': bound}
        if bound
        else {'experiment': 'rate-tolerance'}
      )
      if cell:
        own = find(**labels)
        logit = statistics.mean(x['max_attention_logit'] for x in own)
        expected = f'{statistics.mean(_losses(own)):.3f} ({logit:,.0f})'
        assert cell == expected, (row['optimizer'], column)
  assert len(rows) > 8


def test_ablations(find):
  whole, *parts = (
    _losses(find(experiment='ablation', optimizer=x))
    for x in ('MERIT', *(x['part'] for x in _results('Ablations')))
  )
  cells = [x['loss minus MERIT’s'] for x in _results('Ablations')]
  assert cells == [_show(x, whole) for x in parts]


def test_shares_of_clipped_elements(find):
  best, twice, unclipped = (
    find(experiment='clip-threshold', threshold=threshold, factor=factor)
    for threshold, factor in (('1', 1), ('1', 2), ('none', 2))
  )
  few, many = (max(x['clipped'] for x in own) for own in (best, twice))
  gain = np.mean(_losses(unclipped)) - np.mean(_losses(twice))
  text = ' '.join(_WHICH.read_text().split())
  assert f"{100 * few:.1f} % of a layer's elements at the best rate" in text
  assert f'{100 * many:.0f} % at twice it' in text
  assert f'the clip gains {gain:.2f}' in text


def test_costs_of_a_wrong_rate(find):
  rows = _read_table(_part('docs/settings.md', 'Learning rate'))
  for row in rows:
    for column, cell in [*row.items()][1:]:
      at, best = (
        find(experiment='rate-tolerance', optimizer=row['optimizer'], factor=x)
        for x in (float(column.split()[1]), 1.0)
      )
      means = [statistics.mean(_losses(x)) for x in (at, best)]
      assert cell == f'{means[0] - means[1]:+.3f}', (row, column)
  assert len(rows) > 4


@pytest.fixture(scope='module')
def trials():
  """Lines of the ladder by rule, batch and seed, with their rates."""
  return _read_ladder('ladder')


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


def _logit(own: dict, key: str = 'final_logits') -> str:
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
        assert cell == _logit(own)
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
      logit = _logit(at, 'peak_logits')
      count = len(seeds) if seeds != [0] else 0
      assert row[column] == f'{expected} ({logit}; {count})', (rule, column)
      checked += 1
  assert checked > 20


def _read_ladder(name: str) -> list[dict]:
  lines = (_STUDY / 'data' / f'{name}.jsonl').read_text().splitlines()
  return [json.loads(x) for x in lines]


def test_costs_of_rates_near_the_cliff_are_those_of_the_lines(trials, tuned):
  lines = trials + _read_ladder('ladder_finer')
  checked = 0
  for row in _ladder('Rates near the cliff'):
    rule, batch = row['rule'].strip('`'), _tokens(row['tokens a step'])
    own = [
      x
      for x in lines
      if x['trial'].items() >= {('rule', rule), ('batch_tokens', batch)}
    ]
    middle = next(x['rate'] / 2 ** x['trial']['power'] for x in own)
    best = _at(own, next(iter(tuned[rule, batch].values()))['rate'])
    for column, cell in row.items():
      if cell == '–' or not column.startswith('×'):
        continue
      at = _at(own, middle * float(column.split()[1]))
      seeds = [x for x in at if x and x in best] or [0]
      at = {x: at[x] for x in seeds}
      cost = _mean_and_interval(_subtract(at, best))
      logit = _logit(at, 'peak_logits')
      if cell.startswith('the tuned'):
        assert cell == f'the tuned rate ({logit})'
        continue
      count = len(seeds) if seeds != [0] else 0
      assert cell == f'{cost} ({logit}; {count})', (rule, batch, column)
      checked += 1
  assert checked > 10


_LOGITS = {'logit at the end': 'final_logits', 'of the run': 'peak_logits'}
# Rules by their names in the pictures.
_RULES = {
  'AdamW': 'adamw-all',
  'LAMB': 'lamb-all',
  'MERIT': 'merit-all',
  'Muon': 'muon',
  'AdamW, hidden': 'adamw',
  'LAMB, hidden': 'lamb',
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
      assert f'{values["logit"][i]:,.0f}' == _logit(own)


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
      _logit(x, 'peak_logits') for x in (before, at)
    ]


@pytest.fixture(scope='module')
def of_steps(trials):
  """Lines by rule, batch and number of steps, of all seeds but 0."""
  found = collections.defaultdict(list)
  for x in trials + _read_ladder('equal_steps'):
    rule, _, seed, batch = x['trial'].values()
    if seed:
      found[rule, batch, x['settings']['tokens'] // batch].append(x)
  return found


def _at(lines: list[dict], rate: float) -> dict[int, dict]:
  """Returns the lines with a rate by seed."""
  return {
    x['trial']['seed']: x for x in lines if abs(x['rate'] / rate - 1) < 0.02
  }


def _factor(values: list[float]) -> str:
  logs = np.log(values)
  half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
  mean = np.mean(logs)
  mean, low, high = (math.exp(x) for x in (mean, mean - half, mean + half))
  return f'× {mean:.2f} [{low:.2f}, {high:.2f}]'


def _tenths(values: list[float]) -> list[float]:
  """Returns means over a tenth of a run that ends after 10, 11 ... 100 %."""
  inner = [(i + 0.5) / len(values) for i in range(len(values))]
  hundred = [np.interp((i + 0.5) / 100, inner, values) for i in range(100)]
  return [statistics.mean(hundred[i - 10 : i]) for i in range(10, 101)]


def test_differences_at_carried_rates_are_those_of_the_lines(trials, tuned):
  rows = _ladder('Differences at carried rates')
  for row in rows:
    carried = []
    for rule in re.findall('`(.*?)`', row['rule']):
      best = next(iter(tuned[rule, 1_024].values()))['rate']
      own = [
        x
        for x in trials
        if x['trial'].items() >= {('rule', rule), ('batch_tokens', 16_384)}
        and x['trial']['seed']
      ]
      factor = {'kept': 1, '× √16': 4}[row['rate']]
      carried.append(_at(own, factor * best))
    first, second = carried
    assert row['loss'] == _mean_and_interval(_subtract(first, second))
    common = [x for x in first if x in second]
    for column, key in _LOGITS.items():
      top = [[max(y[x][key]) for x in common] for y in carried]
      assert row[column] == _factor(np.divide(*top))
    assert row['seeds'] == str(len(common))
  assert len(rows) > 5


@pytest.mark.parametrize('steps', [108, 432])
def test_changes_at_equal_steps_are_those_of_the_lines(of_steps, steps):
  text = (_STUDY / 'LADDER.md').read_text()
  _, _, rest = text.partition(f'## {steps} steps at every batch\n')
  part, _, _ = rest.partition('\n## ')
  rows = _read_table(part.partition('At one rate')[2].splitlines())
  for row in rows:
    rule, rate = row['rule'].strip('`'), float(row['rate'])
    small, large = (
      _at(of_steps[rule, batch, steps], rate)
      for batch in map(_tokens, row['tokens'].split('→'))
    )
    seeds = set(small) & set(large)
    assert row['seeds'] == str(len(seeds))
    assert row['loss'] == _mean_and_interval(_subtract(large, small))
    top = collections.defaultdict(list)
    at_loss, percent = [], []
    for seed in seeds:
      both = small[seed], large[seed]
      for column, key in _LOGITS.items():
        before, after = (max(x[key]) for x in both)
        top[column].append(after / before)
      losses, larger = (_tenths(x['train_losses']) for x in both)
      logits, others = (_tenths(x['logits']) for x in both)
      place = next(i for i, x in enumerate(larger) if x <= losses[-1])
      at_loss.append(others[place] / logits[-1])
      percent.append(place + 10)
    for column, ratios in top.items():
      assert row[column] == _factor(ratios)
    assert row['at equal loss'] == _factor(at_loss)
    assert row['reached after'] == f'{statistics.mean(percent):.0f} %'
  assert len(rows) >= 3


def test_the_picture_of_steps_shows_what_the_lines_say(of_steps):
  shown = _shown('ladder_steps.png')
  batches = 1_024, 4_096, 16_384
  assert [*shown] == [f'{x}, {y}' for x in ('AdamW', 'MERIT') for y in batches]
  for name, values in shown.items():
    rule, batch = name.split(', ')
    rate = {'AdamW': 0.0156, 'MERIT': 0.0337}[rule]
    own = _at(of_steps[_RULES[rule], int(batch), 108], rate).values()
    assert len(own) == 5
    for key, field in (('loss', 'train_losses'), ('logit', 'logits')):
      means = np.mean([_tenths(x[field]) for x in own], axis=0)
      np.testing.assert_allclose(values[key], means, atol=1e-4)


def test_logits_at_four_times_the_best_rate(trials):
  peaks = {tuple(x['trial'].values()): max(x['peak_logits']) for x in trials}
  adamw, muon = peaks['adamw', 1, 0, 16_384], peaks['muon', 2, 0, 16_384]
  words = f'were {adamw:,.0f} with AdamW beside Adam and {muon:,.0f} with Muon'
  assert words in ' '.join(_WHICH.read_text().split())


def test_logits_at_four_times_the_best_rate_of_the_closed_experiments():
  logits = {
    row['optimizer']: re.search(r'\((.*)\)', row['× 4'])[1]
    for row in _results('Wrong rates and attention logits')
  }
  text = ' '.join(_WHICH.read_text().split())
  assert (
    f'is {logits["LAMB"]} with LAMB, {logits["MERIT"]} with MERIT, '
    f'{logits["AdamW"]} with AdamW, {logits["Muon"]} with Muon and '
    f'{logits["Hyperball"]} with Muon Hyperball'
  ) in text
  lamb, merit = (logits[f'{x} with QK-norm'] for x in ('LAMB', 'MERIT'))
  assert f'is {lamb} with LAMB and at most {merit} with the others' in text
  assert (
    f'was {logits["Hyperball"]} with Hyperball and {logits["Muon"]} with Muon'
  ) in ' '.join((_ROOT / 'docs/kit.md').read_text().split())


def test_how_much_lower(find, tuned):
  rows = _read_table(_part('docs/which_optimizer.md', 'How much lower'))
  for row in rows:
    (_, model), (_, tokens), *cells = row.items()
    batch = _tokens(tokens)
    for column, cell in cells:
      first, second = column.split(' − ')
      if model == 'GPT-2, 0.12M':
        all_or_not = '' if first == 'Muon' else '-all'
        rules = first.lower() + all_or_not, second.lower() + all_or_not
        both = [tuned[x, batch] for x in rules]
        assert cell == _mean_and_interval(_subtract(*both)), (batch, column)
      elif model == 'GPT-2, 0.17M':
        beside = ' beside tuned Adam' if first == 'Muon' else ''
        names = first, second + beside
        both = [_tuned(find, x, batch // 64) for x in names]
        assert cell == _show(*map(_losses, both)), (batch, column)
      elif model == 'Llama, 0.17M':
        both = [
          find(experiment='llama', model='Llama', optimizer=x)
          for x in (first, second)
        ]
        assert cell == _show(*map(_losses, both)), column
      else:
        both = [
          find(experiment='larger-gpt-2', optimizer=x, batch=batch // 128)
          for x in (first, second)
        ]
        (one,), (other,) = map(_losses, both)
        assert cell == f'{one - other:+.3f}', (batch, column)
  assert len(rows) == 10


def _intervals(text: str) -> set[tuple[float, float, float]]:
  """Returns means and intervals that a text states."""
  number = r'([+-]?[\d.]+)'
  found = re.findall(
    rf'{number} \[{number},\s+{number}\]', text.replace('−', '-')
  )
  return {(float(mean), float(low), float(high)) for mean, low, high in found}


def test_intervals_of_pages_are_those_of_tables_or_lines(tuned):
  tables = [
    *_part('docs/which_optimizer.md', 'How much lower'),
    *itertools.chain(
      *((_STUDY / f'{name}.md').read_text().splitlines() for name in _PAGES)
    ),
  ]
  known = _intervals('\n'.join(x for x in tables if x.startswith('|')))
  for (one, batch), (other, again) in itertools.combinations(tuned, 2):
    if batch == again:
      both = tuned[one, batch], tuned[other, batch]
      known |= _intervals(_mean_and_interval(_subtract(*both)))
  known |= {(-mean, -high, -low) for mean, low, high in known}
  checked = set()
  pages = _ROOT / 'README.md', *(_ROOT / 'docs').glob('*.md')
  for page in (*pages, *_STUDY.glob('*.md')):
    stated = _intervals(page.read_text())
    assert stated <= known, (page.name, stated - known)
    checked |= stated
  assert len(checked) > 40
