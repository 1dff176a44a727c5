"""Gradients, and the dtype and the order in which they are summed."""

import re
from typing import Any
from unittest import mock

from flax import nnx
from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from examples.gpt2.devices.sharding import BATCH_AXES, make_mesh
from examples.gpt2.model import sums

_BF16 = jnp.bfloat16


def _linear(kind=sums.Linear, **dtypes: Any) -> nnx.Module:
  return kind(4, (2, 3), dtype=_BF16, rngs=nnx.Rngs(0), **dtypes)


def _embed(kind=sums.Embed, **dtypes: Any) -> nnx.Module:
  return kind(3, 2, dtype=_BF16, rngs=nnx.Rngs(0), **dtypes)


def _gradients(
  layer: nnx.Module, x: jax.Array, weights: jax.Array
) -> dict[str, jax.Array]:
  """Returns the gradients of a weighted sum of what a layer returns."""
  graphdef, params = nnx.split(layer)

  @jax.jit
  def gradient(params: Any, x: jax.Array, weights: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
      y = nnx.merge(graphdef, params)(x)
      return jnp.sum(y.astype(jnp.float32) * weights)

    return jax.grad(loss)(params)

  return nnx.as_pure(gradient(params, x, weights))


def _error_in_ulps(found: jax.Array, exact: np.ndarray) -> float:
  """Returns the largest error over the spacing of bfloat16 numbers."""
  spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
  return np.max(np.abs(np.asarray(found, np.float64) - exact) / spacing)


@pytest.mark.parametrize('dtype', [jnp.float32, _BF16])
def test_gradients_of_linear_layers_are_sums_in_the_dtype(dtype: jnp.dtype):
  rng = np.random.default_rng(0)
  x_ND = jnp.asarray(rng.normal(size=(512, 4)), _BF16)
  weights = jnp.asarray(rng.normal(size=(512, 2, 3)), _BF16)
  split = NamedSharding(make_mesh('data=8'), P('data'))
  on_devices = jax.device_put((x_ND, weights.astype(jnp.float32)), split)
  found = _gradients(_linear(reduce_dtype=dtype), *on_devices)
  exact = {
    'kernel': np.tensordot(
      np.asarray(x_ND, float), np.asarray(weights, float), axes=(0, 0)
    ),
    'bias': np.asarray(weights, float).sum(0),
  }
  for name, expected in exact.items():
    is_exact = _error_in_ulps(found[name], expected) < 1e-2
    assert is_exact == (dtype == jnp.float32)


def test_a_common_token_has_the_whole_sum():
  # In bfloat16, 256 + 1 is 256.
  tokens, ones = jnp.full([4096], 1), jnp.ones([4096, 2])
  layer = _embed(reduce_dtype=jnp.float32)
  found = _gradients(layer, tokens, ones)['embedding']
  np.testing.assert_array_equal(found, [[0, 0], [4096] * 2, [0, 0]])


_add = jax.jit(sums.add_in_any_order, static_argnums=2)


@given(
  count=st.sampled_from([1, 2, 60, 300]),
  seed=st.integers(0, 2**32 - 1),
  spread=st.sampled_from([0.0, 1.0, 10.0]),
  scale=st.sampled_from([1e-30, 1e-20, 1.0, 1e30]),
)
def test_sums_have_the_same_bits_in_any_order(count, seed, spread, scale):
  rng = np.random.default_rng(seed)
  rows = rng.integers(4, size=count)
  sizes = scale * np.exp(spread * rng.uniform(-1, 1, (count, 3)))
  x = (sizes * rng.uniform(-1, 1, (count, 3))).astype(np.float32)
  found = _add(rows, x, 4)
  order = rng.permutation(count)
  shuffled = _add(rows[order], x[order], 4)
  np.testing.assert_array_equal(shuffled, found)
  exact = np.zeros((4, 3))
  np.add.at(exact, rows, x.astype(float))
  largest = np.abs(x).max(0)
  error = np.abs(np.asarray(found, float) - exact)
  lost = count * 2.0**-25 * np.maximum(largest, 2.0**-90)
  assert (error <= 2.0**-23 * np.abs(exact) + lost).all()


@pytest.mark.parametrize('count', [1, 2, 255, 256, 257, 4096, 2**18, 2**19])
def test_the_largest_sums_do_not_overflow(count: int):
  # Rounded to a digit, it is a power of two.
  x = np.full((count, 2), 1 - 2.0**-24, np.float32) * [1, -1]
  found = _add(np.zeros(count, int), x, 1)
  np.testing.assert_allclose(found, [[count, -count]], rtol=2.0**-22)


def test_sums_of_nothing_are_zero_and_of_too_much_not_a_number():
  rows, x = np.array([0, 1, 1]), np.zeros((3, 4), np.float32)
  x[1:] = [0, np.inf, np.nan, 1.7e38]
  found = _add(rows, x, 2)
  np.testing.assert_array_equal(found, [[0] + [np.nan] * 3] * 2)


@pytest.mark.parametrize('shape', [(8, 6), (12, 6), (6,)])
def test_devices_send_one_sum(shape: tuple[int, ...]):
  rng = np.random.default_rng(0)
  tokens = rng.integers(4, size=shape)
  x = rng.normal(size=(*shape, 3)).astype(np.float32)
  expected = np.zeros((4, 3))
  np.add.at(expected, tokens, x)
  mesh = make_mesh('data=2,fsdp=2,tensor=2')
  spec = P(BATCH_AXES) if len(shape) > 1 else P()
  placed = jax.device_put((tokens, x), NamedSharding(mesh, spec))
  with jax.set_mesh(mesh):
    add = jax.jit(sums.add_by_shard, static_argnums=(2, 3), out_shardings=P())
    found = add(*placed, 4, np.float32)
    text = add.lower(*placed, 4, np.float32).compile().as_text()
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
  sent = re.findall(r' = (\w+)\S* (?:all-|reduce-|collective-)\S*\(', text)
  assert sent == ['f32'] * (len(shape) > 1)


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
  """Takes the way of GPUs, wherever there is a choice."""
  monkeypatch.setattr(
    jax.lax, 'platform_dependent', lambda *x, default, cuda, **_: cuda(*x)
  )


@pytest.mark.parametrize('shape', [(4, 6), (6,)])
@pytest.mark.parametrize('dtype', [jnp.float32, _BF16])
@pytest.mark.usefixtures('as_on_gpus')
def test_gpus_have_the_same_gradients(shape: tuple[int, ...], dtype: jnp.dtype):
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(3, size=shape))
  weights = jnp.asarray(rng.integers(-9, 9, (*shape, 2)), jnp.float32)
  layer = _embed(reduce_dtype=dtype)
  with mock.patch.object(sums, 'add_by_shard', wraps=sums.add_by_shard) as add:
    found = _gradients(layer, tokens, weights)['embedding']
  add.assert_called_once()
  expected = np.zeros((3, 2))
  np.add.at(expected, np.asarray(tokens), np.asarray(weights))
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  ('make', 'kind', 'x'),
  [
    (_linear, nnx.LinearGeneral, jnp.ones([5, 4], _BF16) / 3),
    (_embed, nnx.Embed, jnp.array([2, 1, 2])),
  ],
)
def test_layers_return_what_those_of_flax_do(make, kind, x):
  flax, rounded = make(kind), make(reduce_dtype=_BF16)
  expected = flax(x)
  np.testing.assert_array_equal(make(reduce_dtype=jnp.float32)(x), expected)
  np.testing.assert_array_equal(rounded(x), expected)
  # With sums in bfloat16, so are the gradients.
  weights = jnp.linspace(0.5, 2, expected.size).reshape(expected.shape)
  jax.tree.map(
    np.testing.assert_array_equal,
    _gradients(rounded, x, weights),
    _gradients(flax, x, weights),
  )
