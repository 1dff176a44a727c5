"""Small arrays of all parameters joined into one, which a state holds."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def join(tree: Any) -> jax.Array:
  """Returns all arrays of a tree as one with a single axis, in float32.

  A state that holds it has one array besides the moments, as a counter, whose
  rank no parameter has to share and that needs no sharding of its own.
  """
  parts = [whole(x).ravel().astype(jnp.float32) for x in jax.tree.leaves(tree)]
  return jnp.concatenate(parts) if parts else jnp.zeros(0, jnp.float32)


def split(joined: jax.Array, like: Any) -> Any:
  """Returns the parts of a joined array in a tree of arrays like them."""
  leaves, structure = jax.tree.flatten(like)
  ends = list(itertools.accumulate(x.size for x in leaves))
  parts = jnp.split(joined, ends[:-1]) if leaves else []
  return jax.tree.unflatten(
    structure,
    [
      _sharded_as(x, part.reshape(x.shape).astype(x.dtype))
      for part, x in zip(parts, leaves, strict=True)
    ],
  )


def whole(x: jax.Array) -> jax.Array:
  """Returns an array whose type does not tell that a mesh splits it."""
  sharding = jax.typeof(x).sharding
  if not any(sharding.spec):
    return x
  # A spec alone would need the mesh of jax.set_mesh.
  everywhere = jax.sharding.NamedSharding(sharding.mesh, PartitionSpec())
  found: jax.Array = jax.sharding.reshard(x, everywhere)
  return found


def _sharded_as(like: jax.Array, x: jax.Array) -> jax.Array:
  sharding = jax.typeof(like).sharding
  if not any(sharding.spec):
    return x
  found: jax.Array = jax.sharding.reshard(x, sharding)
  return found
