"""What is said of a lead with attention and without."""

import pytest

from examples.study.differences import Difference
from examples.study.experiments.mechanism import verdict


@pytest.mark.parametrize(
  'full, without, change, words',
  [
    ((-0.04, -0.05, -0.03), (-0.04, -0.05, -0.03), (0, -0.02, 0.02),
     'does not need attention logits'),
    ((-0.04, -0.05, -0.03), (-0.01, -0.015, -0.005), (-0.03, -0.04, -0.02),
     '25% of MERIT'),
    ((-0.04, -0.05, -0.03), (0, -0.01, 0.01), (-0.04, -0.06, -0.02),
     "So MERIT's lead over LAMB needs attention logits."),
    ((-0.04, -0.05, -0.03), (-0.02, -0.05, 0.01), (-0.02, -0.05, 0.01),
     'stays open'),
    ((-0.01, -0.05, 0.03), (-0.02, -0.05, -0.01), (0.01, -0.05, 0.07),
     'no lead over LAMB'),
  ],
)  # fmt: skip
def test_a_lead_is_explained_by_its_intervals(full, without, change, words):
  differences = [Difference(*x, 0.01) for x in (full, without, change)]
  assert words in verdict('LAMB', *differences)
