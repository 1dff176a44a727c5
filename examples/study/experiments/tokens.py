"""How many times the tokens of Hyperball Muon needs, by length of training."""

import dataclasses
import math

import numpy as np

from examples.study.analysis import tables as t
from examples.study.analysis.intervals import difference
from examples.study.points import Point
from examples.study.scales import Scale
from examples.study.tuning import B1, Plan, gather, scale_rate
from examples.study.tuning.coordinates import Improved, improve_all
from examples.study.tuning.rest import KEPT, RMS, decay_of, everything_tuned

TITLE = 'Muon’s tokens for a loss of Hyperball'
TEXT = """\
Muon and Hyperball at one batch, with half, once, twice and four times the
tokens. Each begins with what was best at once the tokens, and has its own
learning rate, b1 and decay of hidden matrices (Hyperball: none) for every
length. Losses are those of eight fresh seeds. Tokens are those that Muon needs
for the loss of Hyperball, over those of Hyperball: the difference of their
losses over the slope of Muon’s in the logarithm of its tokens, with the
interval of the difference."""
_SHARES = (0.5, 1.0, 2.0, 4.0)
"""Tokens over those of the scale."""


def plan(scale: Scale) -> Plan[list[Point]]:
  """Plans both with each number of tokens."""
  tuned = yield from everything_tuned(scale, scale.middle_batch)
  found = yield from gather(
    {
      (name, share): _tune(start, share)
      for name, start in tuned.items()
      for share in _SHARES
    }
  )
  return [x.points[0].labelled(tokens=share) for (_, share), x in found.items()]


def _tune(start: Improved, share: float) -> Plan[Improved]:
  """Plans to tune again for another number of tokens."""
  case = start.best
  steps = case.scale.num_steps(case.batch_size, share)
  case = case.with_settings(steps=steps)
  # All values get a learning rate of their own: what suits other lengths need
  # not promise at the rate of the first value.
  coordinates = {
    name: dataclasses.replace(x, promising=math.inf)
    for name, x in {'b1': B1, **decay_of(case)}.items()
  }
  rate = scale_rate(start.learning_rate, 1 / share)
  return improve_all(case, rate, coordinates)


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
  """Returns Muon's tokens for a loss of Hyperball, over those of Hyperball."""
  muon, hyperball = (t.select(points, optimizer=x) for x in (RMS, KEPT))
  tokens = np.log([x.results[0].steps for x in muon])
  slopes = -np.gradient([x.mean for x in muon], tokens)
  row = {'': f'{RMS} over {KEPT}'}
  for first, second, slope in zip(muon, hyperball, slopes, strict=True):
    found = difference(first, second)
    mean, low, high = (
      math.exp(x / slope) for x in (found.mean, found.low, found.high)
    )
    row[first['tokens']] = f'{mean:.2f} [{low:.2f}, {high:.2f}]'
  return [row]
