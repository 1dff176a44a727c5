import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gpt2.checksums import checksum, checksums

_SHAPES = [(), (1,), (8,), (3, 5), (8, 16), (2, 3, 4)]
# Each size of a number, and what is no plain number.
_DTYPES = [
  'bool', 'float8_e4m3fn', 'bfloat16', 'float32',
]  # fmt: skip


def _bytes_as(dtype: str, content: bytes, shape: tuple[int, ...]) -> np.ndarray:
  size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
  content = (content * (size + 1))[:size]
  if dtype == 'bool':
    content = bytes(byte & 1 for byte in content)
  return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)


def _flipped(x: np.ndarray, bit: int) -> np.ndarray:
  """Returns an array with a bit, counted modulo their number, flipped."""
  content = bytearray(x.tobytes())
  bits = 1 if x.dtype == bool else 8
  bit %= len(content) * bits
  content[bit // bits] ^= 1 << bit % bits
  return np.frombuffer(content, x.dtype).reshape(x.shape)


_checksum = jax.jit(checksum)


def _sum(x: np.ndarray) -> int:
  return int(_checksum(x))


@pytest.mark.parametrize('dtype', _DTYPES)
@hypothesis.given(
  content=st.binary(min_size=1, max_size=64),
  shape=st.sampled_from(_SHAPES),
  bit=st.integers(0, 10**4),
)
def test_every_flipped_bit_changes_the_checksum(
  dtype: str, content: bytes, shape: tuple[int, ...], bit: int
):
  x = _bytes_as(dtype, content, shape)
  assert _sum(x) != _sum(_flipped(x, bit))


def test_checksums_do_not_change_between_versions():
  # Those in checkpoints would call them damaged.
  arrays = {
    'a': jnp.arange(12, dtype='float32').reshape(3, 4),
    'b': jnp.arange(5, dtype='bfloat16'),
    'c': jnp.array([True, False]),
  }
  assert checksums(arrays) == {
    'a': 2970397663,
    'b': 2522832686,
    'c': 2168292678,
  }
