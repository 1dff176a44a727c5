import math

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.study.plans import Result, execute
from examples.study.scales import SCALES
from examples.study.tuning import TUNING_SEEDS, Tuned, select, tune

_SCALE = SCALES['nano']


def _run(rate):
  return _SCALE.run('merit', 128, rate)


def _tune(loss, start, budget):
  """Returns what is found out about a loss of the learning rate."""
  asked = []

  def run_all(runs):
    rates = [run.config.learning_rate for run in runs]
    asked.extend(rates)
    return [Result(loss(rate), {}) for rate in rates]

  return execute(tune(_run, start, budget), run_all), asked


@hypothesis.given(
  best=st.floats(-4, 4), start=st.floats(1e-4, 1), budget=st.integers(3, 12)
)
def test_all_of_the_budget_is_spent_and_nothing_is_tried_twice(
  best, start, budget
):
  tuned, asked = _tune(
    lambda rate: abs(math.log2(rate / start) - best), start, budget
  )
  assert len(asked) == len(set(asked)) == budget
  assert sorted(asked) == list(tuned.losses)
  assert tuned.loss == min(tuned.losses.values())


@hypothesis.given(
  best=st.floats(-2, 2), start=st.floats(1e-4, 1), steepness=st.floats(0.1, 9)
)
def test_a_single_optimum_is_found_to_a_factor_of_root_two(
  best, start, steepness
):
  tuned, _ = _tune(
    lambda rate: 2 + steepness * (math.log2(rate / start) - best) ** 2, start, 7
  )
  # A quarter is half a step; the rest is for rates with three digits.
  assert abs(math.log2(tuned.learning_rate / start) - best) <= 0.27
  assert not tuned.is_at_edge


def test_rates_beyond_a_cliff_are_left():
  # Diverges above the start's half.
  tuned, asked = _tune(lambda rate: math.inf if rate > 0.06 else -rate, 0.1, 7)
  assert tuned.learning_rate == pytest.approx(0.05)
  assert min(asked) < 0.05


def test_if_all_diverge_smaller_rates_are_tried():
  tuned, asked = _tune(lambda rate: math.inf, 0.1, 6)
  assert min(asked) == pytest.approx(0.1 / 2**4, rel=0.01)
  assert tuned.is_at_edge


def test_the_edge_is_told():
  assert Tuned({1.0: 2.0, 2.0: 3.0}).is_at_edge
  assert not Tuned({1.0: 2.0, 2.0: 1.0, 4.0: 3.0}).is_at_edge


def _select(loss, start):
  """Returns what is chosen for a loss of learning rate and seed."""
  asked = []

  def run_all(runs):
    asked.extend((x.config.learning_rate, x.config.seed) for x in runs)
    return [Result(loss(*pair), {}) for pair in asked[len(asked) - len(runs) :]]

  def run(rate, seed):
    return _SCALE.run('merit', 128, rate, seed=seed)

  return execute(select(run, start), run_all), asked


@hypothesis.given(
  best=st.floats(-4, 4), start=st.floats(1e-4, 1), noise=st.floats(0, 0.02)
)
def test_a_rate_is_chosen_by_the_mean_of_two_seeds(best, start, noise):
  def loss(rate, seed):
    luck = noise if (round(rate * 1e9) + seed) % 3 == 0 else 0.0
    return (math.log2(rate / start) - best) ** 2 + luck

  selected, asked = _select(loss, start)
  assert len(asked) == len(set(asked))
  # With a cliff the rate may lie on the safe side by another root of two.
  assert -1.3 <= math.log2(selected.learning_rate / start) - best <= 0.5
  seeds = {seed for rate, seed in asked if rate == selected.learning_rate}
  assert seeds == set(TUNING_SEEDS)
  assert not selected.is_at_edge


def test_a_rate_before_a_cliff_is_not_chosen():
  def loss(rate, seed):
    # The best rate is 0.1, but beyond it the second seed falls off.
    return 1.0 if rate > 0.11 and seed else abs(math.log2(rate / 0.1)) / 10

  selected, _ = _select(loss, 0.1)
  assert selected.learning_rate == pytest.approx(0.1 / math.sqrt(2), rel=0.01)


@pytest.mark.parametrize('loss', [math.inf, 2.0])
def test_a_tuning_that_learns_nothing_ends(loss):
  selected, asked = _select(lambda rate, seed: loss, 0.1)
  assert len(asked) < 25
  assert selected.loss == loss
