import dataclasses
import json
import os
import signal

import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.run import loop
from examples.gpt2.run.loop import StoppedError
from examples.study.chains import Chain
from examples.study.training.store import Store
from examples.study.training.sweep import Sweep, TrialsFailedError
from examples.study.training.train import train
from examples.study.trial import read_result


def test_a_run_leaves_its_loss_and_diagnostics(scale, tmp_path):
  run = scale.run(
    'merit', 8, 0.01, with_diagnostics=True, clip_threshold=float('inf')
  )
  record = train(run, tmp_path / 'work')
  assert 4 < record['loss'] < 7
  assert record['steps_done'] == 2
  assert record['diagnostics']['step'] == [1, 2]
  for name in ('max_attention_logit', 'attention_entropy', 'clipped'):
    assert [len(x) for x in record['diagnostics'][name]] == [1, 1]
  assert record['optimizer'] == 'merit'
  assert record['config']['clip_threshold'] == 'inf'
  assert record['versions']['jax']
  # The infinite threshold too.
  json.dumps(record, allow_nan=False)


@pytest.mark.slow
def test_chains_train(scale, tmp_path):
  chains = None, Chain(('adam', 'merit')), Chain(('muon', 'l2'), 'adam', 0.33)
  losses = {
    train(scale.run('merit', 8, 0.1, chain=x), tmp_path / 'w')['loss']
    for x in chains
  }
  assert len(losses) == 3


def test_a_run_that_diverges_is_a_result(scale, tmp_path):
  run = scale.run('adamw', 8, 1e38)
  store = Store(tmp_path / 'results.jsonl')
  with Sweep(store, tmp_path / 'work', 1, 1) as sweep:
    (result,) = sweep([run])
  record = store.records[run.key]
  assert result == read_result(record)
  assert result.loss == float('inf')
  assert record['loss'] is None


def test_finished_runs_are_not_repeated(scale, tmp_path, monkeypatch):
  store = Store(tmp_path / 'results.jsonl')
  runs = [scale.run('adamw', 8, rate) for rate in (0.01, 0.02, 0.01)]
  with Sweep(store, tmp_path / 'work', 1, 2) as sweep:
    first = sweep(runs)
  assert first[0] == first[2] != first[1]
  assert len(store.records) == 2
  assert not any((tmp_path / 'work').iterdir())
  monkeypatch.delattr('examples.study.training.sweep.train')
  with Sweep(store, tmp_path / 'work', 1, 0) as sweep:
    assert sweep(runs) == first


@pytest.mark.parametrize('method', ['_evaluate', '_save'])
def test_a_signal_in_the_last_step_stops_the_sweep(
  scale, tmp_path, monkeypatch, method: str
):
  run, original = scale.run('adamw', 8, 0.01), getattr(loop._Steps, method)

  def interrupted(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(*args)

  with monkeypatch.context() as patch:
    patch.setattr(loop._Steps, method, interrupted)
    with pytest.raises(StoppedError, match='of step 2 has been saved'):
      train(run, tmp_path / 'work')
  assert train(run, tmp_path / 'work')['steps_done'] == 2


def test_an_unfinished_run_is_not_taken_up_on_another_text(
  scale, tmp_path, monkeypatch
):
  def stop(*_):
    raise KeyboardInterrupt

  run = scale.run('adamw', 8, 0.01)
  monkeypatch.setattr(loop, 'run', stop)
  with pytest.raises(KeyboardInterrupt):
    train(run, tmp_path / 'work')
  (tmp_path / 'text.txt').write_text('Another text.\n' * 800)
  with pytest.raises(UsageError, match='corpus_sha256'):
    train(run, tmp_path / 'work')


@pytest.mark.slow
def test_processes_give_the_losses_of_one_also_beside_a_run_that_fails(
  scale, tmp_path
):
  runs = [scale.run('lamb', 8, rate) for rate in (0.01, 0.02, 0.04)]
  with Sweep(Store(tmp_path / 'one'), tmp_path / 'work', 1, 3) as sweep:
    expected = [result.loss for result in sweep(runs)]
  bad = dataclasses.replace(
    runs[0], config=dataclasses.replace(runs[0].config, seed=5, data='none')
  )
  store = Store(tmp_path / 'two')
  with (
    Sweep(store, tmp_path / 'work', 2, 4) as sweep,
    pytest.raises(TrialsFailedError, match='1 of 4 trials failed.*log.txt'),
  ):
    sweep([bad, *runs])
  losses = [result.loss for result in store.results(runs)]
  assert losses == pytest.approx(expected, rel=1e-4)
