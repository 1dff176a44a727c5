"""Muon in one call."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import normal, run

_SCHEDULE = optax.linear_schedule(0.1, 0.0, 5)
_STACKED = functools.partial(
  merit_optax.flax_dimension_numbers, stacked={'blocks/': 1}
)
_PARAMS = {
  'embedding': normal(0, (20, 8)),
  'blocks': {
    'kernel': normal(1, (2, 8, 24)),
    'bias': jnp.ones((2, 24)),
    'scale': jnp.ones((2, 8)),
  },
  'gain': jnp.ones(8),
}


def _last(optimizer, params=_PARAMS):
  """Returns the parameters after three steps."""
  gradients = [jax.tree.map(f, params) for f in (jnp.sin, jnp.cos, jnp.cos)]
  *_, last = run(optimizer, params, gradients)
  return last.params


def _adam(rate, decay=0.0, **settings):
  return optax.chain(
    merit_optax.scale_by_adam(bias_correction=True, **settings),
    optax.add_decayed_weights(decay),
    optax.scale_by_learning_rate(rate),
  )


def test_it_is_a_partition_of_public_parts():
  muon = merit_optax.scale_by_muon(
    'polar_express', 4, 0.8, mu_dtype='float16', nesterov=False,
    ns_dtype='bfloat16', weight_dimension_numbers=_STACKED,
  )  # fmt: skip
  hidden = optax.chain(
    muon,
    merit_optax.scale_by_shape(
      lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
      weight_dimension_numbers=_STACKED,
    ),
    optax.add_decayed_weights(0.3),
    optax.scale_by_learning_rate(_SCHEDULE),
  )
  settings = dict(b1=0.7, b2=0.8, eps=0.1, mu_dtype='float16')
  expected = optax.partition(
    {
      'kernel': hidden,
      'embedding': _adam(0.05, 0.2, **settings),
      'vector': _adam(0.02, 0.2, **settings),
    },
    {
      'embedding': 'embedding',
      'blocks': {'kernel': 'kernel', 'bias': 'vector', 'scale': 'vector'},
      'gain': 'vector',
    },
  )
  actual = merit_optax.muon(
    _SCHEDULE, 0.8, weight_decay=0.3, adam_learning_rate=0.05,
    vector_learning_rate=0.02, adam_b1=0.7, adam_b2=0.8, adam_eps=0.1,
    adam_weight_decay=0.2, weight_dimension_numbers=_STACKED,
    mu_dtype='float16', nesterov=False, ns_coeffs='polar_express', ns_steps=4,
    ns_dtype='bfloat16',
  )  # fmt: skip
  chex.assert_trees_all_close(
    _last(actual), _last(expected), rtol=1e-6, atol=1e-6
  )


_MATRICES = {'wide': normal(0, (4, 6)), 'tall': normal(1, (9, 4))}


@pytest.mark.skipif(
  'consistent_rms' not in inspect.signature(optax.contrib.muon).parameters,
  reason='this Optax has not that size of steps',
)
def test_matrices_take_the_steps_of_optax_with_the_same_settings():
  settings = dict(weight_decay=0.3)
  ours = merit_optax.muon(_SCHEDULE, **settings)
  theirs = optax.contrib.muon(
    _SCHEDULE, beta=0.9, consistent_rms=0.2, **settings
  )
  actual, expected = (_last(x, _MATRICES) for x in (ours, theirs))
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', _MATRICES)
def test_a_rate_for_the_default_of_optax_is_converted_as_documented(name):
  params = {name: _MATRICES[name]}
  rows, columns = params[name].shape
  factor = max(1, columns / rows) ** 0.5 / (0.2 * max(rows, columns) ** 0.5)
  ours = merit_optax.muon(0.1 * factor)
  theirs = optax.contrib.muon(0.1, beta=0.9)
  actual, expected = (_last(x, params) for x in (ours, theirs))
  chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'given, rates',
  [
    ({}, (_SCHEDULE, _SCHEDULE)),
    ({'adam_learning_rate': 0.05}, (0.05, 0.05)),
    ({'vector_learning_rate': 0.02}, (_SCHEDULE, 0.02)),
  ],
)
def test_a_rate_that_is_not_given_is_that_of_the_larger_group(given, rates):
  found = _last(
    merit_optax.muon(_SCHEDULE, weight_dimension_numbers=_STACKED, **given)
  )
  del found['blocks']['kernel']
  others = {k: _last(_adam(x)) for k, x in zip('ev', rates, strict=True)}
  del others['v']['blocks']['kernel']
  expected = others['v'] | {'embedding': others['e']['embedding']}
  chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)


def test_only_hidden_matrices_decay_by_default():
  optimizer = merit_optax.muon(
    0.1, weight_decay=0.5, weight_dimension_numbers=_STACKED
  )
  zeros = optax.tree.zeros_like(_PARAMS)
  *_, last = run(optimizer, _PARAMS, [zeros])
  expected = jax.tree.map(lambda x: x, _PARAMS)
  expected['blocks']['kernel'] *= 1 - 0.1 * 0.5
  chex.assert_trees_all_close(last.params, expected, rtol=1e-6)
