import math

import numpy as np
import pytest
from scipy import stats

from examples.study.analysis.intervals import difference, paired_difference
from examples.study.points import Point
from examples.study.trial import Result


def _point(*losses: float) -> Point:
  results = [Result('', 0.1, seed, 100, x) for seed, x in enumerate(losses)]
  return Point({}, None, tuple(results))


@pytest.mark.parametrize('is_paired', [False, True])
def test_the_interval_is_that_of_scipy(is_paired: bool):
  first, second = (1.50, 1.52, 1.47, 1.51), (1.60, 1.66, 1.58)
  if is_paired:
    found = paired_difference(_point(*first), _point(*second))
    # The last seed has no partner.
    first = first[:3]
    expected = stats.ttest_rel(first, second)
  else:
    found = difference(_point(*first), _point(*second))
    expected = stats.ttest_ind(first, second, equal_var=False)
  interval = expected.confidence_interval(0.95)
  assert found.mean == pytest.approx(np.mean(first) - np.mean(second))
  assert found[1:3] == pytest.approx((interval.low, interval.high))


def test_an_interval_that_leaves_out_zero_shows_it():
  first, second = np.array([1.1, 1.2, 1.0]), np.array([1.5, 1.6, 1.4])
  for unit, text in (
    (1, '-0.400 [-0.627, -0.173]'), (1e-3, '-0.0004 [-0.0006, -0.0002]'),
  ):  # fmt: skip
    found = difference(_point(*(unit * first)), _point(*(unit * second)))
    assert str(found) == text


def test_a_detectable_difference_is_detected_four_times_in_five():
  generator = np.random.default_rng(0)
  count = 8

  def losses(mean: float) -> Point:
    return _point(*generator.normal(mean, 0.02, count))

  typical = np.median(
    [difference(losses(2), losses(2)).detectable for _ in range(400)]
  )
  seen = [
    difference(losses(2), losses(2 + typical)).high < 0 for _ in range(2000)
  ]
  assert np.mean(seen) == pytest.approx(0.8, abs=0.05)


def test_what_has_no_interval_is_told():
  other = _point(1.60, 1.605, 1.61)
  assert str(difference(_point(1.50), other)) == '-0.105, no interval'
  assert str(difference(_point(1.50, math.inf), other)) == 'runs diverged'
  # Equal losses have one of no width.
  found = difference(_point(1.0, 1.0), _point(2.0, 2.0))
  assert found == (-1.0, -1.0, -1.0, 0.0)
