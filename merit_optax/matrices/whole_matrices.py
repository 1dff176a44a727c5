"""Functions of matrices that need each of them whole, on any mesh."""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any, NamedTuple, TypeAlias
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

from merit_optax._internal.sharding import placed_like
from merit_optax.matrices.dimension_numbers import MatrixAxes

MeshAxes: TypeAlias = str | Sequence[str] | None
FROM_MESH = 'auto'
# Elements of a matrix from which one device is not expected to hold it whole:
# 1 GiB in float32, and some copies of it.
_LARGEST_WHOLE = 2**28
# Names by which parameters are split, on meshes whose arrays do not tell.
_USUAL_AXES = ('fsdp', 'tensor')
_ANY = P.UNCONSTRAINED


class Spread(NamedTuple):
  """How whole matrices are spread over devices.

  Attributes:
    mesh: Mesh, or ``None`` for one device.
    names: Axes of the mesh over which whole matrices are spread, or none: the
      compiler splits products.
    is_ordered: Whether matrices are to move over these axes in this order.
  """

  mesh: Any
  names: tuple[str, ...]
  is_ordered: bool = True


def check_mesh_axes(mesh_axes: Any) -> tuple[str, ...] | str:
  """Returns names of axes as a tuple, and the default as it is.

  Raises:
    ValueError: If it is neither a name, nor a sequence of different names, nor
      ``None``.
  """
  if isinstance(mesh_axes, str) and mesh_axes == FROM_MESH:
    return FROM_MESH
  if mesh_axes is None:
    return ()
  names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
  if (
    not isinstance(names, Sequence)
    or not all(isinstance(name, str) for name in names)
    or len({*names}) < len(names)
  ):
    raise ValueError(
      "mesh_axes must be 'auto', None, the name of an axis of the mesh or a "
      f'sequence of different names, got {mesh_axes!r}.'
    )
  return tuple(names)


def map_matrices(
  function: Callable[..., jax.Array],
  updates: Any,
  axes: Any,
  mesh_axes: tuple[str, ...] | str,
  like: Any,
  *args: jax.Array,
) -> Any:
  """Applies a function to stacks of whole matrices.

  All matrices of one shape and dtype form a stack, whatever parameter they
  belong to; one with more rows than columns is transposed. On a mesh, each
  device gets some of them whole, so that what it computes does not depend on
  the mesh.

  Args:
    function: Function from a stack, shape (n, r, c) with r <= c, and ``args``
      to one of the same shape and dtype. A matrix that is all zero is added
      where the number of devices does not divide n.
    updates: Tree of arrays.
    axes: Tree of :class:`MatrixAxes`, of the same structure. Without rows, an
      array is a matrix of one row.
    mesh_axes: What :func:`check_mesh_axes` returns.
    like: Tree of arrays that lie on the mesh as the results should.
    *args: Arrays that every device gets.

  Returns:
    Tree like ``updates``.
  """
  spread = spread_of(jax.tree.leaves(updates), mesh_axes)
  if spread.names:
    updates = jax.tree.map(placed_like, updates, like)
  # Matrices side by side are arrays of their own.
  parts = jax.tree.map(lambda x, a: a.split(x), updates, axes)
  axes_of_parts = jax.tree.map(
    lambda _, a, each: [a.single for _ in each], updates, axes, parts
  )
  mapped = _map_leaves(function, parts, axes_of_parts, spread, *args)
  found = jax.tree.map(lambda _, a, parts: a.join(parts), updates, axes, mapped)
  # Else nothing would tell the compiler, on Auto axes, where results belong.
  return jax.tree.map(placed_like, found, like) if spread.names else found


def _map_leaves(
  function: Callable[..., jax.Array],
  updates: Any,
  axes: Any,
  spread: Spread,
  *args: jax.Array,
) -> Any:
  """Applies a function to stacks of the matrices of all arrays."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(updates)
  leaf_axes = treedef.flatten_up_to(axes)
  # Empty arrays stay as they are.
  indices = [i for i, x in enumerate(leaves) if x.size]

  def apply(*arrays: jax.Array) -> list[jax.Array]:
    arrays, shared = arrays[: len(indices)], arrays[len(indices) :]
    which = [leaf_axes[i] for i in indices]
    # Explicit axes are Auto ones here.
    here = spread._replace(mesh=_mesh(arrays))
    return _map_stacks(function, arrays, which, here, shared)

  arrays = [leaves[i] for i in indices]
  mesh = spread.mesh
  explicit = [] if mesh is None else _axes(mesh, AxisType.Explicit)
  if explicit:
    arrays = [_on_mesh(x, mesh) for x in arrays]
    # Within, shardings are constraints, as on an Auto mesh.
    apply = jax.sharding.auto_axes(
      apply, axes=tuple(explicit), out_sharding=[_sharding(x) for x in arrays]
    )
  results = apply(*arrays, *args) if indices else []
  for i, result in zip(indices, results, strict=True):
    leaves[i] = result
  return treedef.unflatten(leaves)


def spread_of(
  arrays: Sequence[Any], mesh_axes: tuple[str, ...] | str
) -> Spread:
  """Returns the mesh of arrays, and its axes that whole matrices spread over.

  By default these are the axes that split one of the arrays, as far as their
  types tell (Explicit axes); else the axes 'fsdp' and 'tensor'; else that of a
  mesh that has but one.

  Raises:
    ValueError: If the mesh lacks an axis.

  Warns:
    UserWarning: If none of these is an axis of the mesh, of whatever size.
  """
  mesh = _mesh(arrays)
  if mesh is None:
    return Spread(None, ())
  free = [name for name in _free_axes(mesh) if mesh.shape[name] > 1]
  if mesh_axes != FROM_MESH:
    missing = [name for name in mesh_axes if name not in mesh.axis_names]
    if missing:
      raise ValueError(
        f'mesh_axes must name axes of the mesh {mesh.axis_names}, got '
        f'{missing}.'
      )
    return Spread(mesh, tuple(x for x in mesh_axes if x in free))
  splitting = {name for x in arrays for name in _splitting(_sharding(x).spec)}
  only = free if len(mesh.axis_names) == 1 else ()
  for names in (splitting, _USUAL_AXES, only):
    if found := tuple(name for name in free if name in names):
      return Spread(mesh, found, is_ordered=False)
  # If these axes have one device each, nothing splits matrices.
  if free and not {*_USUAL_AXES} & {*mesh.axis_names}:
    warnings.warn(
      f'Nothing says which axes of the mesh {dict(mesh.shape)} split matrices, '
      'so that the compiler splits their products, sends about 100 times as '
      'much, and the bits depend on the mesh. Name the axes by mesh_axes, or '
      'pass mesh_axes=None if that is what you want.',
      stacklevel=2,
    )
  return Spread(mesh, ())


def _free_axes(mesh: Any) -> list[str]:
  """Returns the axes of a mesh that are not within a ``jax.shard_map``."""
  return _axes(mesh, AxisType.Auto, AxisType.Explicit)


def _axes(mesh: Any, *kinds: AxisType) -> list[str]:
  """Returns the names of the axes of a mesh that have one of some types."""
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return [name for name, kind in types if kind in kinds]


def _on_mesh(x: jax.Array, mesh: Any) -> jax.Array:
  """Returns an array that is on a mesh, copied to all devices if it was not."""
  if getattr(_sharding(x), 'mesh', mesh).empty:
    x = jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, P()))
  return x


def how_multiplied(
  shape: tuple[int, ...], axes: MatrixAxes, spread: Spread
) -> str:
  """Returns where the products of a parameter's matrices are computed."""
  if spread.mesh is None or spread.mesh.size == 1:
    return 'on one device'
  size = math.prod(shape[axis] for axis in axes.rows + axes.columns)
  if not spread.names or size > _LARGEST_WHOLE:
    return 'left to the compiler'
  return f'whole, over {", ".join(spread.names)}'


def _mesh(arrays: Sequence[Any]) -> Any:
  """Returns the abstract mesh that arrays are on, or else the current one."""
  meshes = [getattr(_sharding(x), 'mesh', None) for x in arrays]
  meshes.append(jax.sharding.get_abstract_mesh())
  return next((x for x in meshes if x is not None and not x.empty), None)


def _sharding(x: Any) -> Any:
  return jax.typeof(x).sharding


def _splitting(spec: P) -> list[str]:
  """Returns the names of the axes in the spec of an array."""
  entries = [x if isinstance(x, tuple) else (x,) for x in spec]
  return [name for name in itertools.chain(*entries) if name]


def _map_stacks(
  function: Callable[..., jax.Array],
  arrays: Sequence[jax.Array],
  axes: Sequence[MatrixAxes],
  spread: Spread,
  args: Sequence[jax.Array],
) -> list[jax.Array]:
  """Stacks matrices, applies the function and takes the stacks apart."""
  stacks = [_to_stack(x, a) for x, a in zip(arrays, axes, strict=True)]
  groups: dict[Any, list[int]] = {}
  for i, stack in enumerate(stacks):
    groups.setdefault((stack.shape[1:], stack.dtype), []).append(i)
  results: dict[int, jax.Array] = {}
  for members in groups.values():
    joined = jnp.concatenate([stacks[i] for i in members])
    joined = _apply(function, joined, spread, args)
    sizes = itertools.accumulate(len(stacks[i]) for i in members)
    parts = jnp.split(joined, list(sizes)[:-1])
    results |= dict(zip(members, parts, strict=True))
  return [
    _from_stack(results[i], x, a)
    for i, (x, a) in enumerate(zip(arrays, axes, strict=True))
  ]


def _to_stack(x: jax.Array, axes: MatrixAxes) -> jax.Array:
  """Returns the matrices of an array, shape (n, r, c) with r <= c."""
  order, shape = _order_and_shape(x, axes)
  stack = x.transpose(order).reshape(shape)
  return stack.mT if shape[1] > shape[2] else stack


def _from_stack(stack: jax.Array, like: jax.Array, axes: MatrixAxes) -> Any:
  """Returns the matrices of an array in their places."""
  order, shape = _order_and_shape(like, axes)
  stack = stack.mT if shape[1] > shape[2] else stack
  array = stack.reshape([like.shape[axis] for axis in order])
  return array.transpose([order.index(axis) for axis in range(like.ndim)])


def _order_and_shape(
  x: jax.Array, axes: MatrixAxes
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
  """Returns the axes in the order batch, rows, columns, and their sizes."""
  named = axes.rows + axes.columns
  batch = tuple(axis for axis in range(x.ndim) if axis not in named)
  n, r, c = (
    math.prod(x.shape[axis] for axis in part)
    for part in (batch, axes.rows, axes.columns)
  )
  return batch + named, (n, r, c)


def _apply(
  function: Callable[..., jax.Array],
  stack: jax.Array,
  spread: Spread,
  args: Sequence[jax.Array],
) -> jax.Array:
  """Applies a function to a stack, on a mesh where its matrices are whole."""
  mesh, names, _ = spread
  if not names or math.prod(stack.shape[1:]) > _LARGEST_WHOLE:
    return function(stack, *args)
  count = math.prod(mesh.shape[name] for name in names)
  padded = jnp.pad(stack, ((0, -len(stack) % count), (0, 0), (0, 0)))
  moves = _moves(stack.shape, count, spread)
  for spec in moves:
    padded = _constrain(padded, mesh, spec)
  result = jax.shard_map(
    function,
    mesh=mesh,
    in_specs=(P(names), *(P() for _ in args)),
    out_specs=P(names),
    axis_names={*_free_axes(mesh)},
    check_vma=False,
  )(_constrain(padded, mesh, P(names)), *args)
  for spec in reversed(moves):
    result = _constrain(result, mesh, spec)
  return result[: len(stack)]


def _moves(shape: tuple[int, ...], count: int, spread: Spread) -> list[P]:
  """Returns the specs of a stack on its way to whole matrices on devices.

  Of each, the compiler makes an all-to-all. It would gather a stack that moves
  over two axes of the mesh at once, and over the major one of two that split
  one axis. Hence all of them split rows, or else columns, first.
  """
  names = spread.names
  axis = next((axis for axis in (1, 2) if shape[axis] % count == 0), None)
  if axis and len(names) > 1 and not spread.is_ordered:
    return [P(*[_ANY] * axis, names), P(names, _ANY, _ANY)]
  return [P(names[: i + 1], _ANY, _ANY) for i in range(len(names))]


def _constrain(x: jax.Array, mesh: Any, spec: P) -> jax.Array:
  sharding = jax.sharding.NamedSharding(mesh, spec)
  constrained: jax.Array = jax.lax.with_sharding_constraint(x, sharding)
  return constrained
