"""Puts tables of trials into a page, and pictures beside it.

    python -m examples.study.report                     # the ladder
    python -m examples.study.report runs/laptop.jsonl runs/laptop.md

The tables stand between two marks in the page; all else is left as it is.
"""

from collections.abc import Callable, Iterable
import itertools
import json
import math
from pathlib import Path
import statistics
from typing import TypeAlias

import numpy as np
from scipy import stats
import tyro

from examples.study.cells import (
  Cell,
  Cells,
  Line,
  at_equal_loss,
  batches_of,
  bounds,
  carried_by_16,
  group,
  holm,
  losses_above,
  mean_logit,
  of_equal_steps,
  paired,
  pooled,
  read_cells,
  rule_of,
  same_seeds,
  top,
)
from examples.study.large_batch import loss_of, read
from examples.study.pictures import draw, draw_carried, draw_steps
from examples.study.settings import PRESETS, Trial

_BEGIN, _END = '<!-- tables: begin -->', '<!-- tables: end -->'
# What is compared with what, at equal batch.
_PAIRS = (
  ('merit-l2', 'merit'), ('lamb', 'merit'), ('adamw', 'merit'),
  ('muon', 'merit'), ('muon', 'merit-all'), ('muon-hyperball', 'muon'),
  ('muon-hyperball-decay', 'muon-hyperball'),
  ('muon-hyperball-sqrt', 'muon-hyperball'),
  ('merit-all', 'merit'), ('merit-l2-all', 'merit-all'),
  ('lamb-all', 'merit-all'), ('adamw-all', 'merit-all'),
)  # fmt: skip

Table: TypeAlias = list[dict[str, str]]


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  tyro.cli(write, args=args)


def write(
  results: tyro.conf.Positional[Path] = PRESETS['ladder'][1].results,
  page: tyro.conf.Positional[Path] = Path('examples/study/LADDER.md'),
) -> None:
  """Puts tables of trials into a page, and pictures beside it.

  Args:
    results: File of the trials. ``equal_steps.jsonl`` beside it has those with
      as many steps at other batches; that with ``_finer`` after its
      name has those at rates between powers of two.
    page: The page; made if need be. The pictures get its name.
  """
  lines = read(results)
  cells = read_cells(results)
  text = page.read_text() if page.exists() else f'{_BEGIN}\n{_END}\n'
  before, _, rest = text.partition(_BEGIN)
  _, _, after = rest.partition(_END)
  page.parent.mkdir(parents=True, exist_ok=True)
  by_steps = of_equal_steps(
    lines + read(results.with_name('equal_steps.jsonl'))
  )
  finer = group(read(results.with_stem(f'{results.stem}_finer')), rule_of)
  all_tables = ''.join(
    (
      tables(cells),
      finer_rates(cells, finer),
      equal_steps(by_steps),
    )
  )
  page.write_text(f'{before}{_BEGIN}\n\n{all_tables}\n{_END}{after}')
  print(f'wrote {page}')
  for name, picture in {
    '': draw(cells),
    '_carried': draw_carried(cells),
    '_steps': draw_steps(by_steps),
  }.items():
    if picture:
      file = page.with_name(f'{page.stem.lower()}{name}.png')
      # A test looks there for what a picture shows.
      shown = {'Description': json.dumps(picture.shown)}
      picture.figure.savefig(file, dpi=200, metadata=shown)
      print(f'wrote {file}')


def tables(cells: Cells) -> str:
  """Returns all tables, in Markdown."""
  tuned = {
    rule: own
    for rule, own in cells.items()
    if not rule.startswith('muon-') or rule.startswith('muon-hyperball')
  }
  sections = [
    (
      'Losses at tuned rates',
      'Final validation loss in nats per token, mean ± standard deviation of '
      'the seeds after seed 0, and the learning rate. ≈: seed 0 had another '
      'rate within 0.003 of its best loss. Of the rates within 0.02, the best '
      'mean.',
      _by_batch(tuned, _loss),
    ),
    (
      'What a larger batch costs at tuned rates',
      'Loss at the larger batch minus that at the smaller one, same seeds, '
      'with 95 % intervals (paired t).',
      _rises(tuned),
    ),
    ('Differences at tuned rates', _OF_DIFFERENCES, _differences(tuned)),
    (
      'Logits at tuned rates',
      'The largest attention logit of all layers at the end, mean of seeds.',
      _by_batch(tuned, _logits),
    ),
    (
      'Rates carried over',
      'The best rate of the first batch, kept, times √ of the ratio of '
      'batches, and times the ratio: final loss minus that of the same seeds '
      'at the rate tuned at the second batch (in brackets: largest logit of '
      'the run, mean of the seeds, and how many seeds there are beside seed 0; '
      '0: seed 0 alone, which chose the tuned rate and so flatters it).',
      _carried(tuned),
    ),
    (
      'Differences at carried rates',
      'At 16 times the smallest batch, each rule at its best rate of that '
      'batch, kept or times √16: differences of losses and factors of the '
      'largest logit at the end and of the run (geometric means), same seeds, '
      'with 95 % intervals.',
      _carried_differences(tuned),
    ),
    (
      'What helps Muon',
      'Final loss minus that of `muon` with the same seed and rate. Average: '
      'of the weights of the last fifth of the steps, minus the loss of the '
      'last weights.',
      _variants(cells),
    ),
    (
      'Rates of seed 0',
      'Final loss of seed 0 at multiples of the middle rate (its value in '
      'brackets); **bold**: what seed 0 chose; †: the rate of the other seeds, '
      'where it is another one.',
      _rates(tuned),
    ),
  ]
  return ''.join(
    f'## {title}\n\n{text}\n\n{_markdown(rows)}\n'
    for title, text, rows in sections
    if rows
  )


_OF_DIFFERENCES = (
  'Same seeds (initial weights and batches), with 95 % intervals (paired t). '
  'In brackets: the half-width by the deviation pooled over all rules of a '
  'batch; and what could have been seen, 1.3 half-widths of the paired t. *: '
  'survives Holm’s correction of all differences here, at 5 %.'
)


def _by_batch(cells: Cells, show: Callable[[Cell], str]) -> Table:
  """Returns a row for each rule, with a column for each batch."""
  batches = batches_of(cells)
  return [
    {'rule': f'`{rule}`'}
    | {
      f'{batch:,} tokens': show(own[batch])
      if batch in own and own[batch].seeds
      else ''
      for batch in batches
    }
    for rule, own in cells.items()
    if any(x.seeds for x in own.values())
  ]


def _loss(cell: Cell) -> str:
  is_close = cell.tuning and cell.chosen()[1]
  return f'{spread(cell.losses)} ({"≈ " if is_close else ""}{cell.rate():g})'


def spread(losses: list[float]) -> str:
  """Returns mean and standard deviation as text."""
  if not np.isfinite(losses).all():
    return f'{sum(np.isinf(losses))} of {len(losses)} diverged'
  if len(losses) == 1:
    return f'{losses[0]:.3f}'
  return f'{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}'


def _logits(cell: Cell) -> str:
  return f'{mean_logit(cell.seeds):,.0f}'


def _interval(differences: list[float]) -> str:
  """Returns the mean with its interval, as text."""
  if not differences or not np.isfinite(differences).all():
    return ''
  mean, low, high = bounds(differences)
  if len(differences) == 1:
    return f'{mean:+z.3f}'
  return f'{mean:+z.3f} [{low:+z.3f}, {high:+z.3f}]'


def _rises(cells: Cells) -> Table:
  return [
    {'rule': f'`{rule}`'}
    | {
      f'{x:,} → {y:,}': _interval(paired(own[y].by_seed(), own[x].by_seed()))
      if x in own and y in own
      else ''
      for x, y in itertools.pairwise(batches_of(cells))
    }
    for rule, own in cells.items()
    if sum(bool(x.seeds) for x in own.values()) > 1
  ]


def _differences(cells: Cells) -> Table:
  empty = Cell({}, {})
  found = {
    (pair, batch): paired(*(cells[x].get(batch, empty).by_seed() for x in pair))
    for pair in _PAIRS
    if set(pair) <= set(cells)
    for batch in batches_of(cells)
  }
  survive = holm(
    {
      k: float(stats.ttest_1samp(x, 0).pvalue)
      for k, x in found.items()
      if len(x) > 1 and np.isfinite(x).all()
    }
  )
  rows = []
  for pair in dict.fromkeys(pair for pair, _ in found):
    row = {'rule': f'`{pair[0]}` − `{pair[1]}`'}
    for batch in batches_of(cells):
      differences = found[pair, batch]
      text = _interval(differences)
      if len(differences) > 1 and text:
        low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        deviation, free = pooled(cells, batch)
        error = deviation * math.sqrt(2 / len(differences))
        half = stats.t.ppf(0.975, free) * error
        star = '*' if (pair, batch) in survive else ''
        text += f'{star} ({half:.3f}; {1.3 * (high - low) / 2:.3f})'
      row[f'{batch:,} tokens'] = text
    rows.append(row)
  return rows


def _carried(cells: Cells) -> Table:
  rows = []
  for rule, own in cells.items():
    for first, second in itertools.combinations(own, 2):
      ratio = second // first
      if ratio > 16 or not own[first].tuning or not own[second].tuning:
        continue
      row = {'rule': f'`{rule}`', 'tokens': f'{first:,} → {second:,}'}
      factors = {'kept': 1.0, '× √': math.sqrt(ratio), '× ratio': float(ratio)}
      for name, factor in factors.items():
        row[name] = _carry(own[second], own[first].rate() * factor)
      if any([*row.values()][2:]):
        rows.append(row)
  return rows


def _carry(cell: Cell, rate: float) -> str:
  return _above(cell.at(rate), cell.at(cell.rate()))


def _above(given: dict[int, Line], tuned: dict[int, Line]) -> str:
  """Returns losses above those at the tuned rate, logits and seeds as text."""
  trials, others = same_seeds(given, tuned)
  if not trials:
    return ''
  logit = f'{mean_logit(trials, "peak_logits"):,.0f}'
  if trials == others:
    return f'the tuned rate ({logit})'
  text = _interval(losses_above(trials, others)) or 'diverged'
  count = sum(x['trial']['seed'] > 0 for x in trials)
  return f'{text} ({logit}; {count})'


def _carried_differences(cells: Cells) -> Table:
  rows = []
  at_rate = {
    'kept': carried_by_16(cells, 1.0),
    '× √16': carried_by_16(cells, 4.0),
  }
  for pair, (rate, carried) in itertools.product(_PAIRS, at_rate.items()):
    if not set(pair) <= set(carried):
      continue
    trials, others = same_seeds(*(carried[x] for x in pair))
    if len(trials) > 1:
      pairs = [*zip(others, trials, strict=True)]
      rows.append(
        {
          'rule': f'`{pair[0]}` − `{pair[1]}`',
          'rate': rate,
          'loss': _interval(losses_above(trials, others)),
          'logit at the end': _ratio(pairs, 'final_logits'),
          'of the run': _ratio(pairs, 'peak_logits'),
          'seeds': str(len(trials)),
        }
      )
  return rows


def _variants(cells: Cells) -> Table:
  rows = []
  for rule, own in cells.items():
    if not rule.startswith('muon') or 'hyperball' in rule:
      continue
    for batch, cell in own.items():
      for trials in cell.others.values():
        rate = trials[0]['rate']
        losses = {x['trial']['seed']: loss_of(x) for x in trials}
        base = cells['muon'][batch].at(rate)
        base_losses = {k: loss_of(x) for k, x in base.items()}
        averages = [
          x['average_loss'] - x['loss'] for x in trials if x.get('average_loss')
        ]
        if rule == 'muon' and not averages:
          continue
        differences = paired(losses, base_losses)
        rows.append(
          {
            'rule': f'`{rule}`',
            'tokens a step': f'{batch:,}',
            'rate': f'{rate:g}',
            'minus `muon`': _interval(differences) if rule != 'muon' else '',
            'seeds': str(len(averages if rule == 'muon' else differences)),
            'average': _interval(averages),
          }
        )
  return rows


def equal_steps(by_steps: dict[int, Cells]) -> str:
  """Returns the tables of runs with as many steps at several batches."""
  return ''.join(
    f'## {steps} steps at every batch\n\nThe same number of steps, so a '
    'larger batch takes more tokens. Final loss and, in brackets, the largest '
    'logit at the end: means of the seeds, each batch at its best rate.\n\n'
    f'{_markdown(_by_batch(cells, _loss_and_logit))}\n'
    f'{_OF_ONE_RATE}\n\n{_markdown(_at_one_rate(cells))}\n'
    for steps, cells in by_steps.items()
  )


_OF_ONE_RATE = (
  'At one rate, which is the best at one of the batches: the change of the '
  'loss, and the factors of the largest logit at the end and of the run '
  '(geometric means), with 95 % intervals of pairs with the same seed. At '
  'equal loss: the same factor, where the training loss of the larger batch '
  'first is what the smaller one ends with (means of a tenth of the steps). It '
  'is reached after this share of its steps.'
)


def finer_rates(cells: Cells, finer: Cells) -> str:
  """Returns a table of rates between those that a rule was tuned with.

  Args:
    cells: Trials at the powers of two.
    finer: Trials between them.
  """
  rows = []
  for rule, own in finer.items():
    for batch, cell in own.items():
      coarse = cells[rule][batch]
      all_rates = Cell(coarse.tuning | cell.tuning, coarse.others | cell.others)
      tuned = coarse.at(coarse.rate())
      row = {'rule': f'`{rule}`', 'tokens a step': f'{batch:,}'}
      for power in (0, 0.5, 1, 1.5, 2):
        rate = Trial(rule, power, 0, batch).rate(PRESETS['ladder'][1])
        row[f'× {2**power:.3g}'] = _above(all_rates.at(rate), tuned)
      rows.append(row)
  if not rows:
    return ''
  return (
    '## Rates near the cliff\n\nFinal loss at multiples of the middle rate, '
    'half a power of two apart, minus that of the same seeds at the tuned rate '
    '(in brackets: largest logit of the run, and seeds as above).\n\n'
    f'{_markdown(rows)}\n'
  )


def _loss_and_logit(cell: Cell) -> str:
  return f'{spread(cell.losses)} ({mean_logit(cell.seeds):,.0f})'


def _at_one_rate(cells: Cells) -> Table:
  rows = []
  for rule, own in cells.items():
    rates = sorted({x.rate() for x in own.values()})
    for rate, (first, second) in itertools.product(
      rates, itertools.pairwise(own)
    ):
      small, large = own[first].at(rate), own[second].at(rate)
      pairs = [(small[x], large[x]) for x in large if x in small and x]
      if len(pairs) < 2:
        continue
      found = [x for x in itertools.starmap(at_equal_loss, pairs) if x]
      rows.append(
        {
          'rule': f'`{rule}`',
          'rate': f'{rate:g}',
          'tokens': f'{first:,} → {second:,}',
          'loss': _interval([loss_of(y) - loss_of(x) for x, y in pairs]),
          'logit at the end': _ratio(pairs, 'final_logits'),
          'of the run': _ratio(pairs, 'peak_logits'),
          'at equal loss': _factor([x for x, _ in found]),
          'reached after': f'{statistics.mean(x for _, x in found):.0f} %',
          'seeds': str(len(pairs)),
        }
      )
  return rows


def _ratio(pairs: list[tuple[Line, Line]], key: str) -> str:
  """Returns the second ones' largest logits over the first ones', as text."""
  return _factor([top(y, key) / top(x, key) for x, y in pairs])


def _factor(ratios: list[float]) -> str:
  """Returns the geometric mean with its interval, as text."""
  mean, low, high = map(math.exp, bounds([math.log(x) for x in ratios]))
  return f'× {mean:.2f} [{low:.2f}, {high:.2f}]'


def _rates(cells: Cells) -> Table:
  powers = sorted(
    {x for own in cells.values() for y in own.values() for x in y.tuning}
  )
  rows = []
  for rule, own in cells.items():
    for batch, cell in own.items():
      if not cell.tuning:
        continue
      chosen, _ = cell.chosen()
      some = next(iter(cell.tuning))
      middle = cell.tuning[some]['rate'] / 2.0**some
      row = {'rule': f'`{rule}`', 'tokens a step': f'{batch:,} ({middle:.3g})'}
      for power in powers:
        text = ''
        if power in cell.tuning:
          trial = cell.tuning[power]
          text = spread([loss_of(trial)])
          if power == chosen:
            text = f'**{text}**'
          elif cell.seeds and trial['rate'] == cell.rate():
            text += ' †'
        row[f'× {2.0**power:g}'] = text
      rows.append(row)
  return rows


def _markdown(rows: Table) -> str:
  """Returns a table of rows that have the first one's keys."""
  head, ruler = [*rows[0]], ['---'] * len(rows[0])
  cells = [[x or '–' for x in row.values()] for row in rows]
  lines: Iterable[Iterable[str]] = [head, ruler, *cells]
  return ''.join(f'| {" | ".join(x)} |\n' for x in lines)


if __name__ == '__main__':
  main()
