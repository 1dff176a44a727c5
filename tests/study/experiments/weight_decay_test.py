"""The weight decay that each optimizer gets."""

import dataclasses
import functools
import math

import pytest

from examples.study.contenders import ADAMW, KEPT, LAMB, MUON, SIMPLER
from examples.study.experiments import weight_decay
from examples.study.plans import Result, execute
from examples.study.scales import DECAY, SCALES

_SCALE = SCALES['nano']
_IN_PROPORTION = _SCALE.run('adamw', 128, 0.01).config.init_std


def _train(decayed, runs):
  """Returns losses that fall by so much for ten times the weight decay.

  None for losses that are lowest at 0.1.
  """

  def gain(decay):
    tenfold = math.log10(max(decay, DECAY / 10) / DECAY)
    return decayed * tenfold if decayed is not None else -abs(tenfold - 1)

  return [
    Result(
      2
      - gain(run.config.weight_decay)
      - 0.05 * math.log2(run.config.init_std / _IN_PROPORTION)
      - 0.2 * (run.config.b1 == 0.8)
      + 0.1 * math.log2(run.config.learning_rate / 0.02) ** 2
      + 0.002 * (run.config.seed % 3),
      {},
    )
    for run in runs
  ]


@functools.cache
def _outcome(decayed):
  """Returns what the plan finds out."""
  train = functools.partial(_train, decayed)
  return execute(weight_decay.plan(_SCALE), train)


@pytest.mark.parametrize('size', [_SCALE.batch_sizes[0], _SCALE.batch_size])
@pytest.mark.parametrize(
  ('decayed', 'expected', 'tried'),
  [
    (0.1, 1.0, {'λ 0', 'λ 0.01', 'λ 0.1', 'λ 0.3', 'λ 1'}),
    (-0.1, 0.0, {'λ 0', 'λ 0.01', 'λ 0.1'}),
    (None, 0.1, {'λ 0', 'λ 0.01', 'λ 0.1', 'λ 0.3'}),
  ],
)
def test_decays_are_tried_while_the_last_one_is_the_best(
  size, decayed, expected, tried
):
  varied = _outcome(decayed).tuned[MUON.name, size]
  assert varied.best.settings['weight_decay'] == expected
  assert set(varied.tunings) == tried
  # With all else that was found to be the best.
  assert varied.best.settings['b1'] == 0.8
  assert varied.best.settings['init_scale'] == 4


@pytest.mark.parametrize('size', [_SCALE.batch_sizes[0], _SCALE.batch_size])
def test_fresh_seeds_judge_a_decay_and_the_usual_one_keeps_its_point(size):
  outcome = _outcome(0.1)
  change = weight_decay.changes(outcome)[LAMB.name, size]
  assert change.mean == pytest.approx(-0.2)
  losses = outcome.tuned[LAMB.name, size].point.losses
  assert len(losses) == _SCALE.seeds_at(size)
  outcome = _outcome(0.0)
  assert (ADAMW.name, size) not in weight_decay.changes(outcome)
  assert outcome.tuned[ADAMW.name, size].point == (
    outcome.usual[ADAMW.name, size].point
  )


def test_where_norms_are_kept_nothing_decays():
  outcome = _outcome(0.1)
  for contender in (KEPT, SIMPLER):
    key = contender.name, 128
    assert outcome.tuned[key] == outcome.usual[key]
    assert 'decay' not in outcome.tuned[key].best.arm


def _advice(outcome):
  return weight_decay.section(outcome, _SCALE).split('\n\n')[-1]


def _changed(losses):
  """Returns an outcome in which Muon's decay changes losses by these."""
  outcome = _outcome(0.1)
  tuned = dict(outcome.usual)
  for size, changes in losses.items():
    key = MUON.name, size
    point = outcome.usual[key].point
    both = zip(point.losses, changes, strict=True)
    point = dataclasses.replace(point, losses=tuple(x + y for x, y in both))
    tuned[key] = outcome.tuned[key]._replace(point=point)
  return outcome._replace(tuned=tuned)


def test_the_advice_follows_fresh_seeds():
  pays = _advice(_outcome(0.1))
  assert pays.startswith('Another weight decay than 0.01 pays for AdamW, batch')
  assert 'cost' not in pays
  assert _advice(_outcome(0.0)) == (
    'No other weight decay was seen to be better than 0.01.'
  )
  costs = _advice(_changed({128: [0.1, 0.11, 0.12, 0.13, 0.14]}))
  assert 'it can also cost: Muon, batch 128 (+0.120 [' in costs
  assert 'would have been' not in costs
  unknown = _advice(_changed({128: [math.inf] * 5, 16: [math.nan] * 3}))
  assert unknown.startswith('Whether another') and 'not known' in unknown


def test_the_advice_tells_what_would_have_been_seen():
  outcome = _changed({16: [-0.01, 0.0, 0.01], 32: [-0.02, 0.0, 0.02]})
  found = weight_decay.changes(outcome)
  low, high = (found[MUON.name, x].detectable for x in (16, 32))
  assert high == pytest.approx(2 * low)
  pooled = weight_decay.pooled(outcome)
  assert list(pooled) == ['Muon, λ 1, batches 16, 32']
  least = min(low, *(x.detectable for x in pooled.values()))
  assert f'changes of {least:.3f} to {high:.3f} would have been' in (
    _advice(outcome)
  )


def test_a_decay_chosen_at_several_batches_is_judged_by_all_their_seeds():
  outcome = _changed({16: [-0.04, 0.03, -0.05], 32: [-0.03, 0.02, -0.04]})
  found = weight_decay.changes(outcome)
  assert all(x.low < 0 < x.high for x in found.values())
  (pooled,) = weight_decay.pooled(outcome).values()
  assert pooled.mean == pytest.approx(-0.11 / 6)
  assert pooled.high - pooled.low < min(x.high - x.low for x in found.values())
  assert not weight_decay.pooled(_changed({16: [-0.04, 0.03, -0.05]}))


def test_the_section_has_a_row_for_each_optimizer_and_batch():
  outcome = _outcome(0.1)
  text = weight_decay.section(outcome, _SCALE)
  rows = [x for x in text.splitlines() if x.startswith('| 128 | ')]
  assert len(rows) == len(weight_decay.CONTENDERS)
  assert rows[0].count('(') == 5  # A learning rate for each weight decay.
  assert weight_decay.figure(outcome, _SCALE).axes
