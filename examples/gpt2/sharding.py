"""The device mesh, and how parameters, moments and batches lie on it.

The mesh has three axes: 'data' (copies of the model), 'fsdp' (parameters and
batch are split) and 'tensor' (heads, hidden features and vocabulary are split).
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec as P,
)
import numpy as np

from examples.gpt2.command import UsageError

AXES = ('data', 'fsdp', 'tensor')
BATCH_AXES = ('data', 'fsdp')

_ACTIVATIONS = {
  'features': P(BATCH_AXES),
  'heads': P(BATCH_AXES, None, 'tensor'),
  'vocabulary': P('tensor'),
  'vocabulary_by_shard': P(BATCH_AXES, None, 'tensor'),
}

# By the last two names of a parameter's path, without the axis of layers; all
# others are replicated.
_PARAMETERS = {
  # Not over width, where XLA gathers all features to bring them to the batch.
  'token_embedding.embedding': P(('tensor', 'fsdp')),
  'position_embedding.embedding': P(None, 'fsdp'),
  'qkv.kernel': P('fsdp', 'tensor'),
  'qkv.bias': P('tensor'),
  'out.kernel': P('tensor', 'fsdp'),
  'gate.kernel': P('fsdp', 'tensor'),
  'up.kernel': P('fsdp', 'tensor'),
  'up.bias': P('tensor'),
  'down.kernel': P('tensor', 'fsdp'),
  'head.kernel': P('fsdp', 'tensor'),
}


def make_mesh(text: str, devices: list[jax.Device] | None = None) -> Mesh:
  """Makes the device mesh from sizes of axes, such as ``'fsdp=4,tensor=2'``.

  The data axis takes the devices that are left, unless it is given too; other
  axes have size 1. Raises ``UsageError`` if the text is malformed or does not
  fit the devices.
  """
  devices = devices or jax.devices()
  sizes = _parse(text)
  fixed = math.prod(sizes.values())
  if 'data' not in sizes and len(devices) % fixed == 0:
    sizes['data'] = len(devices) // fixed
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  if math.prod(shape) != len(devices):
    raise UsageError(
      f'--mesh {text}: the product of its axes, {math.prod(shape)}, must be '
      f'the number of devices, {len(devices)}'
      + ('.' if 'data' in sizes else ', or divide it.')
    )
  return jax.make_mesh(
    shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
  )


def _parse(text: str) -> dict[str, int]:
  """Returns the axis sizes in text such as 'fsdp=4,tensor=2'."""
  sizes: dict[str, int] = {}
  for item in filter(None, text.replace(' ', '').split(',')):
    found = re.fullmatch(rf'({"|".join(AXES)})=([1-9]\d*)', item)
    if not found or found[1] in sizes:
      raise UsageError(
        f'--mesh {text}: expected axes out of {AXES}, each once and with a '
        f'size of at least 1, such as "fsdp=4,tensor=2", got {item!r}.'
      )
    sizes[found[1]] = int(found[2])
  return sizes


def parameter_shardings(mesh: Mesh | AbstractMesh, params: Any) -> Any:
  """Returns the sharding of each parameter, or shape of one.

  Raises ``UsageError`` if an axis does not divide a parameter's dimension.
  """

  def sharding(
    path: tuple[Any, ...], param: jax.ShapeDtypeStruct
  ) -> NamedSharding:
    name, spec = path_name(path), _parameter_spec(path)
    for size, axes in zip(param.shape, spec, strict=False):
      names = [axes] if isinstance(axes, str) else axes or ()
      parts = math.prod(mesh.shape[axis] for axis in names)
      if size % parts:
        raise UsageError(
          f'{" * ".join(names)} = {parts} of --mesh must divide {size}, a '
          f'dimension of the parameter {name} of shape {param.shape}.'
        )
    return NamedSharding(mesh, spec)

  return jax.tree.map_with_path(sharding, params)


def parameter_specs(params: Any) -> Any:
  """Returns how parameters lie on the mesh; some may be left out."""
  return jax.tree.map_with_path(lambda path, _: _parameter_spec(path), params)


def _parameter_spec(path: tuple[Any, ...]) -> P:
  *rest, module, name = ('', *path_name(path).split('.'))
  spec = _PARAMETERS.get(f'{module}.{name}', P())
  return P(None, *spec) if 'blocks' in rest else spec


def num_batch_shards(mesh: Mesh | AbstractMesh) -> int:
  """Returns the number of parts that a micro-batch is split into."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def num_current_batch_shards() -> int:
  """Returns :func:`num_batch_shards` of the current mesh, and 1 without one."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else num_batch_shards(mesh)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of what every device holds."""
  return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of micro-batches, (micro-batches, sequences, T)."""
  return NamedSharding(mesh, P(None, BATCH_AXES))


def constrain(x: jax.Array, kind: str = 'features') -> jax.Array:
  """Pins an activation to the mesh; without a mesh, returns it as it is."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, _ACTIVATIONS[kind])


def has_fsdp() -> bool:
  """Whether the current mesh splits parameters by the batch's shards."""
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.empty and mesh.shape['fsdp'] > 1


def gather_parameters(params: Any, dtype: jnp.dtype) -> Any:
  """Gathers the parameters of a layer that lie on the fsdp axis, in a dtype.

  Their gradients are summed over the batch in that dtype, then scattered. Left
  to itself, the compiler for TPU sends the shards of large products round a
  ring, and reads and writes activations as often as there are shards. Without
  such an axis, returns them as they are.
  """
  if not has_fsdp():
    return params

  def gather(path: tuple[Any, ...], param: jax.Array) -> jax.Array:
    spec = _parameter_spec(path)
    return _replicate(param.astype(dtype), spec) if 'fsdp' in spec else param

  return jax.tree.map_with_path(gather, params)


def _replicate(shard: jax.Array, spec: P) -> jax.Array:
  whole = P(*(None if axis == 'fsdp' else axis for axis in spec))
  shard = jax.lax.with_sharding_constraint(shard, spec)
  return jax.lax.with_sharding_constraint(shard, whole)


def path_name(path: tuple[Any, ...]) -> str:
  """Returns the path of a parameter, such as 'blocks.mlp.up.kernel'."""
  return jax.tree_util.keystr(path, simple=True, separator='.')


def by_path(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by path, in the order of the tree."""
  return {path_name(p): x for p, x in jax.tree.leaves_with_path(tree)}


def to_host(x: jax.Array) -> np.ndarray | None:
  """Brings a sharded parameter to process 0; all processes must call it.

  Others get None. A parameter of stacked layers comes layer by layer, so that
  no device holds more than one of them whole.
  """
  if x.is_fully_addressable or x.is_fully_replicated:
    return np.asarray(x)
  sharding: Any = x.sharding
  is_stacked = x.ndim > 1 and sharding.spec[0] is None
  stack = x if is_stacked else x[None]
  take = jax.jit(
    lambda stack, i: stack[i], out_shardings=replicated(sharding.mesh)
  )
  whole = np.empty(stack.shape, x.dtype) if jax.process_index() == 0 else None
  for i in range(len(stack)):
    row = take(stack, i)
    if whole is not None:
      whole[i] = row
  return whole if whole is None or is_stacked else whole[0]
