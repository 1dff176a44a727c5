import dataclasses
import json
import os
from pathlib import Path
import pickle
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.config import UsageError
from examples.gpt2.devices.sharding import make_mesh
from examples.gpt2.model.attention import causal_attention
from examples.gpt2.run.log import NotFiniteError
from examples.gpt2.run.loop import Loop, StoppedError
from examples.study.plans import Result
from examples.study.runner import Runner, RunsFailedError
from examples.study.runs import TRAINERS, train
from examples.study.scales import SCALES
from examples.study.store import Store


@pytest.fixture
def scale(tmp_path: Path):
  """A scale of two-step runs on a text of its own."""
  text = tmp_path / 'text.txt'
  text.write_text('The quick brown fox jumps over the lazy dog.\n' * 400)
  nano = SCALES['nano']
  settings = nano.settings | dict(
    data=str(text), cache_dir=tmp_path / 'cache', num_layers=1, width=16,
    num_heads=2, context_length=16, eval_sequences=8, unroll=1,
    micro_batch_size=None,
  )  # fmt: skip
  return dataclasses.replace(nano, settings=settings, steps=2)


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


def test_a_run_leaves_what_it_measures_of_its_weights(scale, tmp_path):
  changes = dict(untied_head=True, weight_decay=0.0)
  run = scale.run('merit', 8, 0.01, measure='rows', **changes)
  store = Store(tmp_path / 'results.jsonl')
  with Runner(store, tmp_path / 'work', 1, 1) as runner:
    (result,) = runner([run])
  assert Store(store.path).results([run]) == [result]
  embedding = result.measured['embedding']
  # Without decay, what has never had a gradient has not moved.
  assert embedding['never']['growth'] == [1, 1, 1]
  assert embedding['common']['moved'] > 0
  assert scale.run('merit', 8, 0.01, **changes).key != run.key


@pytest.mark.slow
def test_arms_train(scale, tmp_path):
  losses = {
    arm: train(scale.run('merit', 8, 0.1, arm=arm), tmp_path / 'w')['loss']
    for arm in ('', 'adam > merit > clip > decay', 'muon > l2; adam 0.33')
  }
  assert len(set(losses.values())) == 3


@pytest.mark.parametrize('optimizer', ['merit', 'adamw', 'lamb'])
def test_without_attention_tokens_take_the_mean_of_values(scale, optimizer):
  run = scale.run(optimizer, 8, 0.1, attention='mean')
  assert run.key != scale.run(optimizer, 8, 0.1).key
  config = dataclasses.replace(run.config, micro_batch_size=8)
  mesh = make_mesh('', jax.devices()[:1])
  trainer = TRAINERS['mean'](config, 257, mesh)
  tokens = np.random.default_rng(0).integers(257, size=(1, 8, 17))
  state = trainer.init()
  for _ in range(3):
    state, _ = trainer.step(state, jnp.asarray(tokens, jnp.int32))

  def attend(query, key, value):
    y, _ = causal_attention(query, key, value)
    return y, (query, key, value, y)

  _, seen = trainer.model(state.params).features(tokens[0, :, :-1], attend)
  query, key, value, y = map(np.asarray, seen)
  assert not query.any()
  assert not key.any()
  counts = np.arange(1, 17)[:, None, None]
  np.testing.assert_allclose(
    y, value.cumsum(axis=2) / counts, rtol=1e-4, atol=1e-6
  )
  assert np.abs(y).max() > 0


def _two_phases(scale, rate=0.01, **changes):
  first = scale.run('adamw', 8, 0.01, seed=9)
  return scale.run('merit', 16, rate, first=first, **changes)


def test_a_second_phase_goes_on_from_half_of_the_first(scale, tmp_path):
  scale = dataclasses.replace(scale, steps=4)
  runs = [_two_phases(scale), _two_phases(scale, 0.02)]
  losses = [train(run, tmp_path / 'work')['loss'] for run in runs]
  # Both from the same state, which is kept.
  (log,) = (tmp_path / 'work' / 'halves').glob('*/metrics.jsonl')
  assert len(log.read_text().splitlines()) == 2
  assert losses[0] != losses[1]


@pytest.mark.slow
@pytest.mark.parametrize('stopped', ['adamw', 'merit'])
def test_a_phase_that_was_killed_goes_on_to_the_same_loss(
  scale, tmp_path, monkeypatch, stopped: str
):
  scale = dataclasses.replace(scale, steps=4)
  run, original = _two_phases(scale), Loop._finish

  def interrupted(loop, step):
    if loop._config.optimizer == stopped and step == 1:
      os.kill(os.getpid(), signal.SIGTERM)
    return original(loop, step)

  with monkeypatch.context() as patch:
    patch.setattr(Loop, '_finish', interrupted)
    with pytest.raises(StoppedError, match='of step 1 has been saved'):
      train(run, tmp_path / 'killed')
  loss = train(run, tmp_path / 'killed')['loss']
  assert loss == train(run, tmp_path / 'whole')['loss']


@pytest.mark.slow
def test_a_phase_after_one_that_diverged_is_a_result(scale, tmp_path):
  scale = dataclasses.replace(scale, steps=8)
  first = scale.run('adamw', 8, 1e38)
  run = scale.run('merit', 16, 0.01, first=first)
  assert train(run, tmp_path / 'work')['loss'] is None


def test_masked_tokens_are_learned(scale, tmp_path):
  run = scale.run('adamw', 8, 0.01, task='masked')
  assert 4 < train(run, tmp_path / 'work')['loss'] < 7


def test_images_leave_a_record_as_text_does(scale, tmp_path):
  run = scale.run('adamw', 8, 0.01, task='mixer')
  store = Store(tmp_path / 'results.jsonl')
  with Runner(store, tmp_path / 'work', 1, 1) as runner:
    (result,) = runner([run])
  assert result == Store(store.path).result(run)
  assert result.diagnostics['train_loss'] == [result.loss]
  # No text to be the same as that of others.
  store.check_text('abc')


def test_a_run_that_diverges_is_a_result(scale, tmp_path):
  run = scale.run('adamw', 8, 1e38)
  store = Store(tmp_path / 'results.jsonl')
  with Runner(store, tmp_path / 'work', 1, 1) as runner:
    (result,) = runner([run])
  record = store.records[run.key]
  assert result == Result(float('inf'), record['diagnostics'])
  assert record['loss'] is None


def test_finished_runs_are_not_repeated(scale, tmp_path, monkeypatch):
  store = Store(tmp_path / 'results.jsonl')
  runs = [scale.run('adamw', 8, rate) for rate in (0.01, 0.02, 0.01)]
  with Runner(store, tmp_path / 'work', 1, 2) as runner:
    first = runner(runs)
  assert first[0] == first[2] != first[1]
  assert len(store.records) == 2
  assert not any((tmp_path / 'work').iterdir())
  monkeypatch.delattr('examples.study.runner.train')
  with Runner(store, tmp_path / 'work', 1, 0) as runner:
    assert runner(runs) == first


@pytest.mark.parametrize(
  'error', [StoppedError('x', 15), NotFiniteError('x', 7)]
)
def test_what_ends_a_run_travels_between_processes(error):
  copy = pickle.loads(pickle.dumps(error))
  assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize('method', ['_evaluate', '_save'])
def test_a_signal_in_the_last_step_stops_the_sweep(
  scale, tmp_path, monkeypatch, method: str
):
  run, original = scale.run('adamw', 8, 0.01), getattr(Loop, method)

  def interrupted(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(*args)

  with monkeypatch.context() as patch:
    patch.setattr(Loop, method, interrupted)
    with pytest.raises(StoppedError, match='of step 2 has been saved'):
      train(run, tmp_path / 'work')
  assert train(run, tmp_path / 'work')['steps_done'] == 2


def test_an_unfinished_run_is_not_taken_up_on_another_text(
  scale, tmp_path, monkeypatch
):
  def stop(*_):
    raise KeyboardInterrupt

  run = scale.run('adamw', 8, 0.01)
  monkeypatch.setattr(Loop, 'run', stop)
  with pytest.raises(KeyboardInterrupt):
    train(run, tmp_path / 'work')
  (tmp_path / 'text.txt').write_text('Another text.\n' * 800)
  with pytest.raises(UsageError, match='corpus_sha256'):
    train(run, tmp_path / 'work')


@pytest.mark.slow
def test_a_run_that_fails_does_not_cost_the_others(scale, tmp_path):
  bad = scale.run('lamb', 8, 0.01)
  bad = dataclasses.replace(
    bad, config=dataclasses.replace(bad.config, data=str(tmp_path / 'none'))
  )
  good = scale.run('lamb', 8, 0.02)
  store = Store(tmp_path / 'results.jsonl')
  with (
    Runner(store, tmp_path / 'work', 2, 2) as runner,
    pytest.raises(RunsFailedError, match='1 of 2 runs failed.*log.txt'),
  ):
    runner([bad, good])
  assert store.result(good) is not None


@pytest.mark.slow
def test_processes_give_the_same_losses_as_one(scale, tmp_path):
  runs = [scale.run('lamb', 8, rate) for rate in (0.01, 0.02, 0.04)]
  losses = []
  for jobs in (1, 2):
    store = Store(tmp_path / f'results{jobs}.jsonl')
    with Runner(store, tmp_path / 'work', jobs, 3) as runner:
      losses.append([result.loss for result in runner(runs)])
  assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_second_phases_wait_for_the_one_that_trains_the_first(scale, tmp_path):
  scale = dataclasses.replace(scale, steps=4)
  runs = [_two_phases(scale, rate) for rate in (0.01, 0.02)]
  store = Store(tmp_path / 'results.jsonl')
  with Runner(store, tmp_path / 'work', 2, 2) as runner:
    results = runner(runs)
  assert len({x.loss for x in results}) == 2
  assert len(list((tmp_path / 'work' / 'halves').glob('*/metrics.jsonl'))) == 1
