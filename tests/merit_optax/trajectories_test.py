"""MERIT follows the official code step by step."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax

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


def _optimizer(learning_rate, weight_decay, b1, b2, eps, **_):
  if isinstance(learning_rate, list):
    learning_rate = jnp.asarray(learning_rate, jnp.float32).__getitem__
  return merit_optax.merit(
    learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay
  )


def _steps(scenario, jit):
  """Yields the parameters before the first step and after each step."""
  optimizer = _optimizer(**_SCENARIOS[scenario])
  update = jax.jit(optimizer.update) if jit else optimizer.update
  gradients = _load(scenario, 'gradients')
  params = {k: v[0] for k, v in _load(scenario, 'parameters').items()}
  params = jax.tree.map(jnp.asarray, params)
  state = optimizer.init(params)
  yield params
  for step in range(_SCENARIOS[scenario]['steps']):
    gradient = {k: jnp.asarray(v[step]) for k, v in gradients.items()}
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    yield params


def _relative_errors(actual, expected):
  """Returns the error of every step, as a share of the largest value of it."""
  axes = tuple(range(1, expected.ndim))
  error = np.max(np.abs(actual - expected), axis=axes)
  size = np.max(np.abs(expected), axis=axes)
  # A parameter that is all zero has to be met exactly.
  return np.divide(
    error, size, out=np.where(error > 0, np.inf, 0), where=size > 0
  )


@pytest.mark.parametrize(
  'scenario, jit',
  [*((name, True) for name in sorted(_SCENARIOS)), ('matrix_decay', False)],
)
def test_parameters_are_the_official_ones_at_every_step(scenario, jit):
  steps = list(_steps(scenario, jit))
  for name, expected in _load(scenario, 'parameters').items():
    actual = np.stack([step[name] for step in steps])
    assert actual.shape == expected.shape
    errors = _relative_errors(actual, expected)
    assert np.max(errors) <= _BOUND, f'{name}, step {np.argmax(errors)}'
