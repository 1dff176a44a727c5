"""The optimizer as a whole: its chain and its arguments."""

import inspect

import chex
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run

_RATE = 0.1


def _steps(optimizer):
  # One below the clip, so that nothing hides the ratio, and one beyond it.
  params = {'w': normal(0, (5, 3)) / 4, 'b': 40 * normal(1, (4,))}
  gradients = [
    {'w': normal(9 + step, (5, 3)), 'b': normal(99 + step, (4,))}
    for step in range(4)
  ]
  return list(run(optimizer, params, gradients))


def test_every_argument_reaches_its_transform():
  adam = {
    **{'b1': 0.8, 'b2': 0.7, 'eps': 0.1, 'eps_root': 0.2},
    **{'mu_dtype': 'bfloat16', 'nu_dtype': 'float16', 'bias_correction': True},
  }
  ratio = {
    'ratios': ('row', 'column'),
    'min_norm': 0.4,
    'weight_dimension_numbers': {
      'w': optax.contrib.MuonDimensionNumbers(1, 0),
      'b': None,
    },
  }
  others = {
    'weight_decay': 0.3,
    'mask': lambda params: {'w': True, 'b': False},
    'clip_threshold': 0.5,
    'trust_ratio_mask': {'w': True, 'b': False},
  }
  everything = adam | ratio | others
  assert everything.keys() == (
    inspect.signature(merit_optax.merit).parameters.keys() - {'learning_rate'}
  )
  chain = optax.chain(
    merit_optax.scale_by_adam(**adam),
    optax.add_decayed_weights(0.3, {'w': True, 'b': False}),
    optax.masked(
      merit_optax.scale_by_max_norm_trust_ratio(**ratio),
      {'w': True, 'b': False},
    ),
    merit_optax.elementwise_clip(0.5),
    optax.scale_by_learning_rate(_RATE),
  )
  merit = merit_optax.merit(_RATE, **everything)
  chex.assert_trees_all_equal(_steps(merit), _steps(chain))


@pytest.mark.parametrize('empty', [{}, (), [], {'a': {}, 'b': None}], ids=str)
def test_empty_trees_pass_through(empty):
  optimizer = merit_optax.merit(_RATE, weight_decay=0.1)
  updates, _ = optimizer.update(empty, optimizer.init(empty), empty)
  assert updates == empty
