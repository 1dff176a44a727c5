"""What is trained next, with threads in place of processes."""

import concurrent.futures
import time

import pytest

from examples.study.scales import SCALES
from examples.study.training import sweep
from examples.study.training.store import Store
from examples.study.training.sweep import Sweep, TrialsFailedError
from examples.study.tuning.plans import execute, gather

_SLOW, _BAD = 1.0, 0.03


@pytest.fixture
def trained(monkeypatch) -> list[float]:
  """The learning rates of runs, in the order in which they end."""
  rates = []

  def train(run, work):
    rate = run.config.learning_rate
    if rate == _BAD:
      raise ValueError('bad')
    deadline = time.monotonic() + 10
    while rate == _SLOW and len(rates) < 3 and time.monotonic() < deadline:
      time.sleep(0.01)
    rates.append(rate)
    return run.label | {
      'loss': rate, 'config': {}, 'diagnostics': {}, 'seconds': 1.0,
      'versions': {'python': '3'}, 'corpus_sha256': 'c',
    }  # fmt: skip

  def start_workers(jobs, work):
    return concurrent.futures.ThreadPoolExecutor(jobs)

  monkeypatch.setattr(sweep, '_train_with_log', train)
  monkeypatch.setattr(sweep, '_start_workers', start_workers)
  return rates


def _descend(rate, steps):
  losses = []
  for i in range(steps):
    (result,) = yield [SCALES['nano'].run('lamb', 8, rate / 2**i)]
    losses.append(result.loss)
  return losses


def _run(plans, folder):
  store = Store(folder / 'results.jsonl')
  with Sweep(store, folder / 'work', 2, 9) as run_all:
    return execute(gather(plans), run_all)


def test_what_follows_a_run_does_not_wait_for_other_runs(trained, tmp_path):
  # The slow run ends only after three others.
  inner = {'slow': _descend(_SLOW, 2), 'b': _descend(0.01, 1)}
  plans = {'a': _descend(0.02, 4), 'inner': gather(inner)}
  assert _run(plans, tmp_path) == {
    'a': [0.02, 0.01, 0.005, 0.0025],
    'inner': {'slow': [1.0, 0.5], 'b': [0.01]},
  }
  assert len(trained) == len(set(trained)) == 6
  assert trained.index(_SLOW) >= 3


def test_runs_behind_results_that_are_there_start_at_once(trained, tmp_path):
  _run({'b': _descend(0.02, 3)}, tmp_path)
  trained.clear()
  # The slow run ends only after the last three.
  _run({'slow': _descend(_SLOW, 1), 'b': _descend(0.02, 6)}, tmp_path)
  assert trained == [0.0025, 0.00125, 0.000625, _SLOW]


def test_a_run_that_fails_costs_only_what_follows_it(trained, tmp_path):
  plans = {
    'bad': _descend(_BAD, 2),
    'a': _descend(0.02, 3),
    # One of its runs is a's, and may be there before this asks for it.
    'b': _descend(0.01, 3),
  }
  with pytest.raises(TrialsFailedError, match=r"1 of 5 .*ValueError\('bad'\)"):
    _run(plans, tmp_path)
  assert sorted(trained) == [0.0025, 0.005, 0.01, 0.02]


def test_runs_that_belong_together_are_waited_for(trained, tmp_path):
  runs = [SCALES['nano'].run('lamb', 8, rate) for rate in (0.3, 0.2, 0.1)]
  with Sweep(Store(tmp_path / 'r.jsonl'), tmp_path, 2, 3) as run_all:
    assert [x.loss for x in run_all(runs)] == [0.3, 0.2, 0.1]


def test_a_killed_process_costs_no_result_that_is_there(
  trained, monkeypatch, tmp_path
):
  class Broken(concurrent.futures.ThreadPoolExecutor):
    count = 0

    def submit(self, *args, **options):
      self.count += 1
      if self.count > 3:
        raise concurrent.futures.BrokenExecutor('killed')
      return super().submit(*args, **options)

  monkeypatch.setattr(sweep, '_start_workers', lambda jobs, work: Broken(jobs))
  plans = {rate: _descend(rate, 2) for rate in (0.1, 0.2, 3)}
  with pytest.raises(TrialsFailedError, match='killed'):
    _run(plans, tmp_path)
  assert sorted(trained) == [0.1, 0.2, 3]
  assert len(Store(tmp_path / 'results.jsonl').records) == 3
