import math

import hypothesis
from hypothesis import strategies as st
import pytest

from examples.study.plans import Result, execute
from examples.study.scales import SCALES
from examples.study.tuning import Tuned, tune

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
