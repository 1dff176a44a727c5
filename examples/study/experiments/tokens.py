"""How many times the tokens of Hyperball Muon needs, by length of training."""

from collections.abc import Callable
import dataclasses
import itertools
import math

import numpy as np
from scipy.interpolate import PchipInterpolator

from examples.study.analysis import tables as t
from examples.study.analysis.intervals import difference
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import B1, Plan, gather_lists, scale_rate
from examples.study.tuning.coordinates import improve_all
from examples.study.tuning.rest import KEPT, RMS, decay_of, tune_rest

TITLE = 'Muon’s tokens for a loss of Hyperball'
TEXT = """\
Muon and Hyperball at one batch, with half, once, twice and four times the
tokens. Each begins with what was best at once the tokens, and has its own
learning rate, b1 and decay of hidden matrices (Hyperball: none) for every
length; values have a learning rate of their own if they are at most 0.01 worse
at that of the best one. Losses are those of eight fresh seeds. Tokens are
Muon’s over those with which Hyperball reaches the same loss, by a monotone
cubic through its losses over the logarithm of its tokens (beyond the first and
the last, along its tangent), with the interval of the difference of losses."""
_SHARES = (0.5, 1.0, 2.0, 4.0)
"""Tokens over those of the scale."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans both with each number of tokens."""
  return gather_lists(
    {
      (x, share): _plan(scale, x, share)
      for x in (RMS, KEPT)
      for share in _SHARES
    }
  )


def _plan(scale: Scale, name: str, share: float) -> Plan[list[Point]]:
  """Plans to tune again for another number of tokens."""
  size = scale.middle_batch
  start = (yield from tune_rest(scale, size, name)).best
  case = start.case.with_settings(steps=scale.num_steps(size, share))
  # What suits other lengths promises less at the rate of the first value.
  coordinates = {
    name: dataclasses.replace(x, promising=0.01)
    for name, x in {'b1': B1, **decay_of(case)}.items()
  }
  rate = scale_rate(start.tuned.learning_rate, 1 / share)
  found = yield from improve_all(case, rate, coordinates)
  point, *_ = yield from found.evaluate()
  return [point.labelled(tokens=share)]


def tables(points: list[Point]) -> t.Tables:
  """Returns losses, their differences, and the tokens that Muon needs."""
  points = [x.labelled(tokens=f'{x["tokens"]:g} × the tokens') for x in points]
  return {
    'losses': t.pivot(points, ['optimizer'], 'tokens'),
    **t.compare(points, [(KEPT, RMS)], 'tokens'),
    'tokens': _tokens(points),
    'chosen': t.pivot(
      points,
      ['optimizer', 'tokens'],
      cells={'values': t.label('chosen'), 'learning rate': t.rate},
    ),
  }


def _tokens(points: list[Point]) -> t.Rows:
  """Returns Muon's tokens over those of Hyperball for the same loss."""
  muon, hyperball = (t.select(points, optimizer=x) for x in (RMS, KEPT))
  losses = [x.mean for x in hyperball]
  if not all(math.inf > x > y for x, y in itertools.pairwise(losses)):
    return [{'': 'not known: losses do not fall with the tokens'}]
  steps = _steps_by_loss(hyperball)
  row = {'': f'{RMS} over {KEPT}'}
  for first, second in zip(muon, hyperball, strict=True):
    found = difference(first, second)
    own = first.results[0].steps
    mean, low, high = (
      own / steps(second.mean + x) for x in (found.mean, found.low, found.high)
    )
    row[first['tokens']] = f'{mean:.2f} [{low:.2f}, {high:.2f}]'
  return [row]


def _steps_by_loss(points: list[Point]) -> Callable[[float], float]:
  """Returns the steps that end at a loss, given some that do."""
  steps = np.log([x.results[0].steps for x in points])
  losses = [x.mean for x in points]
  # Losses fall with the steps, and an interpolator wants them to rise.
  curve = PchipInterpolator(losses[::-1], steps[::-1])

  def steps_of(loss: float) -> float:
    end = min(max(loss, losses[-1]), losses[0])
    return math.exp(curve(end) + curve(end, 1) * (loss - end))

  return steps_of
