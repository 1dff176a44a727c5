"""Clipping by magnitude, real and complex."""

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax.numpy as jnp
import numpy as np
import optax

import merit_optax

_LIMITS = st.sampled_from([1e-3, 0.5, 1, 1e6])


def _clip(max_delta, updates):
  transform = merit_optax.elementwise_clip(max_delta)
  return transform.update(updates, transform.init(updates))[0]


@hypothesis.given(
  hnp.arrays(np.float32, 6, elements=st.floats(width=32)), _LIMITS
)
def test_real_numbers_are_clipped_as_optax_does(updates, max_delta):
  actual = _clip(max_delta, updates)
  clip = optax.clip(max_delta)
  expected, _ = clip.update(updates, clip.init(updates))
  np.testing.assert_array_equal(actual, expected)


_parts = st.one_of(
  st.just(0.0),
  st.floats(2**-20, 2**20, width=32),
  st.floats(-(2**20), -(2**-20), width=32),
)


@hypothesis.given(hnp.arrays(np.float32, (2, 5), elements=_parts), _LIMITS)
def test_complex_numbers_keep_their_phase(parts, max_delta):
  updates = (parts[0] + 1j * parts[1]).astype(np.complex64)
  actual = np.asarray(_clip(max_delta, jnp.asarray(updates)))
  assert actual.dtype == np.complex64
  size = np.abs(updates.astype(np.complex128))
  assert np.all(np.abs(actual) <= max_delta * (1 + 1e-6))
  scale = np.minimum(1, max_delta / np.where(size == 0, 1, size))
  # Relative to each magnitude: a small part may lose its own digits.
  assert np.all(np.abs(actual - scale * updates) <= 1e-6 * scale * size)


def test_huge_complex_numbers_stay_finite():
  updates = jnp.array([1e30, -1e35j], jnp.complex64)
  clipped = _clip(1e10, updates)
  np.testing.assert_allclose(clipped, [1e10, -1e10j], rtol=1e-6)
