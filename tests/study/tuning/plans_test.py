import dataclasses
import math

from examples.study.chains import Chain
from examples.study.scales import SCALES
from examples.study.trial import make_result
from examples.study.tuning.plans import (
  Independent,
  count_trials,
  execute,
  gather,
)

_SCALE = SCALES['nano']


def _run(rate, **changes):
  return _SCALE.run('adamw', 128, rate, **changes)


def _descend(rate, steps):
  """Plans runs of ever smaller rates; returns their losses."""
  losses = []
  for _ in range(steps):
    (result,) = yield [_run(rate)]
    losses.append(result.loss)
    rate /= 2
  return losses


def test_gathered_plans_go_on_while_others_wait():
  order = []

  def run_one(runs):
    """Trains the run with the smallest rate that is missing, as told."""
    assert isinstance(runs, Independent)
    rates = [run.config.learning_rate for run in runs]
    if missing := set(rates) - set(order):
      order.append(min(missing))
    return [
      make_result(run, rate) if rate in order else None
      for run, rate in zip(runs, rates, strict=True)
    ]

  inner = {'c': _descend(0.7, 3), 'd': _descend(0.6, 2)}
  plans = {'a': _descend(1.0, 2), 'b': _descend(0.8, 3)}
  answers = execute(gather(plans | {'inner': gather(inner)}), run_one)
  assert answers == {
    'a': [1.0, 0.5],
    'b': [0.8, 0.4, 0.2],
    'inner': {'c': [0.7, 0.35, 0.175], 'd': [0.6, 0.3]},
  }
  # A plan with small rates is at its end before others have begun.
  assert order == [0.6, 0.3, 0.7, 0.35, 0.175, 0.8, 0.4, 0.2, 1.0, 0.5]


def test_plans_that_ask_for_nothing_end():
  def nothing():
    return 3
    yield

  def run_all(runs):
    return [make_result(run, 2.0) for run in runs]

  assert execute(nothing(), run_all) == 3
  plans = {'a': nothing(), 'b': _descend(1.0, 1)}
  assert execute(gather(plans), run_all) == {'a': 3, 'b': [2.0]}


def test_runs_are_counted_once_and_without_those_that_are_known():
  def plan():
    yield [_run(1.0), _run(1.0), _run(0.5)]
    yield [_run(0.5), _run(0.25)]

  def known(run):
    is_known = run.config.learning_rate == 0.25
    return make_result(run, 1.0) if is_known else None

  assert count_trials(plan(), known) == 2
  assert count_trials(plan(), lambda run: make_result(run, 1.0)) == 0


def test_a_key_follows_what_decides_the_numbers():
  others = Chain(('muon', 'l2'), 'adam', 0.33)
  trials = [
    _run(1.0),
    _run(1.0, seed=1),
    _run(1.0, weight_decay=0.5),
    _run(1.0, with_diagnostics=True),
    _run(1.0, steps=610),
    _run(1.0, init_scale=2.0),
    _SCALE.run('merit', 128, 1.0),
    _SCALE.run('merit', 128, 1.0, clip_threshold=math.inf),
  ]
  chains = [
    Chain(('muon', 'l2')),
    others,
    dataclasses.replace(others, rates=(('head', 0.1),)),
  ]
  trials += [_SCALE.run('merit', 128, 1.0, chain=chain) for chain in chains]
  assert len({x.key for x in trials}) == len(trials)
  assert _run(1.0, unroll=1).key == _run(1.0).key
  # What has its default is left out, so that a new setting changes no key.
  assert 'qkv' not in trials[0].identity


def test_tokens_are_equal_and_schedules_end():
  for size in _SCALE.batch_sizes:
    config = _SCALE.run('lamb', size, 1.0).config
    tokens = config.steps * config.batch_size * config.context_length
    assert abs(tokens - _SCALE.tokens) <= size * config.context_length / 2
    assert config.eval_every == config.steps
  # Fewer steps decide nothing.
  assert config.steps >= 150
