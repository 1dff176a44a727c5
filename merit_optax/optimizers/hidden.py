"""Which parameters are hidden matrices, and which are for another optimizer."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import re
from typing import Any, TypeAlias
import warnings

import jax
import optax

from merit_optax._internal.arguments import check_optimizer, check_patterns
from merit_optax._internal.readings import record
from merit_optax._internal.trees import (
  as_arrays,
  named_leaves,
  path_namer,
  path_names,
  with_update,
)
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
  matrix_axes,
)
from merit_optax.matrices.flax import specs_of_flax
from merit_optax.matrices.masks import broadcast_mask
from merit_optax.matrices.per_parameter import NO_PARAMS_MESSAGE
from merit_optax.optimizers.roles import Role, is_stack_of_vectors, roles

# Expressions, or booleans in a tree or from a function.
Hidden: TypeAlias = (
  str
  | re.Pattern[str]
  | Sequence[Any]
  | Mapping[Any, Any]
  | Callable[[Any], Any]
  | None
)


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
      with fewer than two axes, or an expression one that its name tells to be a
      bias or scale of stacked layers.

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
  return _check_and_choose(params, hidden, None)


def _check_and_choose(
  params: Any, hidden: Hidden, specs: WeightDimensionNumbers
) -> Any:
  """Returns :func:`hidden_matrices`, given also what their specs will be."""
  # Placeholders of optax.tree.map_params have no leaves.
  if not jax.tree.leaves(params):
    return params
  params = as_arrays(params)
  _check_matches(params, hidden)
  each_role = jax.tree.leaves(_roles(params, specs))
  if hidden is None:
    _warn_of_unknown(params, each_role)
  chosen = _chosen(params, hidden, specs)
  # A tree or a function of booleans is meant as it is.
  has_patterns = _patterns(hidden) is not None

  def is_vector(shape: tuple[int, ...], role: Role) -> bool:
    is_stack = has_patterns and is_stack_of_vectors(role, shape)
    return len(shape) < 2 or is_stack

  vectors = [
    f'{name} {param.shape}'
    for (name, param), role, is_hidden in zip(
      named_leaves(params), each_role, jax.tree.leaves(chosen), strict=True
    )
    if is_hidden and is_vector(param.shape, role)
  ]
  if vectors:
    raise ValueError(
      'hidden must choose parameters with two or more axes, and by expressions '
      'no biases or scales of stacked layers (a tree of booleans may), got '
      f'{", ".join(vectors)}.'
    )
  record('hidden', params, jax.tree.leaves(chosen))
  return chosen


def _roles(params: Any, specs: WeightDimensionNumbers) -> Any:
  """Returns the roles of parameters; what a spec calls a vector is one."""
  found = roles(params)
  if specs is None:
    return found
  each_role = jax.tree.leaves(found)
  matrices = [i for i, role in enumerate(each_role) if role == 'hidden']
  vectors = _vectors(params, matrices, specs)
  for i, role in enumerate(each_role):
    if role == 'unknown':
      with contextlib.suppress(ValueError):  # It may have no spec.
        vectors += _vectors(params, [i], specs)
  for i in vectors:
    each_role[i] = 'vector'
  return jax.tree.unflatten(jax.tree.structure(params), each_role)


def _vectors(
  params: Any, indices: list[int], specs: WeightDimensionNumbers
) -> list[int]:
  """Returns which of some parameters have a spec without rows."""
  masked = jax.tree.unflatten(
    jax.tree.structure(params),
    [
      x if i in indices else optax.MaskedNode()
      for i, x in enumerate(jax.tree.leaves(params))
    ],
  )
  axes = jax.tree.leaves(
    matrix_axes(specs, masked), is_leaf=lambda x: isinstance(x, MatrixAxes)
  )
  return [i for i, a in zip(indices, axes, strict=True) if not a.rows]


def _warn_of_unknown(params: Any, each_role: list[str]) -> None:
  """Warns of parameters whose role is not known."""
  unknown = ', '.join(
    f'{name} {param.shape}'
    for (name, param), role in zip(named_leaves(params), each_role, strict=True)
    if role == 'unknown'
  )
  if unknown:
    warnings.warn(
      'Names do not tell whether these parameters are hidden matrices, so they '
      f'are left to the other optimizer: {unknown}. If they are, pass '
      f'hidden={_expressions(params, each_role)}; '
      'merit_optax.describe(params, optimizer) shows the result.',
      stacklevel=2,
    )


def _expressions(params: Any, each_role: list[str]) -> list[str]:
  """Returns expressions for all that are, or may be, hidden matrices.

  Of more than eight, layers that differ in their numbers have one expression,
  unless it would be found in others too.
  """
  wanted: list[str] = []
  others: list[str] = []
  possible = {'hidden', 'unknown'} & {*each_role} or {'other'}
  for name, role in zip(path_names(params), each_role, strict=True):
    (wanted if role in possible else others).append(name)

  def expression(name: str) -> str:
    exact = f'^{re.escape(name)}$'
    numbered = re.sub('[0-9]+', '[0-9]+', exact)
    is_in_others = any(re.search(numbered, x) for x in others)
    return exact if len(wanted) <= 8 or is_in_others else numbered

  return [*dict.fromkeys(map(expression, wanted))]


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
  return _partition(optimizer, others, hidden, None, checks_biases=False)


def partition_beside_adam(
  optimizer: optax.GradientTransformation,
  others: optax.GradientTransformation | None,
  adam: optax.GradientTransformation,
  adam_learning_rate: optax.ScalarOrSchedule,
  hidden: Hidden,
  weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformationExtraArgs:
  """Returns the partition with ``others``, by default Adam at some rate.

  What dimension numbers call a vector is not hidden. Without them, ``init``
  compares the biases of hidden matrices with the axes that names tell.
  """
  if others is None:
    others = optax.chain(adam, optax.scale_by_learning_rate(adam_learning_rate))
  specs = weight_dimension_numbers
  return _partition(optimizer, others, hidden, specs, specs is None)


def _partition(
  optimizer: optax.GradientTransformation,
  others: optax.GradientTransformation,
  hidden: Hidden,
  specs: WeightDimensionNumbers,
  checks_biases: bool,
) -> optax.GradientTransformationExtraArgs:
  """Returns the partition, whose ``init`` may check biases beside matrices."""
  parts = {'hidden': optimizer, 'others': others}
  check_optimizer('optimizer', optimizer)
  check_optimizer('others', others)
  _patterns(hidden)  # Checks them.

  def init_fn(params: optax.Params) -> optax.OptState:
    params = as_arrays(params)
    chosen = _check_and_choose(params, hidden, specs)
    if jax.tree.leaves(chosen) and not any(jax.tree.leaves(chosen)):
      raise ValueError(_none_is_hidden(params, hidden))
    if checks_biases:
      _check_biases(params, chosen)
    labels = _labels(chosen)
    return optax.partition(parts, lambda _: labels).init(params)

  both = optax.partition(parts, lambda x: _labels(_chosen(x, hidden, specs)))

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


def _labels(chosen: Any) -> Any:
  return jax.tree.map(lambda x: 'hidden' if x else 'others', chosen)


def _none_is_hidden(params: Any, hidden: Hidden) -> str:
  """Returns the message if no parameter is chosen."""
  example = _expressions(params, jax.tree.leaves(roles(params)))
  if hidden is None and example:
    return (
      "No parameter's name tells that it is a hidden matrix. Pass "
      f'hidden={example}, without those of first and last layers.'
    )
  return (
    'hidden must choose at least one parameter with two or more axes, got '
    f'{hidden!r} for {", ".join(path_names(params))}.'
  )


def _check_biases(params: Any, chosen: Any) -> None:
  """Raises ``ValueError`` where the bias of a hidden matrix contradicts it."""
  name_of = path_namer(params)

  def is_bias(path: Any) -> bool:
    return name_of(path).split('/')[-1] == 'bias'

  hidden_dimension_numbers(
    jax.tree_util.tree_map_with_path(
      lambda path, x, is_hidden: (
        x if is_hidden or is_bias(path) else optax.MaskedNode()
      ),
      params,
      chosen,
    )
  )


def specs_or_names(weight_dimension_numbers: WeightDimensionNumbers) -> Any:
  """Returns the specs, or the function that takes them from names."""
  if weight_dimension_numbers is None:
    return hidden_dimension_numbers
  return weight_dimension_numbers


def hidden_dimension_numbers(params: Any) -> Any:
  """Returns the dimension numbers of hidden matrices; others are masked out.

  With two axes, these are rows and columns, whatever the name. With more they
  are the specs of :func:`flax_dimension_numbers`, or it raises ``ValueError``.
  """
  return specs_of_flax(params, {}, {}, are_matrices=True)


def _chosen(params: Any, hidden: Hidden, specs: WeightDimensionNumbers) -> Any:
  """Returns a tree of booleans with the structure of the parameters."""
  # Placeholders of optax.tree.map_params have no leaves.
  if not jax.tree.leaves(params):
    return params
  patterns = _patterns(hidden)
  if hidden is not None and patterns is None:
    try:
      return broadcast_mask('hidden', hidden, params)
    except ValueError as error:
      raise ValueError(
        f'{error} It may also be a regular expression, or a sequence of them.'
      ) from None
  if patterns is None:
    found = _roles(params, specs)
    return jax.tree.map(lambda role: role == 'hidden', found)
  found = [
    any(re.search(pattern, name) for pattern in patterns)
    for name, _ in named_leaves(params)
  ]
  return jax.tree.unflatten(jax.tree.structure(params), found)


def _check_matches(params: Any, hidden: Hidden) -> None:
  """Raises ``ValueError`` for an expression that is found in no path."""
  names = [name for name, _ in named_leaves(params)]
  for pattern in _patterns(hidden) or ():
    if not any(re.search(pattern, name) for name in names):
      raise ValueError(
        f'hidden must match parameters, got {pattern!r}, found in none of '
        f'{", ".join(names)}.'
      )


def _patterns(hidden: Any) -> list[Any] | None:
  """Returns regular expressions, or None for what is no such choice."""
  kinds = str, re.Pattern
  patterns = [hidden] if isinstance(hidden, kinds) else hidden
  is_list = isinstance(patterns, Sequence) and patterns
  if not is_list or not all(isinstance(x, kinds) for x in patterns):
    return None
  check_patterns('hidden', patterns)
  return [*patterns]
