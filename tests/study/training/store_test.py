import json
import math
from pathlib import Path
import tempfile

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.gpt2.config import UsageError
from examples.study.scales import SCALES
from examples.study.training.store import Store
from examples.study.trial import read_result

_RUNS = [
  SCALES['nano'].run(optimizer, size, rate, seed=seed)
  for optimizer in ('merit', 'adamw')
  for size in (128, 16)
  for rate in (0.1, 0.02)
  for seed in (1, 0)
]


def _record(run, **changes):
  return {
    **run.label,
    'loss': 2.0,
    'config': {},
    'corpus_sha256': 'abc',
    'diagnostics': {'step': [1]},
    'seconds': 1.0,
    'versions': {'python': '3.11.7'},
    **changes,
  }


@pytest.fixture
def path(tmp_path: Path) -> Path:
  """A file with the results of all runs."""
  path = tmp_path / 'results' / 'nano.jsonl'
  store = Store(path)
  with store.locked():
    for run in _RUNS:
      store.add(_record(run))
  return path


def test_a_result_is_in_the_file_at_once(tmp_path):
  path = tmp_path / 'results' / 'nano.jsonl'
  first, second, run = Store(path), Store(path), _RUNS[0]
  assert first.result(run) is None
  first.add(_record(run, loss=None))
  for store in (first, Store(path)):
    (found,) = store.results([run])
    assert found == read_result(_record(run, loss=None))
    assert math.isinf(found.loss)
  # Another study sees it once it has the file for itself.
  with second.locked():
    assert second.result(run) == found


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.permutations(_RUNS))
def test_a_new_run_adds_one_line_whatever_came_before(runs):
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / 'nano.jsonl'
    store = Store(path)
    with store.locked():
      for run in runs[1:]:
        store.add(_record(run))
    before = path.read_text().splitlines()
    with store.locked():
      store.add(_record(runs[0]))
    after = path.read_text().splitlines()
  assert [x for x in after if x in before] == before
  assert len(after) == len(before) + 1 == len(_RUNS)
  # What a reader looks for comes first.
  begins = [list(json.loads(line).items())[1:6] for line in after]
  names = ['optimizer', 'arm', 'batch_size', 'learning_rate', 'seed']
  assert all([name for name, _ in begin] == names for begin in begins)
  assert begins == sorted(begins)


@pytest.mark.parametrize('line', ['{', '[]', '{}', '', 'the first'])
def test_a_damaged_line_and_a_second_record_of_a_run_are_named(path, line):
  lines = path.read_text().splitlines()
  lines[1], problem = line, 'damaged'
  if line == 'the first':
    lines[1], problem = lines[0], 'a second record'
  path.write_text('\n'.join(lines) + '\n')
  with pytest.raises(UsageError, match=f'{path}, line 2: {problem}'):
    Store(path)


def test_results_of_another_text_are_refused(path):
  store = Store(path)
  store.check_text('abc')
  with pytest.raises(UsageError, match='another text.*trained with 3.11.7'):
    store.check_text('def')


def test_one_study_at_a_time_has_the_results(path):
  with (
    Store(path).locked(),
    pytest.raises(UsageError, match='in use by another study'),
    Store(path).locked(),
  ):
    pass
  with Store(path).locked(), Store(path.with_name('micro.jsonl')).locked():
    pass
