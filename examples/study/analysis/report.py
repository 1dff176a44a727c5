"""Writes RESULTS.md and its figures from stored points and trials."""

from collections import Counter
from collections.abc import Mapping
import json
from pathlib import Path
import statistics
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from examples.gpt2.data.atomic import write_whole
from examples.study.analysis.figures import draw_lead, over_batches
from examples.study.analysis.logits import draw_costs
from examples.study.analysis.tables import Tables, select
from examples.study.archive import cells
from examples.study.experiments import EXPERIMENTS
from examples.study.optimizers import HYPERBALL, MUON
from examples.study.points import Point, read_point
from examples.study.render import markdown, panels
from examples.study.trial import Result, read_result

Found = dict[str, list[Point]]
"""Points by the name of the experiment."""


def read_points(path: Path, trials: Mapping[str, Result]) -> list[Point]:
  """Returns the points in a file of JSON lines.

  Args:
    path: The file.
    trials: Results of trials by their keys.
  """
  lines = path.read_text().splitlines()
  return [read_point(json.loads(line), trials) for line in lines]


def write_points(path: Path, points: list[Point]) -> None:
  """Writes points as JSON lines, if they are not there already."""
  lines = ''.join(
    json.dumps(x.line, separators=(',', ':'), ensure_ascii=False) + '\n'
    for x in points
  )
  if not path.is_file() or path.read_text() != lines:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lines.encode())


def read_study(
  results: Path, name: str
) -> tuple[Found, dict[str, dict[str, Any]]]:
  """Returns what a scale has found out, and the records of its trials.

  Args:
    results: Folder of the results.
    name: Name of the scale.
  """
  path = results / f'{name}.jsonl'
  lines = path.read_text().splitlines() if path.is_file() else []
  records = {x['key']: x for x in map(json.loads, lines)}
  trials = {key: read_result(x) for key, x in records.items()}
  paths = {x: results / name / f'{x}.jsonl' for x in EXPERIMENTS}
  found = {x: read_points(p, trials) for x, p in paths.items() if p.is_file()}
  return found, records


def write(folder: Path, results: Path, name: str) -> list[Path]:
  """Writes RESULTS.md and its figures.

  Args:
    folder: Where they go.
    results: Folder of the results.
    name: Name of the scale.

  Returns:
    The files written.
  """
  found, records = read_study(results, name)
  figures = folder / 'figures'
  figures.mkdir(parents=True, exist_ok=True)
  path = folder / 'RESULTS.md'
  path.write_text(text(name, found, records))
  drawn = {x: EXPERIMENTS[x].figure(points) for x, points in found.items()}
  if _has_summary(found):
    drawn['summary'] = _summary(found)
  return [path, *(_save(figures / f'{x}.png', y) for x, y in drawn.items())]


def all_tables(found: Found) -> dict[str, Tables]:
  """Returns the tables by experiment and name."""
  return {x: EXPERIMENTS[x].tables(points) for x, points in found.items()}


def text(name: str, found: Found, records: dict[str, dict[str, Any]]) -> str:
  """Returns the text of RESULTS.md.

  Args:
    name: Name of the scale.
    found: Points of experiments that are complete.
    records: Records of all trials.
  """
  parts = [
    f'# Results at scale {name}',
    f'Written by `python -m examples.study report --scale {name}` from the '
    'results of trials. The README of examples/study describes the protocol. '
    'Intervals are those of 95 % for a difference of means; a detectable '
    'difference is one that 80 % of such experiments would have shown.',
  ]
  if records:
    parts.append(_provenance(found, list(records.values())))
  if _has_summary(found):
    parts.append('![The study in short](figures/summary.png)')
  for experiment, tables in all_tables(found).items():
    module = EXPERIMENTS[experiment]
    parts += [
      section(module.TITLE, module.TEXT, tables, f'figures/{experiment}.png')
    ]
  if missing := [x for x in EXPERIMENTS if x not in found]:
    parts.append(
      f'Not complete, since trials are missing: {", ".join(missing)}.'
    )
  return '\n\n'.join(parts) + '\n'


def section(title: str, words: str, tables: Tables, figure: str) -> str:
  """Returns a section of tables, each below its name."""
  parts = [f'## {title}', f'![{title}]({figure})', ' '.join(words.split())]
  for name, rows in tables.items():
    if rows:
      parts += [f'{name[0].upper()}{name[1:]}:', markdown(rows)]
  return '\n\n'.join(parts)


def _provenance(found: Found, records: list[dict[str, Any]]) -> str:
  """Returns how many trials there are, and with what they were trained."""
  versions = Counter(
    ', '.join(
      f'{name} {x["versions"][name]}' for name in ('python', 'jax', 'optax')
    )
    for x in records
  )
  used = {
    result.key
    for points in found.values()
    for point in points
    for result in point.results
  }
  seconds = [x['seconds'] for x in records]
  texts = [x['corpus_sha256'] for x in records]
  diverged = [x for x in records if x['loss'] is None]
  return (
    f'{len(records):,} trials are stored, of which {len(used):,} are in the '
    f'tables below, and {len(diverged)} diverged; '
    f'{statistics.median(seconds):.0f} s each (median), '
    f'{sum(seconds) / 3600:.1f} hours in all. Made with '
    + '; '.join(versions)
    + f'. Text: sha256 {next(filter(None, texts))[:16]}.'
  )


def _has_summary(found: Found) -> bool:
  return {'tuned-initialization', 'rate-tolerance'} <= found.keys()


def _summary(found: Found) -> Figure:
  """Draws losses by batch, the lead over Muon, and losses by learning rate."""
  result, ((left, middle, right),) = panels(1, 3)
  result.set_size_inches(12, 3.8)
  tuned = select(found['tuned-initialization'], role='best')
  over_batches(left, tuned)
  left.legend(fontsize=7)
  left.set_title('tuned: rate, warm-up, b1, initial weights', fontsize=9)
  draw_lead(middle, tuned, HYPERBALL.name, MUON.name)
  draw_costs(right, found['rate-tolerance'])
  return result


def _save(path: Path, figure: Figure) -> Path:
  figure.savefig(path, dpi=100)
  plt.close(figure)
  return path


def archive_text(records: cells.Records) -> str:
  """Returns the tables of the experiments that are closed.

  Args:
    records: Stored trials, of the scale ``nano``.
  """
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
