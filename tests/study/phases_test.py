import chex
import jax
import numpy as np
import optax
import pytest

from examples.gpt2.devices.sharding import by_path, make_mesh
from examples.gpt2.run.step import Trainer
from examples.study.arms import make_optimizer
from examples.study.contenders import ADAMW, KEPT, MERIT, MUON
from examples.study.phases import second_phase
from examples.study.scales import SCALES


def _trainer(contender):
  config = contender.run(
    SCALES['nano'], 16, 0.01, num_layers=1, num_heads=2, width=8, unroll=1,
    context_length=8,
  ).config  # fmt: skip
  optimizer = make_optimizer(contender.arm, config) if contender.arm else None
  return Trainer(config, 257, make_mesh('', jax.devices()[:1]), optimizer)


@pytest.fixture(scope='module')
def first():
  """The state of AdamW after some steps."""
  shapes = _trainer(ADAMW).shapes
  generator = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: (
      np.asarray(7, np.int32)
      if x.dtype == np.int32
      else generator.uniform(0.1, 1, x.shape).astype(np.float32)
    ),
    shapes,
  )


def _moments(opt_state):
  """Returns the states that have moments, and all other counts of steps."""
  found = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, 'mu'))
  return (
    [x for x in found if hasattr(x, 'mu')],
    [x for x in found if not hasattr(x, 'mu')],
  )


@pytest.mark.parametrize(
  'contender', [ADAMW, MERIT, MUON, KEPT], ids=lambda x: x.name
)
def test_each_parameter_takes_its_moments_over(contender, first):
  state = second_phase(_trainer(contender), first, fresh_moments=False)
  chex.assert_trees_all_equal(state.params, first.params)
  adam = optax.tree.get(first.opt_state, 'ScaleByAdamState')
  taken, counts = _moments(state.opt_state)
  # The schedule starts again.
  assert not any(x.any() for x in counts)
  assert all(x.count == 7 for x in taken)
  names = []
  for x in taken:
    for mine, all_of in ((x.mu, adam.mu), (getattr(x, 'nu', None), adam.nu)):
      expected = by_path(all_of)
      for name, moment in by_path(mine).items():
        np.testing.assert_array_equal(moment, expected[name])
    names += by_path(x.mu)
  assert sorted(names) == sorted(by_path(first.params))


def test_fresh_moments_are_those_of_a_run_that_starts(first):
  trainer = _trainer(KEPT)
  state = second_phase(trainer, first, fresh_moments=True)
  chex.assert_trees_all_equal(state.params, first.params)
  chex.assert_trees_all_equal(state.opt_state, trainer.init().opt_state)
