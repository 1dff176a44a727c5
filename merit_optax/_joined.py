"""Small arrays of all parameters joined into one, which a state holds."""

from collections.abc import Iterable
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def join(tree: Any) -> jax.Array:
  """Returns all arrays of a tree as one with a single axis, in float32.

  A state that holds it has one array besides the moments, as a counter, whose
  rank no parameter has to share and that needs no sharding of its own. If they
  have no elements, it has a zero, since Orbax saves no empty array.
  """
  parts = [whole(x).ravel().astype(jnp.float32) for x in jax.tree.leaves(tree)]
  is_empty = not any(part.size for part in parts)
  return jnp.zeros(1, jnp.float32) if is_empty else jnp.concatenate(parts)


def split(joined: jax.Array, like: Any) -> Any:
  """Returns the parts of a joined array in a tree of arrays like them.

  Raises:
    ValueError: If it was joined of more or fewer elements.
  """
  leaves, structure = jax.tree.flatten(like)
  ends = list(itertools.accumulate(x.size for x in leaves))
  size = max([0, *ends])
  if size and joined.size != size:
    raise ValueError(
      'updates must hold arrays for the parameters that init was given (zeros '
      f'where there is no gradient, not None): the state has {joined.size} '
      f'numbers, for these parameters there would be {size}.'
    )
  parts = jnp.split(joined, ends)[:-1]
  return jax.tree.unflatten(
    structure,
    [
      sharded_as(x, part.reshape(x.shape).astype(x.dtype))
      for part, x in zip(parts, leaves, strict=True)
    ],
  )


def whole(x: jax.Array, axes: Iterable[int] | None = None) -> jax.Array:
  """Returns an array whose type does not tell that a mesh splits these axes.

  Args:
    x: An array.
    axes: Axes of the array, ``None`` for all.
  """
  sharding = jax.typeof(x).sharding
  spec = list(sharding.spec)
  for axis in range(len(spec)) if axes is None else axes:
    spec[axis] = None
  if tuple(spec) == tuple(sharding.spec):
    return x
  # A spec alone would need the mesh of jax.set_mesh.
  place = jax.sharding.NamedSharding(sharding.mesh, PartitionSpec(*spec))
  found: jax.Array = jax.sharding.reshard(x, place)
  return found


def sharded_as(like: jax.Array, x: jax.Array) -> jax.Array:
  """Returns an array split over a mesh as another of its shape is."""
  sharding = jax.typeof(like).sharding
  if not any(sharding.spec):
    return x
  found: jax.Array = jax.sharding.reshard(x, sharding)
  return found
