"""The best warm-up and b1 of each optimizer, and who judges them."""

import functools
import math

import pytest

from examples.study.contenders import ADAMW, CONTENDERS, KEPT
from examples.study.experiments import sensitivity
from examples.study.plans import Result, execute
from examples.study.scales import SCALES

_SCALE = SCALES['nano']
_SIZES = _SCALE.batch_sizes[-2:]
_FIRST = _SCALE.tuning_seeds[0]


@functools.cache
def _outcome(warmup, momentum):
  """Returns what a plan finds out, and its runs, in the order of planning.

  Rates are best at 0.02, and losses of seeds deviate a little.

  Args:
    warmup: What a long warm-up gains.
    momentum: What a b1 of 0.8 gains.
  """
  batches = []

  def run_all(runs):
    batches.append(runs)
    return [
      Result(
        2
        - warmup * _is_long(run.config)
        - momentum * (run.config.b1 == 0.8)
        + 0.1 * math.log2(run.config.learning_rate / 0.02) ** 2
        + 0.002 * (run.config.seed % 3),
        {},
      )
      for run in runs
    ]

  return execute(sensitivity.plan(_SCALE), run_all), batches


def _is_long(config):
  return config.warmup_share > 0.2


@pytest.mark.parametrize(
  ('warmup', 'momentum', 'best'),
  [
    (0.0, 0.0, 'as it is'),
    (-0.1, 0.2, 'b1 0.8'),
    (0.1, 0.2, 'warm-up 30% and b1 0.8'),
  ],
)
def test_what_helps_is_combined_and_judged_by_fresh_seeds(
  warmup, momentum, best
):
  outcome, batches = _outcome(warmup, momentum)
  for contender in CONTENDERS:
    for size in _SIZES:
      row = sensitivity.section(outcome, _SCALE).splitlines()
      assert any(
        x.startswith(f'| {contender.name} |') and f'| {best} |' in x
        for x in row
      )
      point = outcome[contender.name, size].point
      assert len(point.losses) == 5
  judges = [run.config for run in batches[-1]]
  assert all(config.seed != _FIRST for config in judges)
  if best != 'as it is':
    assert {_is_long(x) for x in judges} == {'warm-up' in best}
    assert {x.b1 == 0.8 for x in judges} == {'b1' in best}


def test_the_rest_is_left_as_it_is_in_a_combination():
  tunings = _outcome(0.1, 0.2)[0][KEPT.name, _SIZES[0]].tunings
  both = sensitivity.combine(KEPT, tunings)
  (contender,) = both.values()
  assert contender.arm == KEPT.arm
  assert contender.settings['init_scale'] == 2.0
  assert sensitivity.combine(ADAMW, tunings)


def test_at_smaller_batches_what_does_not_promise_keeps_the_rate():
  outcome, _ = _outcome(-0.1, 0.2)
  for contender in CONTENDERS:
    tunings = outcome[contender.name, _SCALE.batch_sizes[0]].tunings
    assert len(tunings['warm-up 30%'].by_seed) == 1
    assert len(tunings['b1 0.8'].by_seed) > 1
    tunings = outcome[contender.name, _SIZES[0]].tunings
    assert len(tunings['warm-up 30%'].by_seed) > 1


def test_a_smaller_b1_is_tried_where_the_smallest_is_the_best():
  tunings = _outcome(0.1, 0.2)[0][ADAMW.name, _SIZES[0]].tunings
  assert 'b1 0.6' in tunings
  assert 'b1 0.4' not in tunings
  tunings = _outcome(-0.1, -0.2)[0][ADAMW.name, _SIZES[0]].tunings
  assert 'b1 0.6' not in tunings
