"""Shardings of arrays on meshes."""

from collections.abc import Iterable

import jax
from jax.sharding import PartitionSpec


def unsplit(x: jax.Array, axes: Iterable[int] | None = None) -> jax.Array:
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
