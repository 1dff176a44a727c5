"""The results that are committed, and the pages that quote them."""

import itertools
import math
from pathlib import Path

import pytest

from examples.study import scales
from examples.study.analysis import report, tables
from examples.study.analysis.lengths import steps_to
from examples.study.analysis.logits import costs, peak
from examples.study.archive import cells
from examples.study.experiments import EXPERIMENTS
from examples.study.points import Point
from examples.study.training.store import Store
from examples.study.trial import Result
from examples.study.tuning.plans import execute

_STUDY = Path(report.__file__).parents[1]
_ROOT = _STUDY.parents[1]
# And how many tables they quote.
_PAGES = {
  'README.md': 1, 'docs/which_optimizer.md': 7, 'docs/hyperparameters.md': 4
}  # fmt: skip


@pytest.fixture(scope='module')
def nano() -> Store:
  """The committed trials."""
  return Store(_STUDY / 'results/nano.jsonl')


def _read(store: Store) -> report.Found:
  return report.read_points(store.path.with_suffix(''), store)


@pytest.mark.parametrize(
  ('scale', 'page'),
  [('nano', 'RESULTS.md'), ('mini', 'results/mini/RESULTS.md')],
)
def test_the_committed_results_are_up_to_date(scale, page):
  store = Store(_STUDY / f'results/{scale}.jsonl')
  found = _read(store)
  assert (_STUDY / page).read_text() == report.text(scale, found, store)
  # The points are those that the plans lead to.
  for name, points in found.items():
    plan = EXPERIMENTS[name].plan(scales.SCALES[scale])
    assert [x.line for x in execute(plan, store.results)] == [
      x.line for x in points
    ]


def test_the_archived_results_are_made_of_stored_trials(nano):
  text = report.archive_text(nano.records)
  assert (_STUDY / 'archive/RESULTS.md').read_text() == text
  for name in cells.NAMES:
    assert (_STUDY / f'archive/figures/{name}.png').is_file()


def _tables(store: Store) -> dict[str, list[dict[str, str]]]:
  """Returns all tables by the name of the experiment and their own."""
  mini = Store(store.path.with_name('mini.jsonl'))
  found = {
    **report.all_tables(_read(store)),
    **{x: cells.read(x, store.records)[2] for x in cells.NAMES},
    **{f'mini {x}': y for x, y in report.all_tables(_read(mini)).items()},
  }
  return {
    f'{experiment}: {name}': rows
    for experiment, tables in found.items()
    for name, rows in tables.items()
  }


def _read_markdown(text: str) -> list[dict[str, str]]:
  """Returns the rows of a table, by the names of the columns."""
  names, _, *rows = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in text.splitlines()
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
      table = itertools.takewhile(
        lambda x: x.startswith('|'), lines[i + 1 + (not lines[i + 1]) :]
      )
      yield name, _read_markdown('\n'.join(table))


@pytest.mark.parametrize(('page', 'count'), _PAGES.items())
def test_pages_say_what_the_tables_say(nano, page, count):
  stored, quoted = _tables(nano), list(_quoted(page))
  assert len(quoted) == count
  for name, rows in quoted:
    assert name in stored, name
    for row in rows:
      _assert_quoted(row, stored[name])


def _assert_quoted(row: dict[str, str], table: list[dict[str, str]]) -> None:
  """Asserts that a row has the cells that a row of a table has."""
  first, *others = row
  names = first.split(' and ')
  key = _plain(row[first])
  (found,) = [
    x for x in table if key == ', '.join(filter(None, (x[y] for y in names)))
  ]
  for name in others:
    assert row[name] == found[name], (key, name)


def _plain(cell: str) -> str:
  """Returns the text of a cell that may be a link."""
  return cell[1:].partition('](')[0] if cell.startswith('[') else cell


def test_points_of_what_is_not_complete_are_removed(nano, tmp_path):
  found = _read(nano)
  report.write_points(tmp_path, found)
  assert report.read_points(tmp_path, nano) == found
  report.write_points(tmp_path, {'llama': found['llama']})
  assert [x.name for x in tmp_path.iterdir()] == ['llama.jsonl']
  # And figures.
  figure = tmp_path / 'figures/rate-tolerance.png'
  figure.parent.mkdir()
  figure.touch()
  report.write(tmp_path, 'nano', {'llama': found['llama']}, nano)
  assert not figure.exists()


def test_a_loss_that_is_not_reached_has_no_steps():
  assert steps_to({100: 3.0, 200: 2.5}, 1.0) == math.inf
  assert steps_to({100: 3.0, 200: 2.5}, 4.0) == 0
  assert steps_to({100: math.inf, 400: 2.0}, 2.5) == 200


def _point(factor, *losses, logits=(1.0,)):
  seen = {'max_attention_logit': [[x] for x in logits]}
  results = [Result('', 0.1, i, 9, x, seen) for i, x in enumerate(losses)]
  return Point({'optimizer': 'x', 'factor': factor}, None, tuple(results))


@pytest.mark.parametrize(
  'table',
  [
    lambda points: tables.compare(points, [('x', 'y')], 'factor'),
    lambda points: tables.pivot(points, ['optimizer'], 'factor'),
    lambda points: tables.pivot(points, ['factor']),
  ],
)
def test_two_points_of_one_cell_are_an_error(table):
  table([_point(1, 2.0), _point(2, 3.0)])
  with pytest.raises(ValueError, match='Two points of'):
    table([_point(1, 2.0), _point(1, 3.0)])


def test_costs_are_those_over_the_rate_chosen():
  points = [_point(1, 2.0, 3.0), _point(2, 2.2, 3.4), _point(4, 3.0, math.inf)]
  found = costs(points)
  assert found['x', 1] == 0
  assert found['x', 2] == pytest.approx(0.3)
  assert found['x', 4] == math.inf


def test_the_largest_logit_of_a_run_that_diverged_is_not_finite():
  assert peak(_point(1, 2.0, 3.0, logits=(5.0, 7.0, 6.0))) == 7
  assert peak(_point(1, 2.0, logits=(5.0, None))) == math.inf
  assert peak(_point(1, 2.0, math.inf)) == math.inf
