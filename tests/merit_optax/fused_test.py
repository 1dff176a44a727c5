"""Matrices side by side in one kernel get the updates that each gets alone."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import merit_optax
from tests.merit_optax.arrays import make_mesh, normal, run

_Fused = merit_optax.FusedDimensionNumbers
_SIZES = {'equal': 3, 'grouped queries': (8, 2, 2)}
_TRANSFORMS = {
  'muon': merit_optax.scale_by_muon,
  'max': merit_optax.scale_by_max_norm_trust_ratio,
  'l2': merit_optax.scale_by_l2_norm_trust_ratio,
  'row': functools.partial(merit_optax.scale_by_lmo, 'row'),
  'shape': functools.partial(merit_optax.scale_by_shape, lambda m, n: m / n),
  'kept': merit_optax.keep_matrix_norms,
  'kept from the first': functools.partial(
    merit_optax.keep_matrix_norms, radius='initial'
  ),
}


def _parts(x, sizes):
  count = (12 // sizes,) * sizes if isinstance(sizes, int) else sizes
  return jnp.split(x, np.cumsum(count)[:-1], axis=-1)


@pytest.mark.parametrize('sizes', _SIZES.values(), ids=_SIZES)
@pytest.mark.parametrize('make', _TRANSFORMS.values(), ids=_TRANSFORMS)
def test_parts_get_the_updates_that_they_get_alone(make, sizes):
  kernel, spec = normal(0, (5, 4, 12)), _Fused(1, 2, sizes)
  # The last part has much smaller gradients.
  gradient = normal(1, (5, 4, 12)).at[..., 10:].multiply(1e-3)
  fused = make(weight_dimension_numbers=spec)
  alone = make(
    weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
  )
  updates, _ = jax.jit(fused.update)(gradient, fused.init(kernel), kernel)
  params, gradients = _parts(kernel, sizes), _parts(gradient, sizes)
  expected, _ = jax.jit(alone.update)(gradients, alone.init(params), params)
  np.testing.assert_allclose(
    updates, jnp.concatenate(expected, -1), rtol=1e-5, atol=1e-6
  )


def test_a_part_with_small_gradients_takes_steps_of_the_same_size():
  params = {'mlp': {'qkv': {'kernel': normal(0, (16, 48))}}}
  gradients = {
    'mlp': {'qkv': {'kernel': normal(1, (16, 48)).at[:, 32:].multiply(0.01)}}
  }
  fused = functools.partial(
    merit_optax.flax_dimension_numbers, fused={'qkv/kernel': 3}
  )
  for specs, is_equal in ((fused, True), (None, False)):
    optimizer = merit_optax.muon(0.1, weight_dimension_numbers=specs)
    *_, last = run(optimizer, params, [gradients])
    step = last.params['mlp']['qkv']['kernel'] - params['mlp']['qkv']['kernel']
    first, *_, value = map(jnp.linalg.norm, jnp.split(step, 3, axis=1))
    assert (value > 0.9 * first) == is_equal


def test_a_mesh_makes_no_difference():
  params = {'kernel': normal(0, (8, 48)), 'bias': jnp.ones(48)}
  specs = functools.partial(
    merit_optax.flax_dimension_numbers, fused={'kernel': (32, 8, 8)}
  )
  optimizer = optax.chain(
    merit_optax.scale_by_muon(weight_dimension_numbers=specs),
    merit_optax.scale_by_max_norm_trust_ratio(weight_dimension_numbers=specs),
  )
  update = jax.jit(optimizer.update)
  expected, _ = update(params, optimizer.init(params), params)
  mesh = make_mesh(fsdp=2, tensor=4)
  place = {
    'kernel': jax.NamedSharding(mesh, jax.P('fsdp', 'tensor')),
    'bias': jax.NamedSharding(mesh, jax.P()),
  }
  with jax.set_mesh(mesh):
    split = jax.device_put(params, place)
    actual, _ = update(split, optimizer.init(split), split)
  chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_statistics_and_the_table_know_the_parts():
  params = {'kernel': normal(0, (4, 12))}
  gradients = {'kernel': normal(1, (4, 12)).at[:, 10:].multiply(1e-9)}
  specs = {'kernel': _Fused(0, 1, (8, 2, 2))}
  settings = dict(
    learning_rate=0.5, ratios=['weight'], weight_dimension_numbers=specs
  )
  optimizer = merit_optax.merit(**settings)
  measured = merit_optax.merit_statistics(**settings)(
    gradients, optimizer.init(params), params
  )
  updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  np.testing.assert_allclose(
    measured['kernel/update_to_weight'],
    jnp.abs(updates['kernel']).max() / jnp.abs(params['kernel']).max(),
    rtol=1e-6,
  )
  assert measured['kernel/trust_ratio_max'] > measured['kernel/trust_ratio_min']
  table = merit_optax.describe(params, weight_dimension_numbers=specs)
  assert '1 x 4 x 8 + 1 x 4 x 2 + 1 x 4 x 2' in table


@pytest.mark.parametrize(
  'parts', [5, 0, (8, 2), (12, 0), (6.0, 6), 'abc', None]
)
def test_parts_that_do_not_fit_are_refused(parts):
  transform = merit_optax.scale_by_muon(
    weight_dimension_numbers=_Fused(0, 1, parts)
  )
  with pytest.raises(ValueError, match='must have parts that divide the last'):
    transform.init(jnp.ones((4, 12)))


def test_a_calibrated_ratio_takes_no_parts():
  transform = merit_optax.scale_by_l2_norm_trust_ratio(
    calibrate=True, weight_dimension_numbers=_Fused(0, 1, 3)
  )
  with pytest.raises(ValueError, match='must not hold FusedDimensionNumbers'):
    transform.init(jnp.ones((4, 12)))
