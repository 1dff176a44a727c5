"""Writes RESULTS.md and its figures from the folder data.

python -m examples.study.analysis.report
"""

from pathlib import Path

from matplotlib.figure import Figure

from examples.study.analysis import figures, large_batch_figures, tables
from examples.study.analysis.data import (
  FOLDER,
  Points,
  read_json,
  read_points,
)
from examples.study.analysis.runs import read_runs
from examples.study.analysis.tables import Rows, markdown
from examples.study.large_batch import read
from examples.study.settings import PRESETS

_STUDY = Path(__file__).parents[1]
_LARGE_BATCH = PRESETS['gpu'][1].results


def main() -> None:
  """Writes the page and the figures."""
  found = read_points()
  (_STUDY / 'RESULTS.md').write_text(page(found), encoding='utf-8')
  for name, figure in {
    'front': draw_front(found),
    'differences': figures.draw_differences(found),
    'rates': figures.draw_rates(found),
  }.items():
    figure.savefig(_STUDY / f'figures/{name}.png', dpi=120)


def draw_front(found: dict[str, Points]) -> Figure:
  """Draws losses at a million tokens a step, and of small models by batch."""
  figure = Figure((10, 3.8), layout='constrained')
  left, right = figure.subplots(1, 2)
  large_batch_figures.draw_losses(left, read_runs(read(_LARGE_BATCH)))
  left.set_title('12.3M parameters, 1,048,576 tokens per step')
  figures.draw_losses(right, found)
  right.set_title('0.17M parameters, 2.5M tokens')
  return figure


def all_tables(found: dict[str, Points]) -> dict[str, dict[str, Rows]]:
  """Returns the tables by experiment and name."""
  described = read_json('experiments')
  return {
    x['name']: {
      y['name']: tables.make_table(y, found[x['name']]) for y in x['tables']
    }
    for x in described['experiments']
  }


def page(found: dict[str, Points]) -> str:
  """Returns the text of RESULTS.md."""
  described = read_json('experiments')
  trials = tables.tuning_trials(described['tuning trials'], found)
  protocol = (FOLDER / 'protocol.md').read_text(encoding='utf-8')
  parts = [protocol.strip().replace('TUNING_TRIALS', markdown(trials))]
  made = all_tables(found)
  for x in described['experiments']:
    parts += [f'## {x["title"]}', x['text']]
    for name, rows in made[x['name']].items():
      parts += [f'{name.capitalize()}:', markdown(rows)]
  titles = '; '.join(x['title'] for x in read_json('closed').values())
  parts += ['## Earlier experiments', _EARLIER.format(titles)]
  return '\n\n'.join(parts) + '\n'


_EARLIER = (
  'The tables of these are in [closed.json](data/closed.json), as commit '
  '08638c0 printed them, with seed by seed comparisons where it had them: {}.'
)


if __name__ == '__main__':
  main()
