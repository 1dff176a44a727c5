"""The size of the initial weights that each optimizer gets."""

import functools
import math

import pytest

from examples.study.contenders import ADAMW, CONTENDERS, KEPT, SIMPLER
from examples.study.experiments import sensitivity, tuned_initialization
from examples.study.plans import Result, execute
from examples.study.scales import SCALES

_SCALE = SCALES['nano']
_IN_PROPORTION = _SCALE.run('adamw', 128, 0.01).config.init_std


@functools.cache
def _outcome(doubled):
  """Returns what a plan finds out, if doubling the weights gains so much."""

  def run_all(runs):
    return [
      Result(
        2
        - doubled * math.log2(run.config.init_std / _IN_PROPORTION)
        - 0.2 * (run.config.b1 == 0.8)
        + 0.1 * math.log2(run.config.learning_rate / 0.02) ** 2
        + 0.002 * (run.config.seed % 3),
        {},
      )
      for run in runs
    ]

  return execute(tuned_initialization.plan(_SCALE), run_all)


@pytest.mark.parametrize('size', [_SCALE.batch_sizes[0], _SCALE.batch_size])
@pytest.mark.parametrize('contender', [ADAMW, KEPT])
def test_sizes_are_tried_until_the_best_is_not_at_an_edge(contender, size):
  varied = _outcome(0.1)[contender.name, size]
  assert varied.best.init_scale == 4
  # With all else that was found to be the best.
  assert varied.best.settings['b1'] == 0.8
  varied = _outcome(-0.1)[contender.name, size]
  assert varied.best.init_scale == 1
  assert ('4 ×' in varied.tunings) == (contender is KEPT)


@pytest.mark.parametrize(
  ('doubled', 'has_own_rate'), [(-0.015, True), (-0.03, False)]
)
def test_a_size_that_is_little_worse_gets_a_rate_of_its_own(
  doubled, has_own_rate
):
  size = _SCALE.batch_sizes[0]
  tuned = _outcome(doubled)[ADAMW.name, size].tunings['2 ×']
  assert (len(tuned.by_seed) > 1) == has_own_rate


@pytest.mark.parametrize('doubled', [0.1, -0.1])
def test_fresh_seeds_judge_the_size_that_was_chosen(doubled):
  outcome = _outcome(doubled)
  excess = outcome[ADAMW.name, 128].point.mean - 2 + 0.2
  assert excess == pytest.approx(-0.2 if doubled > 0 else 0, abs=0.02)
  for contender in CONTENDERS:
    assert len(outcome[contender.name, 128].point.losses) == 5
  assert (
    outcome[SIMPLER.name, 128].best.init_scale
    == outcome[KEPT.name, 128].best.init_scale
  )


def test_where_the_usual_size_is_the_best_nothing_changes():
  outcome = _outcome(-0.1)
  for contender in CONTENDERS[:-1]:
    assert outcome[contender.name, 16].best.settings.get('init_scale', 1) == 1
  text = tuned_initialization.section(outcome, _SCALE)
  assert text.count('\n| 128 | ') == len(CONTENDERS)
  assert sensitivity.differences(outcome, _SCALE)[0] in text
