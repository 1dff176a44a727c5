"""MERIT in one file has the bits of the library's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import merit_in_one_file
import merit_optax
from tests.merit_optax import trajectories_test
from tests.merit_optax.arrays import assert_same_bits, normal

pytestmark = pytest.mark.usefixtures('full_compilation')

_Spec = optax.contrib.MuonDimensionNumbers
_STEPS = 20


@trajectories_test.each_scenario
def test_it_follows_the_official_code(scenario):
  trajectories_test.assert_follows(merit_in_one_file.merit, scenario)


def _tree(seed, *lead):
  """Returns arrays of all kinds, with zeros and with extreme sizes."""
  shapes = {
    's': (),
    'b': (5,),
    'w': (6, 7),
    'stack': (3, 4, 5),
    'heads': (6, 2, 4),
    'zero': (2, 3),
  }
  tree = {
    name: np.array(normal([seed, i], (*lead, *shape)))
    for i, (name, shape) in enumerate(shapes.items())
  }
  tree['w'][..., 1, :] = 0
  tree['w'][..., :, 2] *= 1e20
  tree['stack'][..., 0, :, :] *= 1e-30
  tree['zero'][:] = 0
  if lead:  # Gradients that stop.
    tree['b'][5:] = 0
  return tree


_SPECS = {
  **{'s': None, 'b': _Spec((), 0), 'w': _Spec(1, 0), 'zero': None},
  **{'stack': _Spec((-2,), (-1,)), 'heads': _Spec([0], (1, 2))},
}


@pytest.mark.parametrize(
  'settings',
  [
    {'learning_rate': 0.1},
    {
      'learning_rate': optax.linear_schedule(0.5, 0.0, _STEPS),
      'weight_decay': optax.linear_schedule(0.0, 0.3, _STEPS),
      'mask': lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
      'weight_dimension_numbers': lambda _: _SPECS,
    },
    {
      **{'learning_rate': 2.0, 'b1': 0.5, 'b2': 0.7, 'eps': 0.1},
      **{'mu_dtype': jnp.bfloat16, 'min_norm': 0.2, 'weight_decay': 0.1},
      'weight_dimension_numbers': _SPECS,
    },
  ],
  ids=['default', 'schedules', 'numbers'],
)
@pytest.mark.filterwarnings('ignore:These parameters have more than two axes')
def test_its_bits_are_those_of_the_library(settings):
  start, gradients = _tree(0), _tree(1, _STEPS)

  def train(merit):
    optimizer = merit(**settings)

    def step(carry, gradient):
      params, state = carry
      updates, state = optimizer.update(gradient, state, params)
      carry = optax.apply_updates(params, updates), state
      return carry, carry

    carry = start, optimizer.init(start)
    return jax.lax.scan(step, carry, gradients)[1]

  actual, expected = (
    jax.jit(train, static_argnums=0)(x.merit)
    for x in (merit_in_one_file, merit_optax)
  )
  assert_same_bits(jax.tree.leaves(actual), jax.tree.leaves(expected))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(actual[0]))


def test_update_without_params_raises_as_in_optax():
  transform, w = merit_in_one_file.scale_by_max_norm_trust_ratio(), jnp.eye(2)
  with pytest.raises(ValueError, match='not passing `params`'):
    transform.update(w, transform.init(w))
