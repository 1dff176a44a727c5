"""Which parameters are hidden matrices, and which are for another optimizer."""

from collections.abc import Callable, Sequence
import re
from typing import Any, TypeAlias

import jax
import optax

from merit_optax._internal.trees import (
  as_arrays,
  named_leaves,
  path_namer,
  path_names,
)
from merit_optax.matrices.dimension_numbers import (
  WeightDimensionNumbers,
  matrix_axes,
)
from merit_optax.matrices.flax import VECTORS, specs_of_flax
from merit_optax.matrices.masks import broadcast_mask

Hidden: TypeAlias = str | Sequence[str] | Any | Callable[[Any], Any] | None

# Of the names along a path: embeddings of tokens, positions and patches, and
# heads, but not the heads of an attention, such as multi_head_attention.
_INPUT_OR_OUTPUT = re.compile(
  r'[Ee]mb(ed|s?(_|$))|^(wte|wpe|patchify)$|^logit'
  r'|(^|_)(logits|classifier|(?<!multi_)(?<!attention_)(?<!attn_)head)(_|$)'
  # Linen's automatic names, such as LMHead_0.
  r'|(LM|Output|Classification)Head(_\d+)?$|^(Logits|Classifier)(_\d+)?$'
)

# The last name before that of the parameter.
_NORM = re.compile(r'([Nn]orm|(^|[/_])ln)[^/]*$')


def hidden_matrices(params: Any, hidden: Hidden = None) -> Any:
  """Returns which parameters are hidden matrices.

  By default these are all arrays with two or more axes but biases and scales
  (also those of stacked layers, and the ``weight`` of a norm), embeddings and
  heads. The latter are recognized by the names along their paths: names that
  contain ``embed`` or ``Embed``, or ``emb`` at their end or before an
  underscore, or begin with ``logit``; ``wte``, ``wpe`` and ``patchify``;
  ``head``, ``logits`` or ``classifier``, alone or as a part that an underscore
  sets apart, such as ``lm_head``, but not ``multi_head`` and
  ``attention_head``; and Linen's ``LMHead``, ``OutputHead``,
  ``ClassificationHead``, ``Logits`` and ``Classifier``, with a number or
  without, such as ``LMHead_0``.

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
      if it chooses a parameter with fewer than two axes, or none at all, though
      there are parameters; if the paths of two are written the same.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {
    ...     'embedding': jnp.zeros((50, 8)),
    ...     'layer': {'kernel': jnp.zeros((8, 8)), 'bias': jnp.zeros(8)},
    ... }
    >>> merit_optax.hidden_matrices(params)
    {'embedding': False, 'layer': {'bias': False, 'kernel': True}}
  """
  # Placeholders of optax.tree.map_params have no leaves.
  if not jax.tree.leaves(params):
    return params
  params = as_arrays(params)
  named = named_leaves(params)
  chosen = _chosen(params, hidden)
  are_hidden = jax.tree.leaves(chosen)
  vectors = [
    f'{name} {param.shape}'
    for (name, param), is_hidden in zip(named, are_hidden, strict=True)
    if is_hidden and len(param.shape) < 2
  ]
  if vectors:
    raise ValueError(
      'hidden must choose parameters with two or more axes, got '
      f'{", ".join(vectors)}.'
    )
  if not any(are_hidden):
    raise ValueError(
      'hidden must choose at least one parameter, got none of '
      f'{", ".join(name for name, _ in named)}.'
    )
  return chosen


def is_vector(name: str, param: Any) -> bool:
  """Returns whether a parameter is a bias or scale, maybe of stacked layers.

  Args:
    name: Its path, with slashes.
    param: The parameter, or its shape.
  """
  owner, _, leaf = name.rpartition('/')
  is_weight_of_norm = leaf == 'weight' and _NORM.search(owner) is not None
  return len(param.shape) < 2 or leaf in VECTORS or is_weight_of_norm


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


def dimension_numbers_or_default(
  weight_dimension_numbers: WeightDimensionNumbers,
) -> WeightDimensionNumbers:
  """Returns those that are given, or else those of hidden matrices."""
  if weight_dimension_numbers is None:
    return hidden_dimension_numbers
  return weight_dimension_numbers


def hidden_dimension_numbers(params: Any) -> Any:
  """Returns the dimension numbers of hidden matrices; others are masked out.

  With two axes, these are rows and columns, whatever the name. With more they
  are those of :func:`flax_dimension_numbers`, or it raises ``ValueError``.
  """
  return specs_of_flax(params, {}, {}, are_matrices=True)


def check_matrices(
  params: Any,
  hidden: Hidden,
  weight_dimension_numbers: WeightDimensionNumbers,
) -> tuple[Any, Any]:
  """Returns hidden matrices and their axes; others are masked out.

  Raises:
    ValueError: If a spec does not fit its parameter or gives a hidden one no
      rows; without specs, if the bias of a hidden matrix contradicts it.
  """
  if weight_dimension_numbers is None:
    _check_names(params, hidden)
  matrices = jax.tree.map(
    lambda x, is_hidden: x if is_hidden else optax.MaskedNode(),
    params,
    hidden_matrices(params, hidden),
  )
  axes = matrix_axes(
    dimension_numbers_or_default(weight_dimension_numbers), matrices
  )
  treedef: Any = jax.tree.structure(matrices)
  vectors = [
    name
    for name, x in zip(
      path_names(matrices), treedef.flatten_up_to(axes), strict=True
    )
    if not x.rows
  ]
  if vectors:
    raise ValueError(
      'weight_dimension_numbers must give hidden matrices rows and columns, '
      f'got none for {", ".join(vectors)}. Leave these to Adam by hidden.'
    )
  return matrices, axes


def _check_names(params: Any, hidden: Hidden) -> None:
  """Raises ``ValueError`` where the bias of a hidden matrix contradicts it."""
  name_of = path_namer(params)
  hidden_dimension_numbers(
    jax.tree_util.tree_map_with_path(
      lambda path, x, is_hidden: (
        x if is_hidden or name_of(path).endswith('bias') else optax.MaskedNode()
      ),
      params,
      hidden_matrices(params, hidden),
    )
  )


def _chosen(params: Any, hidden: Hidden) -> Any:
  """Returns a tree of booleans with the structure of the parameters."""
  name_of = path_namer(params)
  patterns = _patterns(check_hidden(hidden))
  if hidden is not None and patterns is None:
    try:
      return broadcast_mask('hidden', hidden, params)
    except ValueError as error:
      raise ValueError(
        f'{error} It may also be a regular expression, or a sequence of them.'
      ) from None

  def is_hidden(path: Any, param: Any) -> bool:
    if patterns is not None:
      return any(re.search(pattern, name_of(path)) for pattern in patterns)
    name = name_of(path)
    if is_vector(name, param):
      return False
    return not any(map(_INPUT_OR_OUTPUT.search, name.split('/')))

  return jax.tree_util.tree_map_with_path(is_hidden, params)


def _patterns(hidden: Any) -> list[str] | None:
  """Returns regular expressions, or None for what is no such choice."""
  if isinstance(hidden, str):
    return [hidden]
  if isinstance(hidden, Sequence) and hidden:
    patterns = list(hidden)
    return patterns if all(isinstance(x, str) for x in patterns) else None
  return None
