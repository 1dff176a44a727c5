import math

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.study.scales import SCALES
from examples.study.trial import make_result
from examples.study.tuning.plans import execute
from examples.study.tuning.rates import select

_SCALE = SCALES['nano']
_SEEDS = _SCALE.tuning_seeds


def _select(loss, start, stride=2):
  """Returns what is chosen for a loss of learning rate and seed."""
  asked = []

  def run_all(runs):
    asked.extend((x.config.learning_rate, x.config.seed) for x in runs)
    return [
      make_result(x, loss(x.config.learning_rate, x.config.seed)) for x in runs
    ]

  def run(rate, seed):
    return _SCALE.run('merit', 128, rate, seed=seed)

  return execute(select(run, start, _SEEDS, stride), run_all), asked


@hypothesis.example(best=-1, start=0.01, noise=0, stride=1)
@hypothesis.given(
  best=st.floats(-3, 3),
  start=st.floats(1e-4, 1),
  noise=st.floats(0, 0.02),
  stride=st.sampled_from([1, 2]),
)
def test_a_rate_is_chosen_by_the_mean_of_two_seeds(best, start, noise, stride):
  def loss(rate, seed):
    luck = noise if (round(rate * 1e9) + seed) % 3 == 0 else 0.0
    return (math.log2(rate / start) - best) ** 2 + luck

  selected, asked = _select(loss, start, stride)
  assert len(asked) == len(set(asked))
  # With unstable ones on both sides of it, all rates are too high.
  assert math.log2(selected.learning_rate / start) - best <= 0.5
  assert math.log2(selected.learning_rate / start) - best >= -1.3
  seeds = {seed for rate, seed in asked if rate == selected.learning_rate}
  assert seeds == set(_SEEDS)
  assert not selected.is_at_edge


@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize(
  'loss', [lambda rate: math.inf, lambda rate: 2.0, lambda rate: -rate]
)
def test_a_tuning_without_an_optimum_ends(loss, stride):
  selected, asked = _select(lambda rate, seed: loss(rate), 0.1, stride)
  assert len(asked) < 25
  assert selected.is_at_edge == (loss(1.0) != 2.0)


@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('beyond', [math.inf, 3.0])
def test_a_start_that_is_unstable_leads_back(beyond, stride):
  def loss(rate, seed):
    if rate > 0.03:
      return beyond + rate
    return 1.5 + 0.05 * math.log2(rate / 0.02) ** 2

  selected, _ = _select(loss, 0.06, stride)
  assert 0.01 < selected.learning_rate < 0.025
