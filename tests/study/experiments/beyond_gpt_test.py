import math

import pytest

from examples.study.contenders import CONTENDERS
from examples.study.differences import leaders
from examples.study.experiments import beyond_gpt
from examples.study.points import Point
from examples.study.tuning import Tuned

_NAMES = [x.name for x in CONTENDERS]


def _points(**best):
  """Returns points of all contenders, of which some have other losses."""
  losses = {name: (2.0, 2.02, 1.98) for name in _NAMES} | best
  return [
    Point(name, 128, Tuned({0.1: {0: 2.0}}, 0.1), x)
    for name, x in losses.items()
  ]


_GOOD, _AS_GOOD, _DIVERGED = (
  (1.0, 1.02, 0.98), (1.01, 1.03, 0.97), (math.inf, 1.0, 1.0),
)  # fmt: skip


@pytest.mark.parametrize(
  ('points', 'names'),
  [
    (_points(MERIT=_GOOD), ['MERIT']),
    (_points(AdamW=_AS_GOOD, MERIT=_GOOD), ['MERIT', 'AdamW']),
    (_points(AdamW=_DIVERGED, MERIT=_GOOD), ['MERIT']),
    (_points(**dict.fromkeys(_NAMES, _DIVERGED)), []),
    # Of one seed, nobody knows who may be as good.
    (_points(**dict.fromkeys(_NAMES, (1.0,)) | {'LAMB': (0.9,)}), ['LAMB']),
  ],
)
def test_leaders_are_the_best_and_those_that_may_be(points, names):
  assert [x.name for x in leaders(points)] == names


@pytest.mark.parametrize(
  ('criteria', 'words'),
  [
    ([_points(MERIT=_GOOD)] * 2, 'take MERIT:'),
    (
      [_points(MERIT=_GOOD), _points(AdamW=_AS_GOOD, MERIT=_GOOD)],
      'take MERIT:',
    ),
    ([_points(AdamW=_AS_GOOD, MERIT=_GOOD)] * 2, 'take AdamW or MERIT:'),
    (
      [_points(AdamW=_AS_GOOD, MERIT=_GOOD)] * 2 + [_points(MERIT=_GOOD)],
      '(of these 3 comparisons, also AdamW in 2)',
    ),
    (
      [_points(MERIT=_GOOD), _points(AdamW=_GOOD)],
      'choose by the model (0: MERIT; 1: AdamW)',
    ),
    (
      [_points(**dict.fromkeys(_NAMES, _DIVERGED)), _points(AdamW=_GOOD)],
      '(0: a seed of each diverged; 1: AdamW)',
    ),
  ],
)
def test_one_is_advised_that_leads_everywhere(criteria, words):
  named = {str(i): points for i, points in enumerate(criteria)}
  assert words in beyond_gpt._advice(named)
