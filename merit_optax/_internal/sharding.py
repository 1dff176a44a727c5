"""Shardings of arrays on meshes."""

from collections.abc import Iterable
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

try:
  from jax.experimental.shard_alike import shard_alike
  from jax.experimental.xla_metadata import set_xla_metadata
except ImportError:  # Gone in jax 0.12.
  shard_alike = None  # type: ignore[assignment]


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


_numbers = itertools.count()


def placed_like(x: jax.Array, like: jax.Array) -> jax.Array:
  """Returns an array that a mesh with Auto axes splits as it does another."""
  if shard_alike is None:
    # Operands of an element-wise choice lie alike. The barrier keeps the
    # compiler from seeing that it is always the second one. On two mesh axes
    # that split columns, moves may gather more than with shard_alike.
    never = jax.lax.optimization_barrier(jnp.zeros((), bool))
    return jnp.where(never, like.astype(x.dtype), x)
  # Without it, jax 0.10 lowers all calls with one shape to the same group, and
  # the compiler splits all of their arrays alike.
  with set_xla_metadata(shard_group=next(_numbers)):
    found: jax.Array = shard_alike(x, like)[0]
  return found
