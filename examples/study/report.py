"""Puts tables of trials into a page, and pictures beside it.

    python -m examples.study.report                     # the ladder
    python -m examples.study.report runs/laptop.jsonl runs/laptop.md

The tables stand between two marks in the page; all else is left as it is.
"""

import collections
from collections.abc import Callable, Iterable
import dataclasses
import itertools
import json
import math
from pathlib import Path
import statistics
from typing import Any, TypeAlias

from matplotlib import ticker
from matplotlib.figure import Figure
import numpy as np
from scipy import stats
import tyro

from examples.study.large_batch import choose, facts_of, loss_of, read
from examples.study.settings import PRESETS, Trial

_BEGIN, _END = '<!-- tables: begin -->', '<!-- tables: end -->'
# Rules of the pictures, in Okabe and Ito's colours, which colour-blind readers
# can tell apart. All but the last two update all parameters.
_NAMES = {
  'adamw-all': ('AdamW', '#0072b2'),
  'lamb-all': ('LAMB', '#e69f00'),
  'merit-all': ('MERIT', '#009e73'),
  'muon': ('Muon', '#d55e00'),
  'adamw': ('AdamW, hidden', '#0072b2'),
  'merit': ('MERIT, hidden', '#009e73'),
}
_LINES = 4
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
Line: TypeAlias = dict[str, Any]
"""A trial, as it stands in the file."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """The trials of a rule at a batch.

  Attributes:
    tuning: Trials of seed 0, by the power of two of their rate.
    others: Trials of other seeds, likewise.
  """

  tuning: dict[int, Line]
  others: dict[int, list[Line]]

  @property
  def seeds(self) -> list[Line]:
    """Trials of other seeds: of several rates, with the best mean loss."""
    most = max(map(len, self.others.values()), default=0)
    complete = [x for x in self.others.values() if len(x) == most]
    return min(
      complete,
      key=lambda trials: statistics.mean(map(loss_of, trials)),
      default=[],
    )

  @property
  def losses(self) -> list[float]:
    """Final losses of the seeds, in nats per token."""
    return [loss_of(x) for x in self.seeds]

  def by_seed(self) -> dict[int, float]:
    """Returns the final losses by seed."""
    return {x['trial']['seed']: loss_of(x) for x in self.seeds}

  def at(self, rate: float) -> dict[int, Line]:
    """Returns the trials by seed whose rate is this, but for its rounding."""
    trials = [*self.tuning.values(), *itertools.chain(*self.others.values())]
    return {
      x['trial']['seed']: x
      for x in trials
      if math.isclose(x['rate'], rate, rel_tol=0.02)
    }

  def chosen(self) -> tuple[int, bool]:
    """Returns the power of two that seed 0 chose, and whether it was close."""
    return choose({k: loss_of(x) for k, x in self.tuning.items()})

  def rate(self) -> float:
    """Returns the learning rate of the seeds, or that which seed 0 chose."""
    return float((self.seeds or [self.tuning[self.chosen()[0]]])[0]['rate'])


Cells: TypeAlias = dict[str, dict[int, Cell]]
"""Cells by rule, then by tokens of a step."""


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
      as many steps at other batches.
    page: The page; made if need be. The pictures get its name.
  """
  lines = read(results)
  cells = read_cells(results)
  text = page.read_text() if page.exists() else f'{_BEGIN}\n{_END}\n'
  before, _, rest = text.partition(_BEGIN)
  _, _, after = rest.partition(_END)
  page.parent.mkdir(parents=True, exist_ok=True)
  all_tables = tables(cells) + equal_steps(
    lines + read(results.with_name('equal_steps.jsonl'))
  )
  page.write_text(f'{before}{_BEGIN}\n\n{all_tables}\n{_END}{after}')
  print(f'wrote {page}')
  for name, picture in {
    '': draw(cells),
    '_carried': draw_carried(cells),
  }.items():
    if picture:
      file = page.with_name(f'{page.stem.lower()}{name}.png')
      # A test looks there for what a picture shows.
      shown = {'Description': json.dumps(picture.shown)}
      picture.figure.savefig(file, dpi=200, metadata=shown)
      print(f'wrote {file}')


def read_cells(results: Path) -> Cells:
  """Returns the trials of a file.

  A rule has the settings in its name that differ from those of the last line.

  Raises:
    FileNotFoundError: If there are none.
  """
  lines = read(results)
  if not lines:
    raise FileNotFoundError(f'results: {results} holds no trial.')
  usual = facts_of(lines[-1])

  def label(x: Line) -> str:
    rule = x['trial']['rule']
    others = [f'{k}={v}' for k, v in facts_of(x).items() if v != usual.get(k)]
    return ', '.join([rule, *others])

  return _group(lines, label)


def _group(lines: Iterable[Line], label: Callable[[Line], str]) -> Cells:
  found: Cells = collections.defaultdict(dict)
  for x in lines:
    trial = Trial(**x['trial'])
    cell = found[label(x)].setdefault(trial.batch_tokens, Cell({}, {}))
    if trial.seed:
      cell.others.setdefault(trial.power, []).append(x)
    else:
      cell.tuning[trial.power] = x
  return {k: dict(sorted(x.items())) for k, x in found.items()}


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
      'rate within 0.003 of its best loss. Where several rates have as many '
      'seeds, the better mean.',
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
      'The largest attention logit of all layers at the end, mean of the '
      'seeds; in brackets the largest of the run, which is taken from more '
      'measurements at smaller batches (every second step).',
      _by_batch(tuned, _logits),
    ),
    (
      'Rates carried over',
      'The best rate of the first batch, kept, times √ of the ratio of '
      'batches, and times the ratio: final loss minus that of the same seeds '
      'at the rate tuned at the second batch (in brackets: largest logit at '
      'the end, mean of the seeds, and how many seeds there are beside seed 0; '
      '0: seed 0 alone, which chose the tuned rate and so flatters it).',
      _carried(tuned),
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
  batches = _batches(cells)
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


def _batches(cells: Cells) -> list[int]:
  return sorted({batch for own in cells.values() for batch in own})


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


def mean_logit(trials: Iterable[Line], key: str = 'final_logits') -> float:
  """Returns the mean over trials of the largest logit over layers."""
  return statistics.mean(max(x[key]) for x in trials)


def _logits(cell: Cell) -> str:
  peak = mean_logit(cell.seeds, 'peak_logits')
  return f'{mean_logit(cell.seeds):,.0f} ({peak:,.0f})'


def _paired(first: dict[int, float], second: dict[int, float]) -> list[float]:
  return [first[x] - second[x] for x in sorted(first) if x in second]


def _interval(differences: list[float]) -> str:
  """Returns the mean with its interval, as text."""
  if not differences or not np.isfinite(differences).all():
    return ''
  mean, low, high = _bounds(differences)
  if len(differences) == 1:
    return f'{mean:+z.3f}'
  return f'{mean:+z.3f} [{low:+z.3f}, {high:+z.3f}]'


def _bounds(differences: list[float]) -> list[float]:
  """Returns the mean and its 95 % interval, which is empty for one value."""
  mean = statistics.mean(differences)
  if len(differences) == 1:
    return [mean] * 3
  low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
  return [mean, float(low), float(high)]


def _rises(cells: Cells) -> Table:
  return [
    {'rule': f'`{rule}`'}
    | {
      f'{x:,} → {y:,}': _interval(_paired(own[y].by_seed(), own[x].by_seed()))
      if x in own and y in own
      else ''
      for x, y in itertools.pairwise(_batches(cells))
    }
    for rule, own in cells.items()
    if sum(bool(x.seeds) for x in own.values()) > 1
  ]


def _pooled(cells: Cells, batch: int) -> tuple[float, int]:
  """Returns the deviation of losses, without means of rules and seeds.

  And its degrees of freedom: those of a table of rules by seeds.
  """
  rows = [x[batch].by_seed() for x in cells.values() if batch in x]
  rows = [x for x in rows if x]
  common = sorted(set.intersection(*map(set, rows))) if rows else []
  table = np.array([[x[seed] for seed in common] for x in rows])
  if min(table.shape) < 2 or not np.isfinite(table).all():
    return math.nan, 0
  rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
  free = (table.shape[0] - 1) * (table.shape[1] - 1)
  return math.sqrt((rest**2).sum() / free), free


def _differences(cells: Cells) -> Table:
  empty = Cell({}, {})
  found = {
    (pair, batch): _paired(
      *(cells[x].get(batch, empty).by_seed() for x in pair)
    )
    for pair in _PAIRS
    if set(pair) <= set(cells)
    for batch in _batches(cells)
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
    for batch in _batches(cells):
      differences = found[pair, batch]
      text = _interval(differences)
      if len(differences) > 1 and text:
        low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        deviation, free = _pooled(cells, batch)
        error = deviation * math.sqrt(2 / len(differences))
        half = stats.t.ppf(0.975, free) * error
        star = '*' if (pair, batch) in survive else ''
        text += f'{star} ({half:.3f}; {1.3 * (high - low) / 2:.3f})'
      row[f'{batch:,} tokens'] = text
    rows.append(row)
  return rows


def holm(p_values: dict[Any, float]) -> set[Any]:
  """Returns the keys that are significant at 5 % by Holm's procedure."""
  survive: set[Any] = set()
  for rank, key in enumerate(sorted(p_values, key=lambda x: p_values[x])):
    if p_values[key] > 0.05 / (len(p_values) - rank):
      break
    survive.add(key)
  return survive


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
  carried, tuned = _same_seeds(cell, rate)
  if not carried:
    return ''
  if carried == tuned:
    return f'the tuned rate ({mean_logit(tuned):,.0f})'
  text = _interval(_losses_above(carried, tuned)) or 'diverged'
  count = sum(x['trial']['seed'] > 0 for x in carried)
  return f'{text} ({mean_logit(carried):,.0f}; {count})'


def _same_seeds(cell: Cell, rate: float) -> tuple[list[Line], list[Line]]:
  """Returns the trials at a rate and at the tuned one, of the same seeds.

  Seed 0, which chose the tuned rate, is used alone or not at all.
  """
  given, tuned = cell.at(rate), cell.at(cell.rate())
  common = sorted({*given} & {*tuned})
  seeds = [x for x in common if x] or common
  return [given[x] for x in seeds], [tuned[x] for x in seeds]


def _losses_above(first: list[Line], second: list[Line]) -> list[float]:
  return [loss_of(x) - loss_of(y) for x, y in zip(first, second, strict=True)]


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
        differences = _paired(losses, base_losses)
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


def equal_steps(lines: list[Line]) -> str:
  """Returns the tables of runs with as many steps at several batches."""
  by_steps = collections.defaultdict(list)
  for x in lines:
    batch = x['trial']['batch_tokens']
    by_steps[x['settings']['tokens'] // batch].append(x)
  parts = []
  for steps, own in sorted(by_steps.items()):
    cells = _group(own, lambda x: x['trial']['rule'])
    several = {k: x for k, x in cells.items() if len(x) > 1}
    if several:
      parts.append(
        f'## {steps} steps at every batch\n\nThe same number of steps, so a '
        'larger batch takes more tokens. Final loss and, in brackets, the '
        'largest logit at the end: means of the seeds, each batch at its best '
        f'rate.\n\n{_markdown(_by_batch(several, _loss_and_logit))}\n'
        'At one rate, that of the largest batch: the change of the loss, and '
        'the factor of the largest logit at the end (geometric mean), with '
        f'95 % intervals of pairs with the same seed.\n\n'
        f'{_markdown(_at_one_rate(several))}\n'
      )
  return ''.join(parts)


def _loss_and_logit(cell: Cell) -> str:
  return f'{spread(cell.losses)} ({mean_logit(cell.seeds):,.0f})'


def _at_one_rate(cells: Cells) -> Table:
  rows = []
  for rule, own in cells.items():
    rate = own[max(own)].rate()
    for first, second in itertools.pairwise(own):
      pair = [own[second].at(rate), own[first].at(rate)]
      seeds = [x for x in pair[0] if x in pair[1] and x]
      losses = [{x: loss_of(y[x]) for x in seeds} for y in pair]
      logs = [
        {x: math.log(max(y[x]['final_logits'])) for x in seeds} for y in pair
      ]
      row = {'rule': f'`{rule}`', 'rate': f'{rate:g}'}
      row['tokens'] = f'{first:,} → {second:,}'
      row['loss'] = _interval(_paired(*losses))
      row['largest logit'] = _factor(_paired(*logs))
      rows.append(row | {'seeds': str(len(seeds))})
  return rows


def _factor(logs: list[float]) -> str:
  if len(logs) < 2:
    return ''
  low, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
  mean, low, high = (math.exp(x) for x in (statistics.mean(logs), low, high))
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


@dataclasses.dataclass(frozen=True)
class Picture:
  """A figure, and the numbers that it shows by the names of rules."""

  figure: Figure
  shown: dict[str, dict[str, list[float]]]


def draw(cells: Cells) -> Picture:
  """Draws losses and logits over the batch, each rate tuned at its batch."""
  figure = Figure((6, 3.6), layout='constrained')
  losses, logits = figure.subplots(1, 2)
  few = [*_NAMES][:_LINES] if len(cells) > len(_NAMES) else [*cells]
  shown = {}
  for i, rule in enumerate(few):
    done = {batch: x.seeds for batch, x in cells[rule].items() if x.seeds}
    name, color = _NAMES.get(rule, (rule, f'C{i}'))
    shown[name] = {
      'tokens': [float(x) for x in done],
      'loss': [statistics.mean(map(loss_of, x)) for x in done.values()],
      'logit': [mean_logit(x) for x in done.values()],
    }
    for axes, key in ((losses, 'loss'), (logits, 'logit')):
      axes.plot(
        [*done], shown[name][key], color=color, marker='o', ms=4, label=name
      )
  losses.set(title='final loss (nats)')
  logits.set(title='largest attention logit', ylim=(0, None))
  ticks = _batches(cells)
  for axes in (losses, logits):
    axes.set(xscale='log', xlabel='tokens a step')
    axes.set_xticks(ticks, [f'{x:,}' for x in ticks])
    axes.minorticks_off()
    axes.grid(axis='y', lw=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  figure.legend(
    *losses.get_legend_handles_labels(),
    ncols=_LINES,
    frameon=False,
    loc='outside upper center',
  )
  return Picture(figure, shown)


def draw_carried(cells: Cells) -> Picture | None:
  """Draws what the best rate of a batch, times √16, does at 16 times the batch.

  Returns:
    The picture; ``None`` without trials at such rates.
  """
  shown = {}
  first = min(_batches(cells))
  for rule, (name, _) in _NAMES.items():
    small, large = (cells.get(rule, {}).get(x) for x in (first, 16 * first))
    if small and small.seeds and large and large.seeds:
      carried, tuned = _same_seeds(large, 4 * small.rate())
      if carried:
        shown[name] = {
          'loss': _bounds(_losses_above(carried, tuned)),
          'logit': [mean_logit(tuned), mean_logit(carried)],
        }
  if not shown:
    return None
  figure = Figure((6, 3.2), layout='constrained')
  losses, logits = figure.subplots(1, 2, sharey=True)
  colors = dict(_NAMES.values())
  for name, values in shown.items():
    style = {'color': colors[name], 'marker': 'o', 'ms': 6}
    mean, low, high = values['loss']
    losses.plot([low, high], [name] * 2, color=colors[name])
    losses.plot([mean], [name], **style)
    before, after = values['logit']
    logits.plot([before, after], [name] * 2, color=colors[name])
    logits.plot([before], [name], **style, mfc='white')
    logits.plot([after], [name], **style)
  losses.axvline(0, color='black', lw=0.8)
  losses.invert_yaxis()
  losses.set(title='loss above that\nof the tuned rate')
  logits.set(title='largest attention logit\n○ tuned rate  ● carried rate')
  logits.set(xscale='log')
  logits.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
  logits.xaxis.set_major_formatter(ticker.StrMethodFormatter('{x:,.0f}'))
  logits.minorticks_off()
  for axes in (losses, logits):
    axes.grid(axis='x', lw=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  return Picture(figure, shown)


if __name__ == '__main__':
  main()
