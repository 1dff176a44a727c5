"""What is chosen for each optimizer, and evaluated with fresh seeds."""

import functools
import math
from pathlib import Path
import re

import pytest

from examples.study.optimizers import ADAMW, COMPARED, HYPERBALL, WITH_RATIOS
from examples.study.scales import SCALES
from examples.study.trial import make_result
from examples.study.tuning.plans import execute
from examples.study.tuning.stages import (
  compare_all,
  initial_weights,
  warmup_and_b1,
)

_SCALE = SCALES['nano']
_SMALL, _LARGE = _SCALE.batch_sizes[0], _SCALE.batch_size
_IN_PROPORTION = _SCALE.run('adamw', 128, 0.01).config.init_std


@functools.cache
def _found(stage, warmup=0.1, momentum=0.2, doubled=0.0):
  """Returns points by optimizer, batch, role and variant, and the trials.

  Rates are best at 0.02, and losses of seeds deviate a little. The arguments
  are what a long warm-up, a b1 of 0.8 and twice the initial weights gain.
  """
  asked = []

  def run_all(trials):
    asked.extend(trials)
    return [make_result(x, loss(x.config)) for x in trials]

  def loss(config):
    gain = doubled * math.log2(config.init_std / _IN_PROPORTION)
    gain += warmup if config.warmup_share > 0.2 else 0.0
    gain += momentum if config.b1 == 0.8 else 0.0
    off = math.log2(config.learning_rate / 0.02)
    return 2 - gain + 0.1 * off**2 + 0.002 * (config.seed % 3)

  points = execute(compare_all(stage, _SCALE), run_all)
  names = 'optimizer', 'batch', 'role', 'variant'
  return {tuple(x[name] for name in names): x for x in points}, asked


def test_the_documented_experiment_compares_what_it_says():
  page = Path(__file__).parents[3] / 'examples/study/README.md'
  (code,) = re.findall(r'```python\n(.*?)```', page.read_text(), re.DOTALL)
  experiment = {}
  exec(code, experiment)

  def run_all(trials):
    configs = [x.config for x in trials]
    losses = [2 + 0.001 * (x.seed % 3) - x.b1 for x in configs]
    return [make_result(*x) for x in zip(trials, losses, strict=True)]

  tables = experiment['tables'](execute(experiment['plan'](_SCALE), run_all))
  assert [x['optimizer'] for x in tables['losses']] == ['Muon', 'Hyperball']
  for name, b1 in (('b1 0.8', 0.8), ('b1 0.9', 0.9), ('b1 0.95', 0.95)):
    assert tables['losses'][0][name].startswith(f'{2.001 - b1:.3f} ± ')
  assert tables['differences'][0]['difference'] == 'Hyperball − Muon'


def _best(found, optimizer, size):
  """Returns the variant that was chosen, and its point."""
  (chosen,) = [
    (key[3], point)
    for key, point in found.items()
    if key[:3] == (optimizer.name, size, 'best')
  ]
  return chosen


@pytest.mark.parametrize(
  ('warmup', 'momentum', 'best'),
  [
    (0.0, 0.0, 'as it is'),
    (-0.1, 0.2, 'b1 0.8'),
    (0.1, 0.2, 'warm-up 30% and b1 0.8'),
  ],
)
def test_what_helps_is_combined_and_judged_by_fresh_seeds(
  warmup, momentum, best
):
  found, trials = _found(warmup_and_b1, warmup, momentum)
  by_key = {x.key: x.config for x in trials}
  for optimizer in COMPARED:
    name, point = _best(found, optimizer, _LARGE)
    assert name == best
    assert [x.seed for x in point.fresh] == [1, 2, 3, 4, 5]
    configs = [by_key[x.key] for x in point.fresh]
    assert {x.warmup_share > 0.2 for x in configs} == {'warm-up' in best}
    assert {x.b1 == 0.8 for x in configs} == {'b1 0.8' in best}


def test_at_smaller_batches_what_does_not_promise_keeps_the_rate():
  found, _ = _found(warmup_and_b1, -0.1)
  for optimizer in COMPARED:
    counts = {
      (size, variant): len(
        found[optimizer.name, size, 'tried', variant].tuned.by_seed
      )
      for size in (_SMALL, _LARGE)
      for variant in ('warm-up 30%', 'b1 0.8')
    }
    assert counts.pop((_SMALL, 'warm-up 30%')) == 1
    assert min(counts.values()) > 1


def test_a_smaller_b1_is_tried_where_the_smallest_is_the_best():
  tried = ADAMW.name, _LARGE, 'tried'
  found, _ = _found(warmup_and_b1)
  assert (*tried, 'b1 0.6') in found
  assert (*tried, 'b1 0.4') not in found
  assert (*tried, 'b1 0.6') not in _found(warmup_and_b1, -0.1, -0.2)[0]


@pytest.mark.parametrize('size', [_SMALL, _LARGE])
def test_initial_weights_are_tried_until_the_best_is_not_at_an_edge(size):
  larger, smaller = (_found(initial_weights, doubled=x)[0] for x in (0.1, -0.1))
  for optimizer in (ADAMW, WITH_RATIOS):
    assert _best(larger, optimizer, size)[0] == '4 ×'
    assert _best(smaller, optimizer, size)[0] == '1 ×'
    tried = optimizer.name, size, 'tried', '4 ×'
    assert (tried in smaller) == (optimizer is WITH_RATIOS)


def test_hyperball_takes_all_but_its_rate_from_that_with_ratios():
  found, trials = _found(initial_weights, doubled=0.1)
  by_key = {x.key: x for x in trials}
  ours, theirs = (
    by_key[_best(found, x, _LARGE)[1].fresh[0].key]
    for x in (HYPERBALL, WITH_RATIOS)
  )
  assert ours.chain == HYPERBALL.chain
  assert ours.config.init_std == theirs.config.init_std
  assert ours.config.b1 == theirs.config.b1 == 0.8
