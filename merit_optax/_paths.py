"""Paths of parameters as text, and entries of prefix trees by path."""

import collections
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Path: TypeAlias = tuple[Any, ...]
_VALUE = jax.tree_util.GetAttrKey('value')


def path_namer(tree: Any) -> Callable[[Path], str]:
  """Returns a function from a path to a leaf to text: 'blocks/0/kernel'."""
  num_leaves = collections.Counter(
    path[:length]
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    for length in range(len(path))
  )

  def name(path: Path) -> str:
    # An nnx variable has the name of the parameter, and holds its value only.
    is_variable = path[-1:] == (_VALUE,) and num_leaves[path[:-1]] == 1
    return _join(path[:-1] if is_variable and len(path) > 1 else path)

  return name


def _join(path: Path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


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


def path_keys(path: Path) -> tuple[str, ...]:
  """Returns the names along a path, whatever the types of its containers."""
  # By name, so that a dict of specs fits parameters in an nnx.State.
  return tuple(_join((key,)) for key in path)


def find_nearest(
  tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Callable[[Path], Any]:
  """Returns a function from a path to the entry of a prefix tree above it."""
  entries = {
    path_keys(path): entry
    for path, entry in jax.tree_util.tree_leaves_with_path(
      tree, is_leaf=is_leaf
    )
  }

  def find(path: Path) -> Any:
    keys = path_keys(path)
    for length in range(len(keys), -1, -1):
      if keys[:length] in entries:
        return entries[keys[:length]]
    raise KeyError(_join(path))

  return find
