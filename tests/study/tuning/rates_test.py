import math

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.study.points import Tuned
from examples.study.scales import SCALES
from examples.study.trial import Result, make_result
from examples.study.tuning.plans import execute
from examples.study.tuning.rates import select

_SCALE = SCALES['nano']
_SEEDS = _SCALE.tuning_seeds


def _tuned(losses, rate):
  """Returns a tuning of one seed, with losses by learning rate."""
  results = [Result('', x, 0, 100, y) for x, y in losses.items()]
  return Tuned(tuple(results), rate)


def test_an_edge_and_a_better_rate_that_is_unstable_are_told():
  losses = {1.0: 2.0, 2.0: 1.5, 4.0: 1.55, 8.0: 3.0}
  assert [x for x in losses if _tuned(losses, x).is_at_edge] == [1.0, 8.0]
  assert _tuned(losses, 1.0).unstable_rate is None
  losses[4.0] = 1.7
  assert _tuned(losses, 1.0).unstable_rate == 2.0
  # Larger ones were chosen by a seed that is not here.
  assert _tuned(losses, 4.0).unstable_rate is None


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


def test_an_unstable_rate_is_not_chosen():
  def loss(rate, seed):
    # The best rate is 0.1, but beyond it the second seed falls off.
    return 1.0 if rate > 0.11 and seed else abs(math.log2(rate / 0.1)) / 10

  selected, _ = _select(loss, 0.1)
  assert selected.learning_rate == pytest.approx(0.1 / math.sqrt(2), rel=0.01)
  assert selected.unstable_rate == pytest.approx(0.1, rel=0.01)


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
