"""Functions of matrices that need each of them whole, on any mesh.

Where it is known how arrays lie, devices exchange pieces of matrices by
all-to-alls, one along each axis of the mesh that splits rows or columns, until
each device has some matrices whole. Axes that split a stack of matrices (of
layers, experts), or that hold copies, send nothing.
"""

from collections.abc import Callable, Hashable, Sequence
import itertools
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from merit_optax.matrices.dimension_numbers import MatrixAxes
from merit_optax.matrices.shardings import (
  Layout,
  Shardings,
  layout_of,
  names_by_axis,
)

# Elements of matrices that are computed at once, since each takes some copies.
_MOST_AT_ONCE = 2**26

_Function: TypeAlias = Callable[..., jax.Array]


def map_matrices(
  function: _Function,
  updates: Any,
  axes: Any,
  shardings: Shardings,
  *args: jax.Array,
) -> Any:
  """Applies a function to stacks of whole matrices.

  Args:
    function: Function from a stack, shape (n, r, c) with r <= c, and ``args``
      to one of the same shape and dtype. Matrices that are all zero are added
      where the number of devices does not divide n.
    updates: Tree of arrays.
    axes: Tree of :class:`MatrixAxes`, of the same structure. Without rows, an
      array is a matrix of one row.
    shardings: How arrays lie on Auto axes of a mesh, as the user gave it.
    *args: Arrays that every device gets.

  Returns:
    Tree like ``updates``. Where it is known how arrays lie, results lie alike.
  """
  treedef: Any
  leaves, treedef = jax.tree.flatten(updates)
  each_axes = treedef.flatten_up_to(axes)
  layout = layout_of(updates, shardings)
  # Empty arrays stay as they are.
  indices = [i for i, x in enumerate(leaves) if x.size]
  arrays = [leaves[i] for i in indices]
  which = [each_axes[i] for i in indices]
  if layout.specs is not None:
    specs = [layout.specs[i] for i in indices]
    results = _by_exchange(function, arrays, which, specs, layout, args)
  elif layout.names:
    results = _by_constraint(function, arrays, which, layout, args)
  else:
    whole = [P()] * len(arrays)
    results = _exchange(function, arrays, which, whole, {}, args)
  for i, result in zip(indices, results, strict=True):
    leaves[i] = result
  return treedef.unflatten(leaves)


def where_multiplied(params: Any, axes: Any, shardings: Shardings) -> list[str]:
  """Returns where the products of each parameter's matrices are computed."""
  layout = layout_of(params, shardings)
  treedef: Any = jax.tree.structure(params)
  each_axes = treedef.flatten_up_to(axes)
  if layout.mesh is None:
    return ['on one device'] * len(each_axes)
  if layout.specs is None:
    where = 'left to the compiler'
    if layout.names:
      where = f'whole, over {", ".join(layout.names)}, moved by the compiler'
    return [where] * len(each_axes)

  def where_of(x: Any, axes: MatrixAxes, spec: P) -> str:
    by_axis = names_by_axis(spec, x.ndim)
    moved = [n for axis in axes.rows + axes.columns for n in by_axis[axis]]
    return f'whole, over {", ".join(moved)}' if moved else 'whole already'

  return [
    where_of(*each)
    for each in zip(
      jax.tree.leaves(params), each_axes, layout.specs, strict=True
    )
  ]


def _by_exchange(
  function: _Function,
  arrays: Sequence[jax.Array],
  axes: Sequence[MatrixAxes],
  specs: Sequence[P],
  layout: Layout,
  args: Sequence[jax.Array],
) -> list[jax.Array]:
  """Maps arrays whose specs are known."""
  mesh = layout.mesh

  def run(blocks: list[jax.Array], *args: jax.Array) -> list[jax.Array]:
    return _exchange(function, blocks, axes, specs, mesh.shape, args)

  return _on_devices(run, mesh, layout.names)(
    [*specs], [_on_mesh(x, mesh) for x in arrays], args
  )


def _by_constraint(
  function: _Function,
  arrays: Sequence[jax.Array],
  axes: Sequence[MatrixAxes],
  layout: Layout,
  args: Sequence[jax.Array],
) -> list[jax.Array]:
  """Maps arrays that lie in some way: the compiler brings stacks to devices."""
  mesh, _, names = layout
  count = math.prod(mesh.shape[name] for name in names)

  def run(blocks: list[jax.Array], *args: jax.Array) -> list[jax.Array]:
    return [_in_pieces(function, x, args) for x in blocks]

  def apply(stack: jax.Array, _: Hashable) -> jax.Array:
    padded = _padded(stack, count)
    mapped = _on_devices(run, mesh, names)([P(names)], [padded], args)
    return mapped[0][: len(stack)]

  parts = [a.split(x) for x, a in zip(arrays, axes, strict=True)]
  flat = [(x, a) for xs, a in zip(parts, axes, strict=True) for x in xs]
  ways = [_way(x.shape, a.single, P()) for x, a in flat]
  stacks = [
    _to_stack(x, way).reshape(-1, *way.sizes)
    for (x, _), way in zip(flat, ways, strict=True)
  ]
  found = iter(_joined(stacks, [way.sizes for way in ways], apply))
  placed = iter(zip(flat, ways, strict=True))
  return [
    a.join(
      [
        _from_stack(next(found), x.shape, way)
        for (x, _), way in itertools.islice(placed, len(xs))
      ]
    )
    for xs, a in zip(parts, axes, strict=True)
  ]


class _Way(NamedTuple):
  """How the blocks of an array become whole matrices.

  Attributes:
    order: Axes of the array in the order batch, rows, columns; or batch,
      columns, rows, so that matrices are wide.
    num_batch: Number of batch axes.
    moves: For each axis of the mesh that splits rows or columns, or several
      that split one of them: their names and the axis of the stack.
    sizes: Rows and columns of the whole matrices, in this order.
    parts: Sizes of matrices side by side.
  """

  order: tuple[int, ...]
  num_batch: int
  moves: tuple[tuple[tuple[str, ...], int], ...]
  sizes: tuple[int, int]
  parts: tuple[int, ...] = ()


def _way(shape: Sequence[int], axes: MatrixAxes, spec: P) -> _Way:
  """Returns the way of an array with a shape, of all its blocks together."""
  split = names_by_axis(spec, len(shape))
  named = axes.rows + axes.columns
  batch = tuple(axis for axis in range(len(shape)) if axis not in named)
  first, second = axes.rows, axes.columns

  def size(part: tuple[int, ...]) -> int:
    return math.prod(shape[axis] for axis in part)

  def length(part: tuple[int, ...]) -> tuple[int, list[tuple[str, ...]]]:
    return size(part), [split[axis] for axis in part]

  # Of equal sizes too, so that matrices that lie transposed move as one stack.
  if not axes.parts and length(first) > length(second):
    first, second = second, first
  moves = tuple(
    (split[axis], i) for i, axis in enumerate(first + second, 1) if split[axis]
  )
  sizes = size(first), size(second)
  return _Way(batch + first + second, len(batch), moves, sizes, axes.parts)


def _to_stack(x: jax.Array, way: _Way) -> jax.Array:
  """Returns an array, or a block of one, with a single batch axis in front."""
  x = x.transpose(way.order)
  return x.reshape(-1, *x.shape[way.num_batch :])


def _from_stack(stack: jax.Array, shape: Sequence[int], way: _Way) -> jax.Array:
  array = stack.reshape([shape[axis] for axis in way.order])
  return array.transpose([way.order.index(i) for i in range(len(shape))])


def _exchange(
  function: _Function,
  blocks: Sequence[jax.Array],
  axes: Sequence[MatrixAxes],
  specs: Sequence[P],
  mesh_shape: Any,
  args: Sequence[jax.Array],
) -> list[jax.Array]:
  """Maps the blocks that a device has of all arrays."""
  ways = []
  for x, a, spec in zip(blocks, axes, specs, strict=True):
    counts = [
      math.prod(mesh_shape[name] for name in names)
      for names in names_by_axis(spec, x.ndim)
    ]
    shape = [size * n for size, n in zip(x.shape, counts, strict=True)]
    ways.append(_way(shape, a, spec))
  stacks = [_to_stack(x, way) for x, way in zip(blocks, ways, strict=True)]

  def apply(stack: jax.Array, key: tuple[Any, ...]) -> jax.Array:
    moves, sizes, parts = key
    x, lengths = stack, []
    for names, axis in moves:
      lengths.append(len(x))
      x = _padded(x, math.prod(mesh_shape[name] for name in names))
      x = _all_to_all(x, names, 0, axis)
    x = _map_parts(function, x, sizes, parts, args)
    for names, axis in reversed(moves):
      x = _all_to_all(x, names, axis, 0)[: lengths.pop()]
    return x

  found = _joined(stacks, [way[2:] for way in ways], apply)
  return [
    _from_stack(y, x.shape, way)
    for x, y, way in zip(blocks, found, ways, strict=True)
  ]


def _all_to_all(
  x: jax.Array, names: tuple[str, ...], split_axis: int, concat_axis: int
) -> jax.Array:
  """Sends pieces along one axis, and joins what comes along another."""
  # Else XLA on CPU may see that pieces are arrays with different layouts, and
  # refuses them.
  x = jax.lax.optimization_barrier(x)
  found: jax.Array = jax.lax.all_to_all(
    x, names, split_axis, concat_axis, tiled=True
  )
  return found


def _map_parts(
  function: _Function,
  stack: jax.Array,
  sizes: tuple[int, int],
  parts: tuple[int, ...],
  args: Sequence[jax.Array],
) -> jax.Array:
  """Maps whole matrices, or those that lie side by side in them."""
  fused = MatrixAxes((), (stack.ndim - 1,), parts)
  found = []
  for part in fused.split(stack):
    rows = sizes[0]
    x = part.reshape(len(part), rows, part[0].size // rows)
    is_tall = x.shape[1] > x.shape[2]
    x = _in_pieces(function, x.mT if is_tall else x, args)
    found.append((x.mT if is_tall else x).reshape(part.shape))
  return fused.join(found)


def _joined(
  stacks: Sequence[jax.Array],
  keys: Sequence[Hashable],
  apply: Callable[[jax.Array, Any], jax.Array],
) -> list[jax.Array]:
  """Applies a function to stacks of one key and shape together.

  So they are padded less, and the compiler sees fewer products.
  """
  groups: dict[Hashable, list[int]] = {}
  for i, (x, key) in enumerate(zip(stacks, keys, strict=True)):
    groups.setdefault((key, x.shape[1:], x.dtype), []).append(i)
  found: dict[int, jax.Array] = {}
  for members in groups.values():
    joined = apply(
      jnp.concatenate([stacks[i] for i in members]), keys[members[0]]
    )
    ends = itertools.accumulate(len(stacks[i]) for i in members)
    parts = jnp.split(joined, list(ends)[:-1])
    found |= dict(zip(members, parts, strict=True))
  return [found[i] for i in range(len(stacks))]


def _in_pieces(
  function: _Function, stack: jax.Array, args: Sequence[jax.Array]
) -> jax.Array:
  """Applies a function to as many matrices at once as pays."""
  n, r, c = stack.shape
  most = max(1, _MOST_AT_ONCE // (r * c))
  size = next(k for k in range(min(n, most), 0, -1) if n % k == 0)
  if size == n:
    whole: jax.Array = function(stack, *args)
    return whole
  pieces = stack.reshape(n // size, size, r, c)
  found: jax.Array = jax.lax.map(lambda x: function(x, *args), pieces)
  return found.reshape(stack.shape)


def _padded(stack: jax.Array, count: int) -> jax.Array:
  """Returns a stack with zeros, so that ``count`` divides its length."""
  return jnp.pad(
    stack, ((0, -len(stack) % count), *[(0, 0)] * (stack.ndim - 1))
  )


def _on_devices(
  run: Callable[..., list[jax.Array]], mesh: Any, names: Sequence[str]
) -> Callable[..., list[jax.Array]]:
  """Returns a function that each device runs on its blocks of arrays."""

  def mapped(
    specs: list[P], arrays: list[jax.Array], args: Sequence[jax.Array]
  ) -> list[jax.Array]:
    on_devices = jax.shard_map(
      run,
      mesh=mesh,
      in_specs=(specs, *(P() for _ in args)),
      out_specs=specs,
      axis_names={*names},
      check_vma=False,
    )
    found: list[jax.Array] = on_devices(arrays, *args)
    return found

  return mapped


def _on_mesh(x: jax.Array, mesh: Any) -> jax.Array:
  """Returns an array that is on a mesh, copied to all devices if it was not."""
  if getattr(jax.typeof(x).sharding, 'mesh', mesh).empty:
    x = jax.sharding.reshard(x, NamedSharding(mesh, P()))
  return x
