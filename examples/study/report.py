"""Puts tables and a picture of trials into a page.

    python -m examples.study.report                     # the ladder
    python -m examples.study.report runs/laptop.jsonl runs/laptop.md

The tables stand between two marks in the page; all else is left as it is.
"""

import collections
from collections.abc import Callable, Iterable
import dataclasses
import itertools
from pathlib import Path
import statistics
from typing import Any, TypeAlias

from matplotlib import ticker
from matplotlib.figure import Figure
import numpy as np
from scipy import stats
import tyro

from examples.study.large_batch import choose, loss_of, read
from examples.study.settings import PRESETS, Trial

_BEGIN, _END = '<!-- tables: begin -->', '<!-- tables: end -->'
# Within it of its own best loss, a rule keeps its loss.
_KEPT = 0.02
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_NAMES = {
  'merit': ('MERIT + Adam', '#009e73', '-'),
  'merit-all': ('MERIT', '#009e73', '--'),
  'merit-l2': ('MERIT with l2 norms + Adam', '#56b4e9', '-'),
  'lamb': ('LAMB + Adam', '#e69f00', '-'),
  'lamb-all': ('LAMB', '#e69f00', '--'),
  'adamw': ('AdamW + Adam', '#0072b2', '-'),
  'muon': ('Muon + Adam', '#d55e00', '-'),
}

Table: TypeAlias = list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Cell:
  """The trials of a rule at a batch.

  Attributes:
    tuning: Trials of seed 0, by the power of two of their rate.
    others: Trials of other seeds, likewise.
  """

  tuning: dict[int, dict[str, Any]]
  others: dict[int, list[dict[str, Any]]]

  @property
  def seeds(self) -> list[dict[str, Any]]:
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

  @property
  def mean(self) -> float:
    """Mean final loss."""
    return statistics.mean(self.losses)

  def choice(self) -> tuple[int, bool]:
    """Returns the power of two that was chosen, and whether it was close."""
    power, is_close = choose({k: loss_of(x) for k, x in self.tuning.items()})
    return (self.seeds[0]['trial']['power'] if self.seeds else power), is_close


Cells: TypeAlias = dict[str, dict[int, Cell]]
"""Cells by rule, then by tokens of a step."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  tyro.cli(write, args=args)


def write(
  results: tyro.conf.Positional[Path] = PRESETS['ladder'][1].results,
  page: tyro.conf.Positional[Path] = Path('examples/study/LADDER.md'),
) -> None:
  """Puts tables and a picture of trials into a page.

  Args:
    results: File of the trials.
    page: The page; made if need be. The picture gets its name.
  """
  cells = read_cells(results)
  text = page.read_text() if page.exists() else f'{_BEGIN}\n{_END}\n'
  before, _, rest = text.partition(_BEGIN)
  _, _, after = rest.partition(_END)
  page.parent.mkdir(parents=True, exist_ok=True)
  page.write_text(f'{before}{_BEGIN}\n\n{tables(cells)}\n{_END}{after}')
  picture = page.with_name(f'{page.stem.lower()}.png')
  draw(cells).savefig(picture, dpi=120)
  print(f'wrote {page} and {picture}')


def read_cells(results: Path) -> Cells:
  """Returns the trials of a file.

  A rule has the settings in its name that differ from those of the last line:
  trials of older code are another rule.

  Raises:
    FileNotFoundError: If there are none.
  """
  lines = read(results)
  if not lines:
    raise FileNotFoundError(f'results: {results} holds no trial.')
  newest = {x['trial']['rule']: x['settings']['code'] for x in lines}
  usual = lines[-1]['settings']
  found: Cells = collections.defaultdict(dict)
  for x in lines:
    trial = Trial(**x['trial'])
    expected = usual | {'code': newest[trial.rule]}
    others = [
      f'{k}={v}' for k, v in x['settings'].items() if v != expected.get(k)
    ]
    label = ', '.join([trial.rule, *others])
    cell = found[label].setdefault(trial.batch_tokens, Cell({}, {}))
    if trial.seed:
      cell.others.setdefault(trial.power, []).append(x)
    else:
      cell.tuning[trial.power] = x
  return {k: dict(sorted(x.items())) for k, x in found.items()}


def tables(cells: Cells) -> str:
  """Returns all tables, in Markdown."""
  return '\n'.join(
    [
      'Final validation loss in nats per token, mean ± standard deviation of '
      'the seeds, and the chosen learning rate; ≈ where a rate within 0.003 '
      'of the best loss was left. Of several rates with seeds, the better '
      'mean.\n',
      _markdown(_by_batch(cells, _loss, 'kept up to', kept_up_to)),
      f'*Kept up to*: the largest batch within {_KEPT} of the best batch, '
      'with all batches between.\n',
      'Differences of losses with the same seed (initial weights and batches), '
      'and their 95 % intervals (t):\n',
      _markdown(_differences(cells)),
      'Largest attention logit of all layers and seeds, over all measured '
      'steps, and at the end:\n',
      _markdown(_by_batch(cells, _logits)),
      'Final loss of seed 0 at multiples of the middle rate (its value in '
      'brackets); chosen in bold:\n',
      _markdown(_rates(cells)),
    ]
  )


def _by_batch(
  cells: Cells,
  show: Callable[[Cell], str],
  last: str = '',
  summarize: Callable[[dict[int, Cell]], str] | None = None,
) -> Table:
  """Returns a row for each rule, with a column for each batch."""
  batches = _batches(cells)
  rows = []
  for rule, own in cells.items():
    done = {batch: x for batch, x in own.items() if x.seeds}
    row = {'rule': f'`{rule}`'} | {
      f'{batch:,} tokens': show(done[batch]) if batch in done else ''
      for batch in batches
    }
    if summarize is not None:
      row[last] = summarize(done)
    rows.append(row)
  return rows


def _batches(cells: Cells) -> list[int]:
  return sorted({batch for own in cells.values() for batch in own})


def _loss(cell: Cell) -> str:
  _, is_close = cell.choice()
  rate = f'{"≈ " if is_close else ""}{cell.seeds[0]["rate"]:g}'
  return f'{spread(cell.losses)} ({rate})'


def spread(losses: list[float]) -> str:
  """Returns mean and standard deviation as text."""
  if not np.isfinite(losses).all():
    return f'{sum(np.isinf(losses))} of {len(losses)} diverged'
  if len(losses) == 1:
    return f'{losses[0]:.3f}'
  return f'{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}'


def _logits(cell: Cell) -> str:
  peak = max(max(x['peak_logits']) for x in cell.seeds)
  final = max(max(x['final_logits']) for x in cell.seeds)
  return f'{peak:,.0f}, {final:,.0f}'


def kept_up_to(own: dict[int, Cell]) -> str:
  """Returns the largest batch up to which all are near the best loss."""
  if not own:
    return ''
  limit = min(x.mean for x in own.values()) + _KEPT
  first = min(own, key=lambda batch: own[batch].mean)
  kept = [batch for batch in own if batch >= first]
  kept = list(itertools.takewhile(lambda x: own[x].mean <= limit, kept))
  return f'{kept[-1]:,}'


def _differences(cells: Cells) -> Table:
  rows = []
  for rule, own in cells.items():
    if rule == 'merit':
      continue
    is_for_all = rule.endswith('-all') and rule != 'merit-all'
    base = 'merit-all' if is_for_all else 'merit'
    row = {'rule': f'`{rule}` − `{base}`'}
    for batch in _batches(cells):
      pair = [x.get(batch, Cell({}, {})) for x in (own, cells.get(base, {}))]
      row[f'{batch:,} tokens'] = _difference(*(x.by_seed() for x in pair))
    rows.append(row)
  return rows


def _difference(first: dict[int, float], second: dict[int, float]) -> str:
  """Returns the mean difference of seeds with its interval, as text."""
  differences = [first[x] - second[x] for x in first if x in second]
  if not differences or not np.isfinite(differences).all():
    return ''
  mean = statistics.mean(differences)
  if len(differences) == 1:
    return f'{mean:+z.3f}'
  low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
  return f'{mean:+z.3f} [{low:+z.3f}, {high:+z.3f}]'


def _rates(cells: Cells) -> Table:
  powers = sorted(
    {x for own in cells.values() for y in own.values() for x in y.tuning}
  )
  rows = []
  for rule, own in cells.items():
    for batch, cell in own.items():
      if not cell.tuning:
        continue
      chosen, _ = cell.choice()
      some = next(iter(cell.tuning))
      middle = cell.tuning[some]['rate'] / 2.0**some
      row = {'rule': f'`{rule}`', 'tokens a step': f'{batch:,} ({middle:.3g})'}
      for power in powers:
        text = ''
        if power in cell.tuning:
          text = spread([loss_of(cell.tuning[power])])
        row[f'× {2.0**power:g}'] = f'**{text}**' if power == chosen else text
      rows.append(row)
  return rows


def _markdown(rows: Table) -> str:
  """Returns a table of rows that have the first one's keys."""
  head, ruler = [*rows[0]], ['---'] * len(rows[0])
  cells = [[x or '–' for x in row.values()] for row in rows]
  lines: Iterable[Iterable[str]] = [head, ruler, *cells]
  return ''.join(f'| {" | ".join(x)} |\n' for x in lines)


def draw(cells: Cells) -> Figure:
  """Draws final losses, and peak and final attention logits, over the batch."""
  figure = Figure((10, 3.9), layout='constrained')
  left, right = figure.subplots(1, 2)
  for i, (rule, own) in enumerate(cells.items()):
    name, color, line = _NAMES.get(rule, (rule, f'C{i}', ':'))
    done = {batch: x for batch, x in own.items() if x.seeds}
    batches = list(done)
    style = {'color': color, 'linestyle': line, 'lw': 1.4}
    left.plot(batches, [x.mean for x in done.values()], label=name, **style)
    for batch, cell in done.items():
      points = [batch] * len(cell.losses)
      left.plot(points, cell.losses, 'o', ms=2.5, color=color)
    for key, marker in (('peak_logits', '^'), ('final_logits', 'o')):
      means = [
        statistics.mean(max(x[key]) for x in cell.seeds)
        for cell in done.values()
      ]
      right.plot(batches, means, marker=marker, ms=3.5, **style)
  left.set(title='Final validation loss', ylabel='nats per token')
  right.set(
    title='Largest attention logit (▲ of the run, ● at its end)', yscale='log'
  )
  ticks = _batches(cells)
  for axes in (left, right):
    axes.set(xscale='log', xlabel='tokens per step')
    axes.set_xticks(ticks, [f'{x:,}' for x in ticks])
    axes.minorticks_off()
    axes.spines[['top', 'right']].set_visible(False)
  right.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
  right.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:,.0f}'))
  left.legend(frameon=False, fontsize=8)
  return figure


if __name__ == '__main__':
  main()
