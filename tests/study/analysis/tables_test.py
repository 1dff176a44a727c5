"""Tables, intervals and lengths, of invented losses."""

import math

import numpy as np
import pytest
from scipy import stats

from examples.study.analysis import lengths, tables
from examples.study.analysis.data import Point, Trial


def _point(*losses: float, steps: int = 100, **labels) -> Point:
  fresh = [Trial(str(x), 0.1, steps, x, 10 * x, x / 10) for x in losses]
  return Point(labels, 0.1, (), tuple(fresh))


_FIRST, _SECOND = (1.50, 1.52, 1.47, 1.51), (1.60, 1.66, 1.58)


def test_intervals_are_those_of_welch():
  variances = [np.var(x, ddof=1) / len(x) for x in (_FIRST, _SECOND)]
  error = math.sqrt(sum(variances))
  freedom = error**4 / (variances[0] ** 2 / 3 + variances[1] ** 2 / 2)
  mean = np.mean(_FIRST) - np.mean(_SECOND)
  half = stats.t.ppf(0.975, freedom) * error
  found = tables.interval(_point(*_FIRST), _point(*_SECOND))
  assert found == pytest.approx((mean, mean - half, mean + half))


_SPEC = {'cell': 'loss', 'rows': ['optimizer'], 'columns': 'factor'}


def test_a_cell_has_the_mean_and_deviation_of_fresh_seeds():
  points = [_point(1.0, 2.0, optimizer='x', factor=1.0)]
  tried = _point(9.0, optimizer='x', factor=1.0, tried=True)
  (row,) = tables.make_table(_SPEC, [*points, tried])
  assert row == {'optimizer': 'x', 'factor 1': '1.500 ± 0.707'}
  with pytest.raises(ValueError, match='Two points of'):
    tables.make_table(_SPEC, [*points, *points])


def test_steps_to_a_loss_are_interpolated():
  losses = {100: 3.0, 400: 2.0}
  assert lengths.steps_to(losses, 2.5) == pytest.approx(200)
  assert lengths.steps_to(losses, 1.0) == math.inf
  assert lengths.steps_to(losses, 4.0) == 0
  # A little beyond the runs, the loss falls by 0.35 for e times the steps.
  assert lengths.steps_to(losses, 1.965) == pytest.approx(400 * math.exp(0.1))


def test_tokens_are_those_that_muon_needs():
  points = []
  for name, factor in (('Muon', 1.1), ('Hyperball', 1.0)):
    for share in (0.5, 1, 2, 4):
      steps = int(1000 * share)
      loss = 1 + 9 * (steps / factor) ** -0.45
      labels = {'optimizer': f'{name}, rest tuned', 'tokens': f'{share}'}
      points.append(_point(loss, loss + 1e-4, steps=steps, **labels))
  (row,) = tables.make_table({'cell': 'tokens'}, points)
  factors = [float(x.split()[0]) for name, x in row.items() if name]
  assert factors == pytest.approx([1.1] * 4, abs=0.011)
