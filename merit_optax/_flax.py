"""Dimension numbers of Flax modules, found by the paths of their parameters."""

from collections.abc import Mapping
import re
from typing import Any

import jax

from merit_optax._dimension_numbers import DimensionNumbers, path_name

_ATTENTION_INPUT = re.compile(r'(^|_)(query|key|value|q|k|v)(_proj)?$')
_ATTENTION_OUTPUT = re.compile(r'(^|_)(out|o)(_proj)?$')
_CONVOLUTION = re.compile(r'conv', re.IGNORECASE)
_VECTORS = ('bias', 'scale')


def flax_dimension_numbers(
  params: Any,
  *,
  stacked: Mapping[str, int] | None = None,
  overrides: Mapping[str, DimensionNumbers | None] | None = None,
) -> Any:
  """Makes the dimension numbers of Flax modules, NNX or Linen.

  A parameter is known by the last names of its path:

  - ``kernel`` of two axes (``Dense``, ``Linear``, ``Einsum`` of two): inputs
    are rows and outputs columns;
  - ``kernel`` of three axes below ``query``, ``key`` or ``value`` (also ``q``,
    ``q_proj``, ...), of shape (model, heads, head_dim): one matrix of model
    rows and heads times head_dim columns; below ``out`` (also ``o``,
    ``out_proj``, ...), of shape (heads, head_dim, model), the reverse;
  - ``kernel`` below a name with ``conv`` in it, of three axes or more: windows
    and inputs are rows, outputs columns;
  - ``embedding``, of shape (entries, features): a matrix;
  - ``bias`` and ``scale``: the weight-wise ratio over all axes that are not
    stacked.

  Args:
    params: Tree of arrays, or of their shapes: a Linen ``params`` collection or
      ``nnx.state(model, nnx.Param)``, also as ``nnx.as_pure`` gives it.
    stacked: Numbers of leading axes that count layers, experts and so on, by a
      regular expression to search for in the path, such as
      ``{'blocks/': 1, 'blocks/.*experts/': 2}``. The largest that applies
      counts.
    overrides: Dimension numbers by a regular expression to search for in the
      path, for parameters that the rules above would not fit. Their axes
      count from the whole array.

  Returns:
    Tree like ``params`` of :class:`optax.contrib.MuonDimensionNumbers`, to be
    given as ``weight_dimension_numbers``. Every parameter has an explicit one.
    The function itself may be given too.

  Raises:
    ValueError: If parameters are not recognised, or patterns match none; it
      names them all.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> params = {'attention': {'query': {'kernel': jnp.zeros((8, 2, 4))}}}
    >>> specs = merit_optax.flax_dimension_numbers(params)
    >>> print(specs['attention']['query']['kernel'])
    MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))
  """
  stacked, overrides = dict(stacked or {}), dict(overrides or {})
  unknown: list[str] = []
  unused = {*stacked, *overrides}

  def spec(path: tuple[Any, ...], param: Any) -> DimensionNumbers | None:
    # In an nnx.State, the path leads through the variable to its value.
    name = path_name(path).removesuffix('/value')
    found = {p for p in (*stacked, *overrides) if re.search(p, name)}
    unused.difference_update(found)
    for pattern, override in overrides.items():
      if pattern in found:
        return override
    counts = [n for pattern, n in stacked.items() if pattern in found]
    numbers = _recognise(
      name.split('/'), len(param.shape), max(counts, default=0)
    )
    if numbers is None:
      unknown.append(f'{name} {param.shape}')
    return numbers

  specs = jax.tree_util.tree_map_with_path(spec, params)
  if unused:
    raise ValueError(
      'stacked and overrides must match a path each, got patterns that match '
      f'none: {sorted(unused)}.'
    )
  if unknown:
    raise ValueError(
      f'params holds parameters that are not recognised: {", ".join(unknown)}. '
      'If a leading axis counts layers or experts, say so by stacked, such as '
      "stacked={'blocks/': 1}; otherwise give their dimension numbers by "
      'overrides.'
    )
  return specs


def _recognise(
  names: list[str], ndim: int, num_stacked: int
) -> DimensionNumbers | None:
  """Returns the spec of a parameter, or None if no rule fits."""
  axes = tuple(range(num_stacked, ndim))
  num_rows = _num_row_axes(names, len(axes))
  if num_rows is None:
    return None
  return DimensionNumbers(axes[:num_rows], axes[num_rows:])


def _num_row_axes(names: list[str], ndim: int) -> int | None:
  """Returns how many of the axes are rows, or None if no rule fits."""
  leaf, owner = names[-1], names[-2] if len(names) > 1 else ''
  rules = (
    (leaf in _VECTORS, 0),
    (leaf == 'embedding' and ndim == 2, 1),
    (leaf == 'kernel' and ndim == 2, 1),
    (leaf == 'kernel' and ndim > 2 and _CONVOLUTION.search(owner), ndim - 1),
    (leaf == 'kernel' and ndim == 3 and _ATTENTION_INPUT.search(owner), 1),
    (leaf == 'kernel' and ndim == 3 and _ATTENTION_OUTPUT.search(owner), 2),
  )
  return next((rows for fits, rows in rules if fits), None)
