"""The last transform of a chain: each matrix keeps its norm."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal.dtypes import common_dtype, widen
from merit_optax._internal.trees import as_arrays, join, split
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
  join_parts,
  matrix_axes,
  split_parts,
)
from merit_optax.matrices.norms import NORMS, matrix_norms
from merit_optax.matrices.per_parameter import aligned, per_parameter
from merit_optax.transforms.trust_ratio import largest_ratio, ratio


class KeepMatrixNormsState(NamedTuple):
  """Norms that matrices had at first.

  Attributes:
    radius: Shape (matrices,), dtype float32: those of each parameter after the
      other.
  """

  radius: jax.Array


def keep_matrix_norms(
  norm: str = 'l2',
  *,
  radius: Literal['current', 'initial'] = 'current',
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

  By default there is no state: the norm that is kept is that of the incoming
  parameters, so rounding errors accumulate over steps. In float32 they have no
  systematic sign and stay below 1e-5 of the norm over thousands of steps. In
  bfloat16 the norm shrinks, by 1.6 % in 10,000 steps: use
  ``radius='initial'``, which stores the norms that matrices have in ``init``,
  or float32 master weights. (With stored norms, a matrix that was zero in
  ``init`` keeps its current norm once it has one. What shrinks norms on
  purpose, such as :func:`merit_optax.qk_clip`, holds for one step: the next one
  restores the stored norm.)

  Args:
    norm: ``'l2'`` or ``'max'``, the largest magnitude.
    radius: Which norm is kept: ``'current'``, or ``'initial'``, which needs
      one float32 number of state for each matrix.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`.

  Returns:
    A :class:`optax.GradientTransformation`, whose ``update`` needs ``params``,
    and which is stateless unless the radius is ``'initial'``. Arithmetic is
    done in float32 or wider; updates of matrices have the dtype to which update
    and parameter promote, and those of other parameters are unchanged.

  Raises:
    ValueError: If ``norm`` or ``radius`` is unknown; by ``init`` and ``update``
      if a spec does not fit its parameter, and by ``update`` if it is called
      without ``params``.

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

  if not isinstance(radius, str) or radius not in ('current', 'initial'):
    raise ValueError(f"radius must be 'current' or 'initial', got {radius!r}.")

  def norms(x: jax.Array, axes: MatrixAxes) -> jax.Array:
    return matrix_norms(widen(x), axes, NORMS[norm])

  def keep(
    update: jax.Array,
    param: jax.Array,
    axes: MatrixAxes,
    kept: jax.Array | None = None,
  ) -> jax.Array:
    if not axes.rows:
      return update
    w = widen(param)
    moved = w + widen(update)
    now, next_ = norms(w, axes), norms(moved, axes)
    if kept is not None:
      now = jnp.where((kept > 0) & (now > 0), kept.astype(now.dtype), now)
    # An infinite norm would make a matrix of zeros, which nobody would notice.
    factor = jnp.where(
      jnp.isinf(jnp.maximum(now, next_)),
      jnp.nan,
      largest_ratio([ratio(now, next_)]),
    )
    dtype = common_dtype(update, param)
    return (factor * moved - w).astype(dtype)

  stateless = per_parameter(keep, weight_dimension_numbers)
  if radius == 'current':
    return stateless

  def norms_of_parts(x: jax.Array, axes: MatrixAxes) -> list[jax.Array]:
    return [norms(part, axes) for part in split_parts(x, axes)]

  def all_norms(params: optax.Params) -> Any:
    axes = matrix_axes(weight_dimension_numbers, params)
    return jax.tree.map(norms_of_parts, params, axes)

  def keep_parts(
    update: jax.Array, param: jax.Array, axes: MatrixAxes, kept: list[jax.Array]
  ) -> jax.Array:
    split = split_parts(update, axes), split_parts(param, axes)
    parts = zip(*split, kept, strict=True)
    return join_parts([keep(u, p, axes, k) for u, p, k in parts], axes)

  def init_fn(params: optax.Params) -> KeepMatrixNormsState:
    stateless.init(params)
    params = as_arrays(params)
    # Placeholders of optax.tree.map_params have no leaves.
    return KeepMatrixNormsState(
      join(all_norms(params) if jax.tree.leaves(params) else ())
    )

  def update_fn(
    updates: optax.Updates,
    state: KeepMatrixNormsState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, KeepMatrixNormsState]:
    updates, params, axes = aligned(updates, params, weight_dimension_numbers)
    kept = split(state.radius, jax.eval_shape(all_norms, params))
    return jax.tree.map(keep_parts, updates, params, axes, kept), state

  return optax.GradientTransformation(init_fn, update_fn)
