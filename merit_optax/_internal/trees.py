"""Trees of parameters: paths as text, and what may be a leaf."""

import collections
from collections.abc import Callable, Container
import numbers
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

Path: TypeAlias = tuple[Any, ...]
IsLeaf: TypeAlias = Callable[[Any], bool] | None
MISSING = object()
_VALUE = jax.tree_util.GetAttrKey('value')


def path_keyer(
  tree: Any, is_leaf: IsLeaf = None
) -> Callable[[Path], tuple[str, ...]]:
  """Returns a function from the path of a leaf to the names along it.

  The names do not tell the types of containers, so that a dict fits parameters
  in an ``nnx.State``. A box around one array, such as an nnx variable or a
  Linen parameter with metadata, has the name of the parameter.
  """

  def ends(x: Any) -> bool:
    # What is masked out counts, or its only sibling would look like a box.
    return (is_leaf is not None and is_leaf(x)) or _is_empty(x)

  num_leaves = collections.Counter(
    path[:length]
    for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=ends)
    for length in range(len(path))
  )

  def keys(path: Path) -> tuple[str, ...]:
    is_box = path[-1:] == (_VALUE,) and num_leaves[path[:-1]] == 1
    named = path[:-1] if is_box and len(path) > 1 else path
    return _keys(named)

  return keys


def path_namer(tree: Any) -> Callable[[Path], str]:
  """Returns a function from the path of a leaf to text: 'blocks/0/kernel'."""
  keys = path_keyer(tree)
  return lambda path: '/'.join(keys(path))


def path_names(params: Any) -> list[str]:
  """Returns the paths of all parameters as text.

  Raises:
    ValueError: If two of them are written the same.
  """
  name = path_namer(params)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  names = [name(path) for path, _ in leaves]
  if len({*names}) < len(names):
    twice = sorted({name for name in names if names.count(name) > 1})
    raise ValueError(
      f'params must differ in their paths when written with /, got {twice} '
      'more than once.'
    )
  return names


def named_leaves(params: Any) -> list[tuple[str, Any]]:
  """Returns the path of each parameter as text, and the parameter.

  Raises:
    ValueError: If two paths are written the same.
  """
  return list(zip(path_names(params), jax.tree.leaves(params), strict=True))


def nearest_entries(
  prefix: Any, tree: Any, is_leaf: IsLeaf = None
) -> tuple[list[Any], list[str]]:
  """Returns the entry of a prefix tree at, or nearest above, each leaf.

  Args:
    prefix: Tree whose leaves stand for all that is below a path of that name.
    tree: Tree of leaves.
    is_leaf: What is a leaf of the prefix tree, though it looks like a tree.

  Returns:
    An entry for each leaf of the tree, ``MISSING`` if there is none; and the
    names of entries that are of nothing in the tree.
  """
  name_of = path_keyer(prefix, is_leaf)
  entries, boxed = {}, {}
  for path, entry in jax.tree_util.tree_leaves_with_path(
    prefix, is_leaf=is_leaf
  ):
    entries[_keys(path)] = entry
    boxed[name_of(path)] = _keys(path)
  found, used, empty = [], set(), set()
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=_is_empty
  ):
    key = _nearest(_keys(path), entries)
    # What is in a box there may be without one here.
    key = boxed.get(_keys(path)) if key is None else key
    used.add(key)
    if _is_empty(leaf):  # Entries may be given for what is masked out.
      empty.add(_keys(path))
    else:
      found.append(MISSING if key is None else entries[key])
  unused = [
    '/'.join(key)
    for key in entries
    if key not in used and _nearest(key, empty) is None
  ]
  return found, unused


def _is_empty(x: Any) -> bool:
  return not jax.tree.leaves(x)


def _keys(path: Path) -> tuple[str, ...]:
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _nearest(
  keys: tuple[str, ...], entries: Container[tuple[str, ...]]
) -> tuple[str, ...] | None:
  """Returns the longest beginning that is an entry, ``None`` if none is."""
  for length in range(len(keys), -1, -1):
    if keys[:length] in entries:
      return keys[:length]
  return None


def is_function(x: Any, params: Any) -> bool:
  """Returns whether a value is a function from parameters to a prefix tree.

  A prefix tree of an Equinox model is callable too, but has the model's type. A
  function may be a tree itself, whose leaves say nothing.
  """
  return callable(x) and type(x) is not type(params)


def as_arrays(tree: Any, argument: str = 'params') -> Any:
  """Returns parameters or updates, with numbers as arrays.

  Args:
    tree: The parameters or updates.
    argument: What errors call them.

  Raises:
    ValueError: If a leaf is neither an array of numbers (or its shape) nor a
      number, or has no floating-point or complex dtype of 16 bits or more.
  """
  name = path_namer(tree)

  def check(path: Any, x: Any) -> Any:
    is_array = hasattr(x, 'shape') and hasattr(x, 'dtype')
    # Random keys have a dtype of JAX's own.
    if not is_array or jnp.issubdtype(x.dtype, jax.dtypes.extended):
      raise ValueError(
        f'{argument} must hold arrays of numbers, got {x!r} as {name(path)!r}. '
        'Filter such leaves out first, of an Equinox model by '
        'eqx.filter(model, eqx.is_inexact_array).'
      )
    if not jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.itemsize < 2:
      # An array alone has no name: it may be the step count.
      hint = (
        'Use a copy in a wider dtype, or leave integers out by optax.masked.'
        if path
        else 'Under optax.inject_hyperparams, which calls functions with the '
        "step count, name 'weight_dimension_numbers' in static_args."
      )
      raise ValueError(
        f'{argument} must have floating-point or complex dtypes of 16 bits or '
        f'more, got {x.dtype} for {name(path)!r}. {hint}'
      )
    return x

  return jax.tree_util.tree_map_with_path(check, numbers_as_arrays(tree))


def numbers_as_arrays(tree: Any) -> Any:
  """Returns a tree with numbers as arrays, and other leaves as they are."""

  def as_array(x: Any) -> Any:
    is_number = isinstance(x, numbers.Number)
    return jnp.asarray(x, jnp.result_type(x)) if is_number else x

  return jax.tree.map(as_array, tree)


def with_update(params: Any, updates: Any) -> Any:
  """Returns parameters as arrays, less those that have no update.

  A function that is a leaf of a model has none, for example.

  Args:
    params: The parameters.
    updates: Arrays, and what stands for those that are left out.

  Raises:
    ValueError: As ``as_arrays`` does, and if an update has another shape than
      its parameter.
  """
  params = as_arrays(
    jax.tree.map(
      lambda update, param: update if is_absent(update) else param,
      updates,
      params,
      is_leaf=is_absent,
    )
  )
  check_shapes(params, updates)
  return params


def check_shapes(params: Any, updates: Any) -> None:
  """Raises ``ValueError`` for an update of another shape than its parameter.

  Args:
    params: The parameters, or arrays of a state like them.
    updates: Arrays; other shapes would broadcast.
  """
  name = path_namer(params)

  def check(path: Any, param: Any, update: Any) -> None:
    if is_absent(update):
      raise ValueError(
        f'updates must hold an array for {name(path)!r}, which the state or '
        f'params have, got {update!r}.'
      )
    check_shape(name(path), param, update)

  jax.tree_util.tree_map_with_path(check, params, updates)


def check_shape(name: str, param: Any, update: Any) -> None:
  """Raises ``ValueError`` if an update has another shape than its parameter."""
  if jnp.shape(update) != param.shape:
    raise ValueError(
      f'updates must have the shapes of params, got {jnp.shape(update)} for '
      f'{name!r} of shape {param.shape}.'
    )


def is_absent(x: Any) -> bool:
  """Returns whether a parameter was left out, or masked out, of a tree."""
  return x is None or isinstance(x, optax.MaskedNode)
