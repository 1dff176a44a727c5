"""What experiments ask for, and what their tables say of invented losses."""

from collections.abc import Callable
import dataclasses
import math

import pytest

from examples.gpt2.optim.optimizers import make_schedule
from examples.study.analysis.tables import Tables
from examples.study.experiments import EXPERIMENTS
from examples.study.scales import SCALES, Scale
from examples.study.trial import Result, Trial, make_result
from examples.study.tuning.plans import execute
from examples.study.tuning.rest import RMS, tune_rest


def _run(
  name: str, loss: Callable[[Trial], float], scale: Scale = SCALES['nano']
) -> Tables:
  """Returns the tables of an experiment, if trials have these losses."""
  experiment = EXPERIMENTS[name]
  plan = experiment.plan(scale)
  return experiment.tables(
    execute(plan, lambda trials: [make_result(x, loss(x)) for x in trials])
  )


def _loss(trial: Trial) -> float:
  """Returns a loss that falls with the steps, best at a rate of 0.02."""
  config = trial.config
  off = math.log2(config.learning_rate / 0.02)
  return 3 - 0.2 * math.log(config.steps) + 0.1 * off**2 + config.seed / 1e4


@pytest.mark.parametrize('name', ['relatives', 'rows'])
def test_second_passes_find_what_is_best(name):
  def loss(trial: Trial) -> float:
    config, chain = trial.config, trial.chain
    embeddings = dict(chain.rates).get('embeddings', 0.33) if chain else 0.33
    return (
      _loss(trial)
      + abs(config.b1 - 0.6)
      + abs(config.warmup_share - 0.5)
      + abs(config.weight_decay - 0.1)
      + 0.1 * abs(math.log2(embeddings / 2.64))
    )

  tables = _run(name, loss)
  chosen = {x['optimizer']: x['values'] for x in tables['chosen']}
  again = {k: v for k, v in chosen.items() if 'b1' in v}
  assert len(again) >= 5
  for optimizer, values in again.items():
    assert {'warm-up 0.5', 'b1 0.6'} <= set(values.split(', ')), optimizer
    keeps_norms = optimizer.startswith('Hyperball')
    assert ('decay 0.1' in values) != keeps_norms, optimizer
    assert ('embeddings 2.64' in values) == ('embeddings' in values), optimizer


@pytest.mark.parametrize('factor', [0.25, 4.0])
def test_a_rate_of_adam_that_was_tuned_goes_on_in_the_chain(factor):
  found = set()

  def result(trial: Trial) -> Result:
    found.add(trial.chain and trial.chain.others_rate)
    assert trial.chain is None or trial.config.adam_rate is None
    off = abs(math.log2((trial.config.adam_rate or 1.0) / factor))
    return make_result(trial, _loss(trial) + off)

  plan = tune_rest(SCALES['nano'], 256, RMS)
  execute(plan, lambda trials: [result(x) for x in trials])
  (rate,) = found - {None}
  assert 0.7 < rate / factor < 1.4


def test_tokens_are_those_that_muon_needs():
  def loss(trial: Trial) -> float:
    keeps_norms = trial.chain and 'keep l2' in trial.chain.parts
    tokens = trial.config.steps / (1.0 if keeps_norms else 1.1)
    return 1 + 9 * tokens**-0.45 + trial.config.seed / 1e4

  (row,) = _run('tokens', loss)['tokens']
  factors = [float(x.split()[0]) for name, x in row.items() if name]
  assert factors == pytest.approx([1.1] * 4, abs=0.011)


def test_tokens_are_not_known_where_losses_do_not_fall_with_them():
  (row,) = _run('tokens', lambda _: 2.0)['tokens']
  assert row[''].startswith('not known')


@pytest.mark.parametrize('steps', [None, 500])
def test_schedules_fall_from_the_peak_after_the_warm_up_to_zero(steps):
  found = set()

  def loss(trial: Trial) -> float:
    config = trial.config
    warmup = round(config.warmup_share * config.steps)
    schedule = make_schedule(config)
    last = config.steps * 3 // 4
    assert schedule(config.steps) == pytest.approx(0, abs=1e-7)
    assert schedule(warmup) == pytest.approx(config.learning_rate)
    # Of WSD alone it falls in the last fifth only.
    is_falling = bool(schedule(last) < 0.9 * config.learning_rate)
    found.add((config.schedule, config.decay_steps is None, is_falling))
    return _loss(trial)

  _run('schedule', loss, dataclasses.replace(SCALES['nano'], steps=steps))
  assert found == {
    ('cosine', True, True),
    ('linear', True, True),
    ('wsd', True, False),
    ('wsd', False, True),
  }
