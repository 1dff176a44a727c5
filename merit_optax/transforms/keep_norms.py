"""The last transform of a chain: each matrix keeps its norm."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal.dtypes import common_dtype, widen
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
)
from merit_optax.matrices.norms import NORMS, matrix_norms
from merit_optax.matrices.per_parameter import per_parameter
from merit_optax.transforms.trust_ratio import largest_ratio, ratio


def keep_matrix_norms(
  norm: Literal['l2', 'max'] = 'l2',
  *,
  weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
  r"""Changes updates so that every matrix keeps its norm.

  This must be the last transform of a chain, after the learning rate, because
  it needs the final update. (Only :func:`merit_optax.qk_clip`, which shrinks
  norms on purpose, comes after it.) For a matrix :math:`w` and its update
  :math:`u`,

  .. math::

    u \leftarrow \frac{\|w\|}{\|w + u\|} (w + u) - w

  so that :math:`w + u` has the norm of :math:`w`. After
  :func:`merit_optax.scale_by_l2_norm_trust_ratio`, it turns any direction into
  a Hyperball step, :math:`w \leftarrow R \, n(w - \eta R \, n(u))` with
  :math:`n(x) = x / \|x\|`, where :math:`R` is the initial norm of the matrix.

  Only matrices keep their norms, separately for each matrix of a stack.
  Parameters that have only the weight-wise ratio in
  :func:`merit_optax.scale_by_max_norm_trust_ratio` (biases, scales of norm
  layers, and others that a spec declares to be vectors) pass through, because
  their size matters. Use :func:`optax.masked` to exclude matrices too. A matrix
  that is zero, or would become zero, passes through as well. A matrix whose
  norm would overflow becomes NaN.

  The incoming parameters have the norm that is kept, so rounding errors
  accumulate over steps. In float32 they have no systematic sign and stay below
  1e-5 of the norm over thousands of steps. In bfloat16 the norm shrinks, by
  1.6 % in 10,000 steps: use float32 master weights.

  Args:
    norm: ``'l2'`` or ``'max'``, the largest magnitude.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`.

  Returns:
    A stateless :class:`optax.GradientTransformation`, whose ``update`` needs
    ``params``. Arithmetic is done in float32 or wider; updates of matrices have
    the dtype to which update and parameter promote, and those of other
    parameters are unchanged.

  Raises:
    ValueError: If ``norm`` is unknown; by ``init`` and ``update`` if a spec
      does not fit its parameter, and by ``update`` if it is called without
      ``params``.

  Warns:
    UserWarning: By ``init``, if nothing specifies the rows and columns of a
      parameter with more than two axes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> import optax
    >>> hyperball = optax.chain(
    ...     optax.scale_by_adam(),
    ...     merit_optax.scale_by_l2_norm_trust_ratio(),
    ...     optax.scale_by_learning_rate(0.5),
    ...     merit_optax.keep_matrix_norms(),
    ... )
    >>> params = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    >>> gradients = jnp.ones((2, 2))
    >>> updates, _ = hyperball.update(
    ...     gradients, hyperball.init(params), params)
    >>> print(f'{jnp.linalg.norm(params + updates):.4f}')
    5.0000

  References:
    Wen et al., `Fantastic Pretraining Optimizers and Where to Find Them II:
    Hyperball Optimization <https://arxiv.org/abs/2606.16899>`_, 2026.
  """
  if not isinstance(norm, str) or norm not in NORMS:
    raise ValueError(f'norm must be one of {sorted(NORMS)}, got {norm!r}.')

  def norms(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    return matrix_norms(widen(x), axes, NORMS[norm])

  def keep(update: jax.Array, param: jax.Array, axes: MatrixAxes) -> jax.Array:
    if not axes.rows:
      return update
    w = widen(param)
    moved = w + widen(update)
    now, next_ = norms(w, axes), norms(moved, axes)
    # An infinite norm would make a matrix of zeros, which nobody would notice.
    factor = jnp.where(
      jnp.isinf(jnp.maximum(now, next_)),
      jnp.nan,
      largest_ratio([ratio(now, next_)]),
    )
    return (factor * moved - w).astype(common_dtype(update, param))

  return per_parameter(keep, weight_dimension_numbers)
