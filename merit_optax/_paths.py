"""Paths of parameters as text, and entries of prefix trees by path."""

import collections
from collections.abc import Callable, Container
from typing import Any, TypeAlias

import jax

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
    if _is_empty(leaf):  # Of what is masked out, there may be entries.
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


def is_function(x: Any, is_entry: Callable[[Any], bool]) -> bool:
  """Returns whether a value is a function from parameters to a prefix tree.

  A tree of entries may be callable too, if it has the type of an Equinox model.
  """
  if isinstance(x, jax.tree_util.Partial):
    return True
  leaves = jax.tree.leaves(x, is_leaf=is_entry)
  return callable(x) and not any(map(is_entry, leaves))
