"""Small arrays of all parameters joined into one, which a state holds."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp


def join(tree: Any) -> jax.Array:
  """Returns all arrays of a tree as one with a single axis, in float32.

  A state that holds it has one array besides the moments, as a counter, whose
  rank no parameter has to share and that needs no sharding of its own.
  """
  parts = [_whole(x).ravel().astype(jnp.float32) for x in jax.tree.leaves(tree)]
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


def _whole(x: jax.Array) -> jax.Array:
  return _reshard(x, jax.sharding.PartitionSpec()) if _is_split(x) else x


def _sharded_as(like: jax.Array, x: jax.Array) -> jax.Array:
  return _reshard(x, jax.typeof(like).sharding.spec) if _is_split(like) else x


def _is_split(x: jax.Array) -> bool:
  """Returns whether the type of an array tells that a mesh splits it."""
  return any(jax.typeof(x).sharding.spec)


def _reshard(x: jax.Array, spec: jax.sharding.PartitionSpec) -> jax.Array:
  resharded: jax.Array = jax.sharding.reshard(x, spec)
  return resharded
