"""Where parameters lie on a mesh: what users say, and what types tell."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple, TypeAlias
import warnings

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from merit_optax._internal.trees import (
  MISSING,
  is_function,
  named_leaves,
  nearest_entries,
)

# A (prefix) tree of shardings or specs, or a function from parameters to one.
Shardings: TypeAlias = (
  jax.sharding.Sharding
  | P
  | Sequence[Any]
  | Mapping[Any, Any]
  | Callable[[Any], Any]
  | None
)
# Axes over which parameters are split on most meshes, where nothing tells.
_USUAL_AXES = ('fsdp', 'tensor')


class Layout(NamedTuple):
  """How arrays lie on a mesh.

  Attributes:
    mesh: Mesh, or ``None`` for one device.
    specs: Spec of each array; ``None`` if nothing tells them.
    names: Axes of the mesh over which a computation may be spread.
  """

  mesh: Any
  specs: list[P] | None
  names: tuple[str, ...]


def check_shardings(shardings: Any) -> None:
  """Raises ``ValueError`` for what can be no tree of shardings."""
  is_tree = not jax.tree_util.all_leaves([shardings])
  if not (is_tree or callable(shardings) or _is_entry(shardings)):
    raise ValueError(
      'shardings must be a tree of jax.sharding.PartitionSpec or NamedSharding '
      'like the parameters or a prefix of it, a function from parameters to '
      f'one, or None, got {shardings!r}.'
    )


def layout_of(arrays: Any, shardings: Shardings) -> Layout:
  """Returns how arrays lie on their mesh.

  Types tell it on Explicit axes, and ``shardings`` on Auto axes. The mesh is
  that of the arrays, or of ``jax.set_mesh``, or of ``shardings``.

  Args:
    arrays: Tree of arrays, or of their shapes.
    shardings: As the user gave them.

  Raises:
    ValueError: If an array has no sharding, or one that does not fit it or the
      mesh.
  """
  leaves = jax.tree.leaves(arrays)
  given = None if shardings is None else _given(arrays, shardings)
  mesh = _mesh(leaves, given)
  if mesh is None or mesh.size == 1:
    is_split = any(any(_spec(x)) for x in given or ())
    if mesh is None and is_split and jax.device_count() > 1:
      raise ValueError(
        'shardings name axes of a mesh, and there is none here. Use '
        'jax.set_mesh, or jax.sharding.NamedSharding instead of PartitionSpec.'
      )
    return Layout(None, None, ())
  explicit = _axes(mesh, AxisType.Explicit)
  automatic = _axes(mesh, AxisType.Auto)
  if explicit and (given is None or not automatic):
    specs = [P(*jax.typeof(x).sharding.spec) for x in leaves]
    return Layout(mesh, specs, explicit)
  free = explicit + automatic
  if given is None:
    usual = [x for x in free if x in _USUAL_AXES and mesh.shape[x] > 1]
    return Layout(mesh, None, tuple(usual))
  specs = [
    _checked_spec(name, x, _spec(entry), mesh, free)
    for (name, x), entry in zip(named_leaves(arrays), given, strict=True)
  ]
  return Layout(mesh, specs, free)


def names_by_axis(spec: P, ndim: int) -> list[tuple[str, ...]]:
  """Returns the axes of the mesh that split each axis of an array."""
  entries = [*spec, *[None] * (ndim - len(spec))]
  return [
    () if x is None else tuple(x) if isinstance(x, tuple) else (x,)
    for x in entries
  ]


def check_layout(params: Any, shardings: Shardings) -> None:
  """Checks shardings, as far as that needs no mesh.

  Raises:
    ValueError: If a parameter has none.

  Warns:
    UserWarning: If they are missing, and only they could tell of placed
      parameters.
  """
  if shardings is not None:
    _given(params, shardings)
    return
  for name, x in named_leaves(params):
    place = None if isinstance(x, jax.core.Tracer) else _place(x)
    if place is None:
      continue
    automatic = _axes(place.mesh, AxisType.Auto)
    split = [n for names in names_by_axis(place.spec, x.ndim) for n in names]
    if {*split} & {*automatic}:
      warnings.warn(
        f'The parameter {name!r} lies on a mesh with Auto axes as '
        f'{place.spec}, which a compiled update does not see. Pass shardings='
        'jax.tree.map(lambda x: x.sharding, params): matrices then take the '
        'shortest way to where they are multiplied.',
        stacklevel=2,
      )
      return


def _place(x: Any) -> NamedSharding | None:
  sharding = getattr(x, 'sharding', None)
  return sharding if isinstance(sharding, NamedSharding) else None


def _given(arrays: Any, shardings: Any) -> list[Any]:
  """Returns the sharding that the user gave for each array."""
  if is_function(shardings, arrays):
    shardings = shardings(arrays)
  entries, _ = nearest_entries(shardings, arrays, is_leaf=_is_entry)
  for (name, _), entry in zip(named_leaves(arrays), entries, strict=True):
    if entry is MISSING or not _is_entry(entry):
      raise ValueError(
        'shardings must hold a jax.sharding.PartitionSpec or NamedSharding for '
        f'{name!r}, got {"none" if entry is MISSING else repr(entry)}.'
      )
  return entries


def _is_entry(x: Any) -> bool:
  return x is None or isinstance(x, (P, jax.sharding.Sharding))


def _spec(entry: Any) -> P:
  """Returns a spec; arrays on one device are on a mesh copied to all."""
  if isinstance(entry, P):
    return entry
  return entry.spec if isinstance(entry, NamedSharding) else P()


def _mesh(leaves: Sequence[Any], given: Sequence[Any] | None) -> Any:
  """Returns the mesh of arrays, else the current one, else the given one."""
  meshes = [getattr(jax.typeof(x).sharding, 'mesh', None) for x in leaves]
  meshes.append(jax.sharding.get_abstract_mesh())
  meshes += [x.mesh for x in given or () if isinstance(x, NamedSharding)]
  return next((x for x in meshes if x is not None and not x.empty), None)


def _axes(mesh: Any, kind: AxisType) -> tuple[str, ...]:
  """Returns the names of the axes of a mesh that have a type."""
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return tuple(name for name, of_axis in types if of_axis == kind)


def _checked_spec(
  name: str, x: Any, spec: P, mesh: Any, free: Sequence[str]
) -> P:
  """Returns a spec without the axes that a ``jax.shard_map`` around has."""
  by_axis = names_by_axis(spec, x.ndim)
  missing = [n for names in by_axis for n in names if n not in mesh.axis_names]
  if missing:
    raise ValueError(
      f'shardings must name axes of the mesh {mesh.axis_names}, got {spec} '
      f'for {name!r}.'
    )
  by_axis = [tuple(n for n in names if n in free) for names in by_axis]
  counts = [math.prod(mesh.shape[n] for n in names) for names in by_axis]
  # A longer spec has more counts than the array has axes.
  fits = len(counts) == x.ndim and not any(
    size % count for size, count in zip(x.shape, counts, strict=True)
  )
  if not fits:
    raise ValueError(
      f'shardings must divide the axes of parameters, got {spec} for {name!r} '
      f'of shape {x.shape} on the mesh {dict(mesh.shape)}.'
    )
  return P(*[names or None for names in by_axis])
