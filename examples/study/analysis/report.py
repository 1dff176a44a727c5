"""Writes RESULTS.md and its figures from stored points and trials."""

import json
import math
from pathlib import Path
import statistics
from typing import Any

from matplotlib.figure import Figure

from examples.gpt2.storage import write_whole
from examples.study.analysis import figures
from examples.study.analysis.tables import Tables, select
from examples.study.archive import cells
from examples.study.experiments import EXPERIMENTS
from examples.study.optimizers import HYPERBALL, MUON
from examples.study.points import Point, read_point
from examples.study.render import COLORS, markdown, panels
from examples.study.training.store import Store
from examples.study.trial import read_result
from examples.study.tuning.rest import KEPT, RMS

Found = dict[str, list[Point]]
"""Points by the name of the experiment."""


def write_points(folder: Path, complete: Found) -> None:
  """Writes points as JSON lines, a file for each experiment.

  Files of experiments that are not complete are removed.
  """
  folder.mkdir(parents=True, exist_ok=True)
  for name in EXPERIMENTS:
    path = folder / f'{name}.jsonl'
    if name in complete:
      lines = [json.dumps(x.line, ensure_ascii=False) for x in complete[name]]
      write_whole(path, ''.join(f'{x}\n' for x in lines).encode())
    else:
      path.unlink(missing_ok=True)


def read_points(folder: Path, store: Store) -> Found:
  """Returns the points in files of JSON lines."""
  trials = {key: read_result(x) for key, x in store.records.items()}
  paths = {name: folder / f'{name}.jsonl' for name in EXPERIMENTS}
  return {
    name: [
      read_point(json.loads(line), trials)
      for line in path.read_text().splitlines()
    ]
    for name, path in paths.items()
    if path.is_file()
  }


def all_tables(found: Found) -> dict[str, Tables]:
  """Returns the tables by experiment and name."""
  return {x: EXPERIMENTS[x].tables(points) for x, points in found.items()}


def text(name: str, found: Found, store: Store) -> str:
  """Returns the text of RESULTS.md of a scale."""
  parts = [
    f'# Results at scale {name}',
    f'Written by `python -m examples.study report --scale {name}` from the '
    'results of trials. The README of examples/study describes the protocol. '
    'Intervals are those of 95 % for a difference of means; a detectable '
    'difference is one that 80 % of such experiments would have shown.',
  ]
  if store.records:
    parts.append(_provenance(found, list(store.records.values())))
  if _has_summary(found):
    parts.append('![The study in short](figures/summary.png)')
  for experiment, tables in all_tables(found).items():
    module = EXPERIMENTS[experiment]
    figure = f'figures/{experiment}.png' if hasattr(module, 'figure') else ''
    parts.append(section(module.TITLE, module.TEXT, tables, figure))
  return '\n\n'.join(parts) + '\n'


def section(title: str, words: str, tables: Tables, figure: str = '') -> str:
  """Returns a section of tables, each below its name."""
  parts = [f'## {title}', f'![{title}]({figure})' if figure else '']
  parts.append(' '.join(words.split()))
  for name, rows in tables.items():
    if rows:
      parts += [f'{name[0].upper()}{name[1:]}:', markdown(rows)]
  return '\n\n'.join(filter(None, parts))


def _provenance(found: Found, records: list[dict[str, Any]]) -> str:
  """Returns how many trials there are, and with what they were trained."""
  names = ('python', 'jax', 'optax')
  versions = dict.fromkeys(
    ', '.join(f'{name} {x["versions"][name]}' for name in names)
    for x in records
  )
  points = [x for experiment in found.values() for x in experiment]
  used = {x.key for point in points for x in point.results}
  seconds = [x['seconds'] for x in records]
  sha256 = next(filter(None, (x['corpus_sha256'] for x in records)))
  diverged = [x for x in records if math.isinf(read_result(x).loss)]
  return (
    f'{len(records):,} trials are stored, of which {len(used):,} are in the '
    f'tables below, and {len(diverged)} diverged; '
    f'{statistics.median(seconds):.0f} s each (median), '
    f'{sum(seconds) / 3600:.1f} hours in all. Made with '
    f'{"; ".join(versions)}. Text: sha256 {sha256[:16]}.'
  )


def write(folder: Path, name: str, found: Found, store: Store) -> list[Path]:
  """Writes RESULTS.md and its figures, and returns the files written.

  Figures of experiments that are not complete are removed.
  """
  drawn = {
    x: EXPERIMENTS[x].figure(points)
    for x, points in found.items()
    if hasattr(EXPERIMENTS[x], 'figure')
  }
  if _has_summary(found):
    drawn['summary'] = _summary(found)
  path = folder / 'RESULTS.md'
  path.write_text(text(name, found, store))
  saved = [path]
  for figure_name in (*EXPERIMENTS, 'summary'):
    figure_path = folder / 'figures' / f'{figure_name}.png'
    if figure_name in drawn:
      figure_path.parent.mkdir(exist_ok=True)
      drawn[figure_name].savefig(figure_path, dpi=100)
      saved.append(figure_path)
    else:
      figure_path.unlink(missing_ok=True)
  return saved


def _has_summary(found: Found) -> bool:
  return {'tuned-initialization', 'aux', 'rate-tolerance'} <= found.keys()


def _summary(found: Found) -> Figure:
  """Draws losses by batch, the lead over Muon, and losses by learning rate."""
  result, ((left, middle, right),) = panels(1, 3)
  result.set_size_inches(12, 3.8)
  tuned = select(found['tuned-initialization'], role='best')
  figures.draw_lines(left, tuned, 'batch')
  left.legend(fontsize=7)
  left.set_title('tuned: rate, warm-up, b1, initial weights', fontsize=9)
  figures.draw_difference(
    middle,
    tuned,
    HYPERBALL.name,
    MUON.name,
    color=COLORS[HYPERBALL.name],
    label='tuned as on the left',
  )
  rest_tuned = select(found['aux'], role='best')
  figures.draw_difference(
    middle, rest_tuned, KEPT, RMS, color='black', label='rest tuned too'
  )
  middle.axhline(0, color=COLORS[MUON.name])
  middle.legend(fontsize=7)
  middle.set_title('Hyperball minus Muon, with 95 % intervals', fontsize=9)
  for axes in (left, middle):
    figures.label_batches(axes, tuned)
  figures.draw_costs(right, found['rate-tolerance'])
  return result


def archive_text(records: cells.Records) -> str:
  """Returns the tables of the experiments that are closed."""
  parts = [
    '# Results of closed experiments',
    'Written by `python -m examples.study report` from stored trials. '
    '[What they are](README.md), and which commit has the code that ran them.',
    *(archived_section(name, records) for name in cells.NAMES),
  ]
  return '\n\n'.join(parts) + '\n'


def archived_section(name: str, records: cells.Records) -> str:
  """Returns the section of a closed experiment."""
  title, words, tables = cells.read(name, records)
  return section(title, words, tables, f'figures/{name}.png')
