"""Checksums of arrays, to see bits that a disk or a copy has flipped.

Orbax restores the wrong number without a word.
"""

import jax
import jax.numpy as jnp


def checksums(arrays: dict[str, jax.Array]) -> dict[str, int]:
  """Returns the checksum of each array by name, see :func:`checksum`."""
  return jax.tree.map(int, jax.device_get(_on_devices(arrays)))


@jax.jit
def _on_devices(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return jax.tree.map(checksum, arrays)


def checksum(x: jax.Array) -> jax.Array:
  """Returns a checksum of an array, the same however it is sharded.

  Each 32 bits are mixed, one to one, with their position into a number, and
  these are summed in integers, whose order is free. A change within 32 bits is
  always seen; another is missed with a probability of about 2**-32. The array
  has any shape, and is of bool or a type of whole bytes.
  """
  words = _words(x)
  # From the index along each axis: a flat one needs a reshape, and that would
  # gather a sharded array.
  position = jnp.uint32(0)
  for axis, size in enumerate(words.shape):
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position = position * jnp.uint32(size % 2**32) + index
  return jnp.sum(_mix(words + _mix(position)), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32, longer ones along a new axis."""
  if jnp.iscomplexobj(x):
    x = jnp.stack([x.real, x.imag])
  if x.dtype == bool:
    return x.astype(jnp.uint32)
  word = f'uint{8 * min(x.dtype.itemsize, 4)}'
  return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """Scrambles uint32 one to one, as the last step of MurmurHash3 does."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
