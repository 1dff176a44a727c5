"""The max-norm trust ratio: weight-wise, row-wise and column-wise."""

from collections.abc import Collection
import functools

import jax
import jax.numpy as jnp
import optax

from merit_optax import _arguments

_RATIOS = ('weight', 'row', 'column')
_NO_PARAMS_MESSAGE = (
  'You are using a transformation that requires the current value of '
  'parameters, but you are not passing `params` when calling `update`.'
)


def scale_by_max_norm_trust_ratio(
  min_norm: jax.typing.ArrayLike = 0.0,
  trust_coefficient: jax.typing.ArrayLike = 1.0,
  eps: jax.typing.ArrayLike = 0.0,
  *,
  ratios: Collection[str] = _RATIOS,
) -> optax.GradientTransformation:
  r"""Scales every element by the largest max-norm trust ratio it belongs to.

  For a matrix :math:`w` and its update :math:`z`,

  .. math::

    b = \frac{\max |w|}{\max |z|} \qquad
    r_i = \frac{\max_j |w_{ij}|}{\max_j |z_{ij}|} \qquad
    c_j = \frac{\max_i |w_{ij}|}{\max_i |z_{ij}|} \\
    z_{ij} \leftarrow \max(r_i, c_j, b) \, z_{ij}

  where :math:`b` is the weight-wise, :math:`r_i` the row-wise and :math:`c_j`
  the column-wise ratio. The ratio is 1 wherever a norm that it needs is zero:
  a zero row makes it 1 for every element of the row, and so on. A norm below
  the smallest normal float32 counts as zero, since most hardware flushes such
  numbers. No element is scaled beyond :math:`\max |w|` unless its ratio fell
  back to 1.

  A parameter with fewer than two axes has the weight-wise ratio only. One with
  more than two is a stack of matrices over its last two axes.

  Args:
    min_norm: Lower bound of every norm, >= 0. A bound above zero lets a
      vanishing update vanish, where the ratio would otherwise scale it up to
      the size of the weights for ever.
    trust_coefficient: Multiplier of the trust ratios, > 0.
    eps: Added to the norm of the update, >= 0.
    ratios: Which ratios take part in the maximum: one or more of ``'weight'``,
      ``'row'`` and ``'column'``.

  Returns:
    A stateless :class:`optax.GradientTransformation`, whose ``update`` needs
    ``params``. Ratios are computed in float32 or wider; updates have the dtype
    to which update and parameter promote.

  Raises:
    ValueError: If an argument is outside its range, or if ``update`` is called
      without ``params``.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> transform = merit_optax.scale_by_max_norm_trust_ratio()
    >>> params = jnp.array([[4.0, 2.0], [1.0, 0.5]])
    >>> updates = jnp.array([[0.5, 0.125], [0.25, 0.25]])
    >>> updates, _ = transform.update(updates, transform.init(params), params)
    >>> print(updates)
    [[4. 1.]
     [2. 2.]]

  References:
    Luo et al., `MERIT: Maximum-normalized Element-wise Ratio for Language
    Model Large-batch Training <https://arxiv.org/abs/2508.20577>`_, 2025,
    Algorithm 1. The fallback to 1 is the authors' code's.
  """
  _arguments.check_at_least_zero('min_norm', min_norm)
  _arguments.check_above_zero('trust_coefficient', trust_coefficient)
  _arguments.check_at_least_zero('eps', eps)
  ratios = _check_ratios(ratios)

  def trust_ratio(update: jax.Array, param: jax.Array) -> jax.Array:
    names = ratios if param.ndim >= 2 else ('weight',)
    param_norms = _max_norms(param, min_norm)
    update_norms = _max_norms(update, min_norm)
    norms = [(param_norms[name], update_norms[name]) for name in names]
    ratio = functools.reduce(
      jnp.maximum,
      [_ratio(jnp.multiply(trust_coefficient, p), u, eps) for p, u in norms],
    )
    vanished = functools.reduce(
      jnp.logical_or, [_vanishes(p) | _vanishes(u) for p, u in norms]
    )
    return jnp.where(vanished, 1, ratio)

  def scale(update: jax.Array, param: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(update.dtype, param.dtype)
    return (trust_ratio(update, param) * update).astype(dtype)

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    if params is None:
      raise ValueError(_NO_PARAMS_MESSAGE)
    return jax.tree.map(scale, updates, params), state

  return optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)


def _check_ratios(ratios: Collection[str]) -> tuple[str, ...]:
  """Returns the ratios as a tuple, checked to be known and not empty."""
  is_collection = isinstance(ratios, Collection) and not isinstance(ratios, str)
  if not is_collection or not ratios or not set(ratios) <= set(_RATIOS):
    raise ValueError(
      f'ratios must hold one or more of {_RATIOS}, got {ratios!r}.'
    )
  return tuple(name for name in _RATIOS if name in ratios)


def _max_norms(
  x: jax.Array, min_norm: jax.typing.ArrayLike
) -> dict[str, jax.Array]:
  """Returns the max-norms of each matrix, of its rows and of its columns.

  Args:
    x: Array of shape (..., rows, columns), or with fewer than two axes.
    min_norm: Lower bound of the norms.

  Returns:
    Norms by the name of their ratio, in float32 or wider, of shapes
    (..., 1, 1), (..., rows, 1) and (..., 1, columns).
  """
  size = jnp.abs(x)
  largest = functools.partial(jnp.max, keepdims=True, initial=0)
  if x.ndim < 2:
    norms = {'weight': largest(size)}
  else:
    row, column = largest(size, axis=-1), largest(size, axis=-2)
    norms = {'weight': largest(row, axis=-2), 'row': row, 'column': column}
  dtype = jnp.promote_types(size.dtype, jnp.float32)
  return {
    name: jnp.maximum(norm.astype(dtype), min_norm)
    for name, norm in norms.items()
  }


def _ratio(
  param_norm: jax.Array, update_norm: jax.Array, eps: jax.typing.ArrayLike
) -> jax.Array:
  """Returns the quotient of two norms, finite where they are finite."""
  divisor = jnp.where(_vanishes(update_norm), 1, update_norm + eps)
  # An infinite ratio would turn the zeros of the update into NaN.
  return jnp.minimum(param_norm / divisor, jnp.finfo(divisor.dtype).max)


def _vanishes(norm: jax.Array) -> jax.Array:
  """Returns where a norm is zero for hardware that flushes subnormals."""
  return jnp.less(norm, jnp.finfo(norm.dtype).tiny)
