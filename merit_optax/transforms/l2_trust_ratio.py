"""Trust ratios in the l2 norm, as in LAMB, for each matrix of a stack."""

from collections.abc import Iterable

import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax.matrices.dimension_numbers import WeightDimensionNumbers
from merit_optax.matrices.norms import Ratio, l2_norm
from merit_optax.transforms.calibration import calibrated
from merit_optax.transforms.trust_ratio import scale_by_rule, trust_ratio_rule


def scale_by_l2_norm_trust_ratio(
  min_norm: Number = 0.0,
  trust_coefficient: Number = 1.0,
  eps: Number = 0.0,
  *,
  ratios: Iterable[Ratio] = ('weight',),
  min_ratio: Number | None = None,
  max_ratio: Number | None = None,
  calibrate: bool = False,
  weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
  r"""Scales every element by the largest of its l2 trust ratios.

  For a matrix :math:`w` and its update :math:`z`,

  .. math::

    z \leftarrow \frac{\|w\|_2}{\|z\|_2} \, z

  by default, which is the ratio of LAMB. Unlike
  :func:`optax.scale_by_trust_ratio`, which takes one norm over a whole stack of
  layers, experts or heads, this transform gives each matrix of a parameter the
  update that it would get on its own. ``ratios`` can add the ratios of rows and
  columns to the maximum. Arguments, fallback, bounds and batch axes are those
  of :func:`merit_optax.scale_by_max_norm_trust_ratio`.

  With ``calibrate``, every ratio is divided by its own value at the first step,
  as in OrScale-LM. It therefore starts at 1, and the learning rate means at
  first what it means without the ratio. (``trust_coefficient`` cancels.)

  - Each matrix has its own first step: the first at which its update is finite,
    not zero, and not weight decay to 99 % or more. (The gradient of a layer is
    zero as long as the layers after it are.) Until then the ratio is 1.
  - The ratio of a matrix that is zero at that step stays at 1, because there is
    no size to compare with. ``min_norm`` provides one.

  Norms are float32 sums, so the updates of two meshes differ by rounding. A
  norm below 1.1e-19 (float32) counts as zero.

  Args:
    min_norm: Lower bound of every norm, >= 0.
    trust_coefficient: Multiplier of the trust ratios, > 0.
    eps: Added to the norm of the update, >= 0.
    ratios: Which ratios take part in the maximum: one or more of ``'weight'``,
      ``'row'`` and ``'column'``.
    min_ratio: Lower bound of the largest ratio, > 0; ``None`` for none.
    max_ratio: Upper bound of the largest ratio, > 0 and at least ``min_ratio``;
      ``None`` for none.
    calibrate: Whether to divide each ratio by its value at the first step.
    weight_dimension_numbers: Which axes of a parameter are rows and columns of
      its matrices, see :func:`merit_optax.scale_by_max_norm_trust_ratio`.

  Returns:
    A :class:`optax.GradientTransformation`, whose ``update`` needs ``params``.
    It is stateless unless it calibrates: then its state holds the first ratios
    of all parameters in one array of shape (ratios,) and dtype float32. Ratios
    are computed in float32 or wider; updates have the dtype to which update and
    parameter promote.

  Raises:
    ValueError: If an argument is out of range; by ``init`` and ``update`` if a
      spec does not fit its parameter, and by ``update`` if it is called without
      ``params``.

  Warns:
    UserWarning: By ``init``, if nothing specifies the rows and columns of a
      parameter with more than two axes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> transform = merit_optax.scale_by_l2_norm_trust_ratio()
    >>> params = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    >>> updates = jnp.array([[2.0, 0.0], [0.0, 0.0]])
    >>> updates, _ = transform.update(updates, transform.init(params), params)
    >>> print(updates)
    [[5. 0.]
     [0. 0.]]

  References:
    You et al., `Large Batch Optimization for Deep Learning: Training BERT in
    76 minutes <https://arxiv.org/abs/1904.00962>`_, 2019.

    Lou and You, `OrScale: Orthogonalised Optimization with Layer-Wise
    Trust-Ratio Scaling <https://arxiv.org/abs/2605.07815>`_, 2026, for the
    bounds and the calibration.
  """
  rule = trust_ratio_rule(
    l2_norm, ratios, min_norm, trust_coefficient, eps, min_ratio, max_ratio
  )
  if arguments.boolean('calibrate', calibrate):
    return calibrated(rule, l2_norm, weight_dimension_numbers)
  return scale_by_rule(rule, weight_dimension_numbers)
