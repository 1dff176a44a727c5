"""Where MERIT stands in the state of an optimizer, and what it says there."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal.trees import MISSING, nearest_entries

_NUM_PARTS = 5  # Of the chain that MERIT is.


class Found(NamedTuple):
  """The state of a chain with Adam in it.

  Attributes:
    adam: Its state of Adam.
    chain: States of all its parts.
    injected: State of the ``optax.inject_hyperparams`` around it, or ``None``.
  """

  adam: optax.ScaleByAdamState
  chain: tuple[Any, ...]
  injected: Any


def find_merit(state: Any) -> Found:
  """Returns the one chain with Adam; of several, the one as long as MERIT."""
  found = list(_chains(state))
  if len(found) > 1:
    found = [x for x in found if len(x.chain) == _NUM_PARTS] or found
  if len(found) != 1:
    raise ValueError(
      f'state must hold one optax.ScaleByAdamState, found {len(found)}. Of a '
      'partition with several MERIT parts, pass the state of one, such as '
      "state.inner_states['matrix']."
    )
  return found[0]


def settings_of_step(given: dict[str, Any], found: Found) -> dict[str, Any]:
  """Returns arguments of MERIT with the numbers that hold in this step."""
  rates = [x for x in found.chain if isinstance(x, optax.ScaleByScheduleState)]
  others = [
    x for x in found.chain if not isinstance(x, optax.ScaleByScheduleState)
  ]
  settings = given | {
    'learning_rate': _at(given['learning_rate'], rates, found.adam.count),
    'weight_decay': _at(
      given['weight_decay'],
      [x for x in others if not _is_adam(x) and _is_count(x)],
      found.adam.count,
    ),
  }
  if found.injected is None:
    return settings
  numbers = found.injected.hyperparams
  return settings | {
    # The state has a schedule's value of the step before.
    name: _at(given[name], (), found.injected.count)
    if callable(given[name])
    else jax.tree.leaves(numbers[name])[0]
    for name in numbers.keys() & given.keys()
  }


def leaves_with_moments(tree: Any, moments: Any) -> Any:
  """Returns a tree like the parameters, less those without a moment."""
  found, unknown = nearest_entries(moments, tree)
  if unknown:  # Trees of other types, or wrong.
    return tree
  leaves = [
    optax.MaskedNode() if moment is MISSING else leaf
    for leaf, moment in zip(jax.tree.leaves(tree), found, strict=True)
  ]
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _at(value: Any, states: Any, default: Any) -> Any:
  """Returns a number, or a schedule's value at the count in some states."""
  if not callable(value):
    return value
  return value((jax.tree.leaves(states) or jax.tree.leaves(default))[0])


def _is_count(state: Any) -> bool:
  """Returns whether a state is a count of steps and nothing else."""
  leaves = jax.tree.leaves(state)
  return len(leaves) == 1 and leaves[0].dtype == jnp.int32


def _chains(state: Any, injected: Any = None) -> Iterator[Found]:
  for node in jax.tree.leaves(
    state, is_leaf=lambda x: _is_injected(x) or _is_adam(x) or _is_chain(x)
  ):
    if _is_injected(node):
      yield from _chains(node.inner_state, node)
    elif _is_adam(node):
      yield Found(node, (node,), injected)
    elif _is_chain(node):
      for adam in filter(_is_adam, node):
        yield Found(adam, tuple(node), injected)


def _is_adam(x: Any) -> bool:
  return isinstance(x, optax.ScaleByAdamState)


def _is_chain(x: Any) -> bool:
  return isinstance(x, tuple) and any(map(_is_adam, x))


def _is_injected(x: Any) -> bool:
  return hasattr(x, 'hyperparams') and hasattr(x, 'inner_state')
