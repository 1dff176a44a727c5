"""Directions that are as large as a norm allows in every place."""

from collections.abc import Callable, Mapping
import math
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax._internal.dtypes import widen
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
)
from merit_optax.matrices.norms import l2_norm
from merit_optax.matrices.per_parameter import per_update

# Axes over which the root mean square becomes 1.
_AXES: Mapping[str, Callable[[MatrixAxes], tuple[int, ...]]] = MappingProxyType(
  {
    'max': lambda axes: (),
    'row': lambda axes: axes.columns,
    'column': lambda axes: axes.rows or axes.columns,
    'rms': lambda axes: axes.rows + axes.columns,
  }
)


def scale_by_lmo(
  norm: Literal['max', 'row', 'column', 'rms'],
  eps: Number = 0.0,
  *,
  weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
  r"""Replaces updates by the steepest directions in a norm.

  Of all directions whose norm is at most 1, it is the one along which the loss
  decreases fastest: the solution :math:`\arg \max_{\|u\| \le 1} \langle z, u
  \rangle` of a linear minimization oracle (LMO), where :math:`z` is an update.
  With :math:`\text{RMS}(x)` for the root mean square of elements, the norms and
  directions are

  ============  ================================  ===========================
  ``norm``      norm                              direction
  ============  ================================  ===========================
  ``'max'``     largest magnitude                 the sign of each element
  ``'row'``     largest RMS of a row              each row with an RMS of 1
  ``'column'``  largest RMS of a column           each column with an RMS of 1
  ``'rms'``     RMS of the matrix                 the matrix with an RMS of 1
  ============  ================================  ===========================

  The one of the spectral norm is Muon's, :func:`optax.contrib.scale_by_muon`.
  The momentum comes before this transform (:func:`optax.ema`), and what depends
  on the shape after it (:func:`merit_optax.scale_by_shape`).

  A part whose l2 norm is zero, or below 1.1e-19 in float32, becomes zero. Every
  other part has its full size, however small its gradient is: the row of an
  embedding whose token no longer occurs keeps moving until its momentum
  underflows, unless ``eps`` is large in comparison.

  Args:
    norm: ``'max'``, ``'row'``, ``'column'`` or ``'rms'``.
    eps: Added to the RMS by which a part is divided, >= 0.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`. Of a
      parameter that has only the weight-wise ratio there, ``'row'`` and
      ``'column'`` take the RMS of all elements.

  Returns:
    A stateless :class:`optax.GradientTransformation` that preserves shapes and
    dtypes. Arithmetic is done in float32 or wider.

  Raises:
    ValueError: If an argument is out of range; by ``init`` and ``update`` if a
      spec does not fit its parameter.

  Warns:
    UserWarning: By ``init``, if nothing specifies the rows and columns of a
      parameter with more than two axes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> transform = merit_optax.scale_by_lmo('row')
    >>> updates = jnp.array([[3.0, -3.0, 3.0, 3.0], [0.2, 0.0, 0.0, 0.0]])
    >>> updates, _ = transform.update(updates, transform.init(updates))
    >>> print(updates)
    [[ 1. -1.  1.  1.]
     [ 2.  0.  0.  0.]]

  References:
    Pethick et al., `Training Deep Learning Models with Norm-Constrained LMOs
    <https://arxiv.org/abs/2502.07529>`_, 2025.
  """
  if not isinstance(norm, str) or norm not in _AXES:
    raise ValueError(f'norm must be one of {sorted(_AXES)}, got {norm!r}.')
  eps = arguments.at_least_zero('eps', eps)

  def direction(update: jax.Array, axes: MatrixAxes) -> jax.Array:
    z = widen(update)
    size = l2_norm(z, _AXES[norm](axes))
    rms = size / math.sqrt(z.size / max(size.size, 1))
    # An infinite size would make zeros, which nobody would notice.
    rms = jnp.where(jnp.isinf(rms), jnp.nan, rms)
    # Subnormal numbers count as zero, since most hardware flushes them.
    vanished = rms < jnp.finfo(rms.dtype).tiny
    scaled = jnp.where(vanished, 0, z) / jnp.where(vanished, 1, rms + eps)
    return scaled.astype(update.dtype)

  return per_update(direction, weight_dimension_numbers)
