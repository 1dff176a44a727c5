import collections
import math

import pytest

from examples.study.contenders import ADAMW
from examples.study.experiments import batch_ramp
from examples.study.plans import Result, execute
from examples.study.points import Point
from examples.study.scales import SCALES
from examples.study.tuning import Tuned

_SCALE = SCALES['nano']


def _point(name, mean, batch_size=256, count=3):
  losses = [mean, mean + 0.01, mean - 0.01][:count]
  return Point(name, batch_size, Tuned({0.1: {0: mean}}, 0.1), tuple(losses))


def _advice(muon, *, stay=1.5, fresh=2.0, others=2.0, count=3):
  """Returns the advice where Muon has some loss, and all others another."""
  names = [x.name for x in batch_ramp.CONTENDERS]
  losses = dict.fromkeys(names, others) | {'Muon': muon}
  outcome = batch_ramp.Outcome(
    {(x, 16): _point(x, stay, 16, count) for x in names},
    _point(ADAMW.name, stay, 16, count),
    {x: _point(x, loss, count=count) for x, loss in losses.items()},
    {x: _point(x, fresh, count=count) for x in names},
  )
  return batch_ramp._advice(outcome, _SCALE)


@pytest.mark.parametrize(
  ('losses', 'words'),
  [
    (dict(muon=1.6), ('Muon, its moments taken over', 'loses 0.100 nats')),
    (dict(muon=1.4), ('Muon, its moments taken over', 'gains 0.100 nats')),
    # What fresh moments reach, and not what they save.
    (dict(muon=1.5, fresh=1.4), ('its moments zero at first', 'gains 0.100')),
    (dict(muon=1.5, fresh=1.5), ('made no difference that was seen',)),
    (dict(muon=1.6, fresh=math.inf), ('runs diverged', 'loses')),
    (dict(muon=math.inf, others=math.inf), ('runs diverged', 'zero at first')),
    (dict(muon=1.6, stay=math.inf), ('at the small batch: runs diverged',)),
    (dict(muon=1.6, count=1), ('go on with Muon. Muon, its', 'no interval')),
    (dict(muon=1.6, others=1.6), ('AdamW or MERIT or Muon or',)),
    (dict(muon=1.6, others=math.inf), ('go on with Muon.',)),
    (
      dict(muon=math.inf, others=math.inf, fresh=math.inf),
      ('Do not change to batch 256',),
    ),
  ],
)
def test_the_advice_follows_the_losses(losses, words):
  text = _advice(**losses)
  assert all(x in text for x in words), text
  assert 'nan' not in text
  assert 'inf' not in text


def test_two_phases_see_the_tokens_of_a_run_and_no_window_twice():
  asked = []

  def run_all(runs):
    asked.extend(runs)
    return [
      Result(abs(math.log(x.config.learning_rate / 0.03)), {}) for x in runs
    ]

  execute(batch_ramp.plan(_SCALE), run_all)
  second = [run for run in asked if run.first is not None]
  for run in second:
    first, config = run.first.config, run.config
    tokens = 64 * (
      first.steps // 2 * first.batch_size + config.steps * config.batch_size
    )
    assert tokens == pytest.approx(_SCALE.tokens, rel=0.01)
    # Windows are drawn by seed and step.
    assert first.seed != config.seed
  # The first phase of a seed is the same run for all.
  assert len({x.first.key for x in second}) == len(
    {x.config.seed for x in second}
  )
  # Seeds that judge have one rate for each way, and each way has as many.
  judged = collections.Counter(
    (
      x.config.optimizer,
      x.arm,
      x.config.batch_size,
      x.fresh_moments,
      x.config.learning_rate,
    )
    for x in second
    if x.config.seed not in _SCALE.tuning_seeds
  )
  assert len(judged) == 1 + 2 * len(batch_ramp.CONTENDERS)
  assert set(judged.values()) == {5}


def test_fresh_moments_have_a_rate_of_their_own():
  def run_all(runs):
    best = {x.key: 0.06 if x.fresh_moments else 0.03 for x in runs}
    return [
      Result(0.1 * abs(math.log2(x.config.learning_rate / best[x.key])), {})
      for x in runs
    ]

  outcome = execute(batch_ramp.plan(_SCALE), run_all)
  for name, taken in outcome.taken.items():
    fresh = outcome.fresh[name]
    assert taken.tuned.learning_rate == pytest.approx(0.03, rel=0.25)
    assert fresh.tuned.learning_rate == pytest.approx(0.06, rel=0.25)
