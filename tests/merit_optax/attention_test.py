"""`attention_statistics` against a plain NumPy oracle."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import merit_optax
from tests.merit_optax.arrays import normal


def _pair(time=20, heads=4, *, batch=2, key_time=None, key_heads=None):
  """Returns queries and keys of head size 8, in the order BTNH."""
  query = normal(0, (batch, time, heads, 8))
  key = normal(1, (batch, key_time or time, key_heads or heads, 8))
  return query, key


@functools.cache
def _jitted(**options):
  return jax.jit(functools.partial(merit_optax.attention_statistics, **options))


def _visible_logits(query, key, is_causal, scale):
  """Yields head and visible logits of every query, in float64."""
  query, key = (np.asarray(x, np.float64) for x in (query, key))
  group = query.shape[2] // key.shape[2]
  scale = query.shape[-1] ** -0.5 if scale is None else scale
  for b, t, n in np.ndindex(query.shape[:3]):
    seen = key[b, : t + 1, n // group] if is_causal else key[b, :, n // group]
    yield n, scale * seen @ query[b, t, n]


def _oracle(query, key, is_causal=True, scale=None):
  """Returns the three statistics of each head, one query at a time."""
  heads = range(query.shape[2])
  largest, centred, entropy = ([[] for _ in heads] for _ in range(3))
  for n, logits in _visible_logits(query, key, is_causal, scale):
    largest[n].append(logits.max())
    centred[n].append(logits.max() - logits.mean())
    p = np.exp(logits - logits.max())
    p = p[p > 0] / p.sum()
    entropy[n].append(-np.sum(p * np.log(p)))
  return (
    np.max(largest, axis=1),
    np.max(centred, axis=1),
    np.mean(entropy, axis=1),
  )


def _assert_oracle(query, key, got=None, **options):
  got = _jitted(**options)(query, key) if got is None else got
  for value, expected in zip(got, _oracle(query, key, **options), strict=True):
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('layout', ['BNTH', 'TBNH', 'BNHT', 'NTH'])
def test_layouts(layout):
  query, key = _pair(batch=2 if 'B' in layout else 1, key_heads=2)
  order = ['BTNH'.index(axis) for axis in layout]
  if 'B' not in layout:
    order = [0, *order]
  ordered = [x.transpose(order) for x in (query, key)]
  if 'B' not in layout:
    ordered = [x[0] for x in ordered]
  _assert_oracle(query, key, _jitted(layout=layout)(*ordered))


@pytest.mark.parametrize('scale', [-2.0, None])
@pytest.mark.parametrize('size', [1.0, 1e4])
def test_scales_and_huge_logits(scale, size):
  query, key = _pair()
  options = {} if scale is None else {'scale': scale}
  _assert_oracle(size * query, key, **options)


@pytest.mark.parametrize(
  'time, key_time, heads, key_heads, is_causal',
  [
    (20, 20, 6, 1, True),
    (3, 7, 4, 2, True),
    (7, 3, 4, 2, True),
    (7, 3, 4, 2, False),
    (1, 1, 4, 4, True),
  ],
)
def test_grouped_heads_and_different_lengths(
  time, key_time, heads, key_heads, is_causal
):
  pair = _pair(time, heads, key_time=key_time, key_heads=key_heads)
  _assert_oracle(*pair, is_causal=is_causal)


# The chunk of 128 queries, and two chunks and a rest.
@pytest.mark.parametrize('time', [128, 300])
def test_lengths_around_the_chunk(time):
  query, key = _pair(time, 2, batch=1)
  # The largest logits stand at the end, where a lost rest would hide them.
  query = query.at[:, -1].multiply(10)
  _assert_oracle(query, key)


def test_logits_of_half_precision_are_not_rounded():
  # As bfloat16 would, by 1 in 256.
  _assert_oracle(*(x.astype(jnp.bfloat16) for x in _pair()))


_LONG, _HEADS = 2048, 4


@pytest.mark.parametrize('is_causal', [True, False])
def test_time_by_time_is_never_held_for_all_heads(is_causal):
  shape = jax.ShapeDtypeStruct((1, _LONG, _HEADS, 16), jnp.float32)
  compiled = _jitted(is_causal=is_causal).lower(shape, shape).compile()
  memory = compiled.memory_analysis()
  assert memory.temp_size_in_bytes < 4 * _HEADS * _LONG * _LONG / 2


@pytest.mark.parametrize(
  ('query', 'key', 'message'),
  [
    ((2, 5, 4), (2, 5, 4, 8), r'query .* got shape \(2, 5, 4\)'),
    ((2, 5, 4, 8), (3, 5, 4, 8), r'same batch .*\(3, 5, 4, 8\)'),
    ((2, 5, 4, 8), (2, 5, 4, 6), r'same batch .*\(2, 5, 4, 6\)'),
    ((2, 5, 4, 8), (2, 0, 4, 8), 'not be empty'),
    ((2, 5, 4, 8), (2, 5, 3, 8), 'key heads, 3, must divide .* heads, 4'),
  ],
)
def test_shapes_that_do_not_fit(query, key, message):
  with pytest.raises(ValueError, match=message):
    merit_optax.attention_statistics(jnp.ones(query), jnp.ones(key))


def test_an_accelerator_does_not_round_float32_first():
  program = jax.export.export(_jitted(), platforms=['cuda', 'tpu'])(*_pair())
  text = program.mlir_module()
  products = [x for x in text.splitlines() if 'stablehlo.dot_general' in x]
  assert products
  assert all('precision = [HIGHEST, HIGHEST]' in x for x in products)
