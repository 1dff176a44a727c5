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
  """Returns losses that fall by so much for ten times the weight decay."""
  return [
    Result(
      2
      - decayed * math.log10(max(run.config.weight_decay, DECAY / 10) / DECAY)
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
  ],
)
def test_decays_are_tried_until_the_best_is_not_at_an_edge(
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
    assert outcome.tuned[key].point.losses


def test_the_advice_follows_fresh_seeds():
  def advice(outcome):
    return weight_decay.section(outcome, _SCALE).split('\n\n')[-1]

  pays = _outcome(0.1)
  assert advice(pays).startswith(
    'Another weight decay than 0.01 pays for AdamW'
  )
  assert 'cost' not in advice(pays)
  assert advice(_outcome(0.0)) == (
    'No other weight decay was seen to be better than 0.01: keep it.'
  )
  key = MUON.name, 128
  worse = pays.usual[key].point
  point = dataclasses.replace(
    worse, losses=tuple(x + 0.1 + 0.001 * i for i, x in enumerate(worse.losses))
  )
  varied = pays.tuned[key]._replace(point=point)
  chosen = pays._replace(tuned=pays.usual | {key: varied})
  assert 'keep it. Chosen by one seed it can also cost: Muon at batch 128' in (
    advice(chosen)
  )


def test_the_section_has_a_row_for_each_optimizer_and_batch():
  outcome = _outcome(0.1)
  text = weight_decay.section(outcome, _SCALE)
  rows = [x for x in text.splitlines() if x.startswith('| 128 | ')]
  assert len(rows) == len(weight_decay.CONTENDERS)
  assert rows[0].count('(') == 5  # A learning rate for each weight decay.
  assert weight_decay.figure(outcome, _SCALE).axes
