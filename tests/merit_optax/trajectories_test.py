"""MERIT follows the official code step by step."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import merit_optax
from tests.merit_optax.arrays import run

pytestmark = pytest.mark.usefixtures('full_compilation')

_DATA = pathlib.Path(__file__).parents[1] / 'data'
_SCENARIOS = json.loads((_DATA / 'merit_trajectories.json').read_text())
_BOUND = 1e-6


def _load(scenario, kind):
  with np.load(_DATA / 'merit_trajectories.npz') as archive:
    return {
      name: archive[f'{scenario}/{name}/{kind}']
      for name in _SCENARIOS[scenario]['parameters']
    }


def _optimizer(merit, learning_rate, weight_decay, b1, b2, eps, **_):
  if isinstance(learning_rate, list):
    learning_rate = jnp.asarray(learning_rate, jnp.float32).__getitem__
  return merit(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)


each_scenario = pytest.mark.parametrize('scenario', sorted(_SCENARIOS))


@each_scenario
def test_parameters_are_the_official_ones_at_every_step(scenario):
  assert_follows(merit_optax.merit, scenario)


def assert_follows(merit, scenario):
  """Checks the parameters after each step against the authors' code."""
  parameters, gradients = (
    _load(scenario, kind) for kind in ('parameters', 'gradients')
  )
  start = {name: jnp.asarray(x[0]) for name, x in parameters.items()}
  steps = run(
    _optimizer(merit, **_SCENARIOS[scenario]),
    start,
    [
      {name: jnp.asarray(x[step]) for name, x in gradients.items()}
      for step in range(_SCENARIOS[scenario]['steps'])
    ],
  )
  found = [start, *(step.params for step in steps)]
  for name, expected in parameters.items():
    actual = np.stack([params[name] for params in found])
    assert actual.shape == expected.shape
    # A parameter that is all zero has to be met exactly.
    axes = tuple(range(1, expected.ndim))
    size = np.max(np.abs(expected), axis=axes, keepdims=True)
    assert np.all(np.abs(actual - expected) <= _BOUND * size), name
