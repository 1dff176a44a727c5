"""Which parameters are hidden matrices, and which are for another optimizer."""

from collections.abc import Callable, Sequence
import re
from typing import Any, TypeAlias
import warnings

import jax
import optax

from merit_optax._internal.trees import (
  as_arrays,
  named_leaves,
  path_namer,
  with_update,
)
from merit_optax.matrices.dimension_numbers import WeightDimensionNumbers
from merit_optax.matrices.flax import specs_of_flax
from merit_optax.matrices.masks import broadcast_mask
from merit_optax.matrices.per_parameter import NO_PARAMS_MESSAGE
from merit_optax.matrices.roles import roles

Hidden: TypeAlias = str | Sequence[str] | Any | Callable[[Any], Any] | None


def hidden_matrices(params: Any, hidden: Hidden = None) -> Any:
  """Returns which parameters are hidden matrices.

  By default these are the kernels of attentions, recurrent layers, MLPs and
  experts, where names and shapes leave no doubt. Embeddings, heads, routers,
  tables of positions, tokens, convolutions, and biases and scales (of stacked
  layers too) are not. A parameter with two or more axes whose name says nothing
  is not either: a warning names it, since a wrong guess would cost a run.

  Args:
    params: Tree of arrays, or of their shapes.
    hidden: Another choice: a regular expression, or a sequence of them, of
      which one is found in the path of a hidden matrix
      (``'blocks/.*kernel'``); a tree of booleans like the parameters or a
      prefix of it; or a function from parameters to one.

  Returns:
    Tree of booleans with the structure of ``params``. A function of it can say
    which part of an :func:`optax.partition` updates a parameter.

  Raises:
    ValueError: If ``hidden`` is none of these or does not fit the parameters;
      if one of its expressions is found in no path; if it chooses a parameter
      with fewer than two axes.

  Warns:
    UserWarning: If ``hidden`` is ``None`` and names do not tell what a
      parameter is.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {
    ...     'embedding': jnp.zeros((50, 8)),
    ...     'mlp': {'up': {'kernel': jnp.ones((8, 32)), 'bias': jnp.ones(32)}},
    ... }
    >>> merit_optax.hidden_matrices(params)
    {'embedding': False, 'mlp': {'up': {'bias': False, 'kernel': True}}}
  """
  # Placeholders of optax.tree.map_params have no leaves.
  if not jax.tree.leaves(params):
    return params
  params = as_arrays(params)
  if hidden is None:
    _warn_of_unknown(params)
  _check_matches(params, hidden)
  chosen = _chosen(params, hidden)
  vectors = [
    f'{name} {param.shape}'
    for (name, param), is_hidden in zip(
      named_leaves(params), jax.tree.leaves(chosen), strict=True
    )
    if is_hidden and len(param.shape) < 2
  ]
  if vectors:
    raise ValueError(
      'hidden must choose parameters with two or more axes, got '
      f'{", ".join(vectors)}.'
    )
  return chosen


def _warn_of_unknown(params: Any) -> None:
  """Warns of parameters whose role is not known."""
  unknown = {
    name: param.shape
    for (name, param), role in zip(
      named_leaves(params), jax.tree.leaves(roles(params)), strict=True
    )
    if role == 'unknown'
  }
  if unknown:
    example = f'^{re.escape(next(iter(unknown)))}$'
    listed = ', '.join(f'{name} {shape}' for name, shape in unknown.items())
    warnings.warn(
      'Names do not tell whether these parameters are hidden matrices, so they '
      f'are left to the other optimizer: {listed}. Choose all hidden matrices '
      f'by expressions, such as hidden=[{example!r}]; '
      'merit_optax.describe(params, hidden=...) shows the result.',
      stacklevel=3,
    )


def check_hidden(hidden: Hidden) -> Hidden:
  """Returns the argument, whose regular expressions are checked."""
  try:
    for pattern in _patterns(hidden) or ():
      re.compile(pattern)
  except re.error as error:
    raise ValueError(
      f'hidden must hold regular expressions, got {hidden!r}: {error}.'
    ) from None
  return hidden


def partition_hidden(
  optimizer: optax.GradientTransformation,
  others: optax.GradientTransformation,
  *,
  hidden: Hidden = None,
) -> optax.GradientTransformationExtraArgs:
  """Updates hidden matrices with one optimizer, and all else with another.

  Args:
    optimizer: Optimizer of hidden matrices. It sees the other parameters masked
      out.
    others: Optimizer of all other parameters.
    hidden: Which parameters are hidden matrices, see
      :func:`merit_optax.hidden_matrices`; ``None`` for its default.

  Returns:
    The :func:`optax.partition` into ``'hidden'`` and ``'others'``, whose
    ``update`` needs ``params``.

  Raises:
    ValueError: If one of the two is no :class:`optax.GradientTransformation`;
      by ``init`` if ``hidden`` does not fit the parameters; by ``update`` if it
      is called without ``params``.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> import optax
    >>> optimizer = merit_optax.partition_hidden(
    ...     merit_optax.merit(0.02, weight_decay=0.01),
    ...     others=optax.adam(0.004),
    ... )
    >>> params = {
    ...     'embedding': jnp.ones((50, 8)),
    ...     'mlp': {'kernel': jnp.ones((8, 8)), 'bias': jnp.zeros(8)},
    ... }
    >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
    >>> print(f'{updates["embedding"][0, 0]:.3f}')
    -0.004
    >>> print(f'{updates["mlp"]["kernel"][0, 0]:.2f}')
    -0.02
  """
  for name, value in (('optimizer', optimizer), ('others', others)):
    if not isinstance(value, optax.GradientTransformation):
      raise ValueError(
        f'{name} must be an optax.GradientTransformation, got {value!r}.'
      )
  hidden = check_hidden(hidden)

  def labels(params: optax.Params) -> Any:
    return jax.tree.map(
      lambda is_hidden: 'hidden' if is_hidden else 'others',
      _chosen(params, hidden),
    )

  both = optax.partition({'hidden': optimizer, 'others': others}, labels)

  def init_fn(params: optax.Params) -> optax.OptState:
    params = as_arrays(params)
    is_hidden = jax.tree.leaves(hidden_matrices(params, hidden))
    if is_hidden and not any(is_hidden):
      names = ', '.join(name for name, _ in named_leaves(params))
      raise ValueError(
        f'hidden must choose at least one parameter, got {hidden!r}. By '
        'default, names have to tell, and here they tell of none. Give '
        f'expressions that are found in the paths of hidden matrices: {names}.'
      )
    return both.init(params)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    if params is None:
      raise ValueError(NO_PARAMS_MESSAGE)
    updates = as_arrays(updates, 'updates')
    # A partition takes no params with leaves that have no update.
    params = with_update(params, updates)
    updates, state = both.update(updates, state, params, **extra_args)
    return updates, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def with_others(
  optimizer: optax.GradientTransformation,
  others: optax.GradientTransformation | None,
  adam: optax.GradientTransformation,
  adam_learning_rate: optax.ScalarOrSchedule,
  hidden: Hidden,
  weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformationExtraArgs:
  """Returns the partition with ``others``, by default Adam at some rate.

  Without dimension numbers, ``init`` compares the biases of hidden matrices
  with the axes that names tell.
  """
  if others is None:
    others = optax.chain(adam, optax.scale_by_learning_rate(adam_learning_rate))
  both = partition_hidden(optimizer, others, hidden=hidden)

  def init_fn(params: optax.Params) -> optax.OptState:
    state = both.init(params)
    if weight_dimension_numbers is None:
      _check_biases(params, hidden)
    return state

  return optax.GradientTransformationExtraArgs(init_fn, both.update)


def _check_biases(params: Any, hidden: Hidden) -> None:
  """Raises ``ValueError`` where the bias of a hidden matrix contradicts it."""
  name_of = path_namer(params)
  hidden_dimension_numbers(
    jax.tree_util.tree_map_with_path(
      lambda path, x, is_hidden: (
        x if is_hidden or name_of(path).endswith('bias') else optax.MaskedNode()
      ),
      params,
      _chosen(params, hidden),
    )
  )


def hidden_dimension_numbers(params: Any) -> Any:
  """Returns the dimension numbers of hidden matrices; others are masked out.

  With two axes, these are rows and columns, whatever the name. With more they
  are the specs of :func:`flax_dimension_numbers`, or it raises ``ValueError``.
  """
  return specs_of_flax(params, {}, {}, are_matrices=True)


def _chosen(params: Any, hidden: Hidden) -> Any:
  """Returns a tree of booleans with the structure of the parameters."""
  # Placeholders of optax.tree.map_params have no leaves.
  if not jax.tree.leaves(params):
    return params
  patterns = _patterns(check_hidden(hidden))
  if hidden is not None and patterns is None:
    try:
      return broadcast_mask('hidden', hidden, params)
    except ValueError as error:
      raise ValueError(
        f'{error} It may also be a regular expression, or a sequence of them.'
      ) from None
  if patterns is None:
    return jax.tree.map(lambda role: role == 'hidden', roles(params))
  found = [
    any(re.search(pattern, name) for pattern in patterns)
    for name, _ in named_leaves(params)
  ]
  return jax.tree.unflatten(jax.tree.structure(params), found)


def _check_matches(params: Any, hidden: Hidden) -> None:
  """Raises ``ValueError`` for an expression that is found in no path."""
  names = [name for name, _ in named_leaves(params)]
  for pattern in _patterns(check_hidden(hidden)) or ():
    if not any(re.search(pattern, name) for name in names):
      raise ValueError(
        f'hidden must match parameters, got {pattern!r}, found in none of '
        f'{", ".join(names)}.'
      )


def _patterns(hidden: Any) -> list[str] | None:
  """Returns regular expressions, or None for what is no such choice."""
  if isinstance(hidden, str):
    return [hidden]
  if isinstance(hidden, Sequence) and hidden:
    patterns = list(hidden)
    return patterns if all(isinstance(x, str) for x in patterns) else None
  return None
