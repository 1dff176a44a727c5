"""Trust ratios, weight-wise, row-wise and column-wise, for any direction."""

from collections.abc import Collection, Iterable

import jax
import jax.numpy as jnp
import optax

from merit_optax import _arguments
from merit_optax._calibration import Ratios, scale_by_relative_ratios
from merit_optax._dimension_numbers import MatrixAxes, WeightDimensionNumbers
from merit_optax._norms import (
  RATIOS,
  Norm,
  common_dtype,
  l2_norm,
  largest_ratio,
  max_norm,
  trust_ratios,
  widen,
)
from merit_optax._per_parameter import per_parameter


def scale_by_max_norm_trust_ratio(
  min_norm: jax.typing.ArrayLike = 0.0,
  trust_coefficient: jax.typing.ArrayLike = 1.0,
  eps: jax.typing.ArrayLike = 0.0,
  *,
  ratios: Collection[str] = RATIOS,
  min_ratio: jax.typing.ArrayLike | None = None,
  max_ratio: jax.typing.ArrayLike | None = None,
  weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
  r"""Scales every element by the largest of its max-norm trust ratios.

  For a matrix :math:`w` and its update :math:`z`,

  .. math::

    b = \frac{\max |w|}{\max |z|} \qquad
    r_i = \frac{\max_j |w_{ij}|}{\max_j |z_{ij}|} \qquad
    c_j = \frac{\max_i |w_{ij}|}{\max_i |z_{ij}|} \\
    z_{ij} \leftarrow \max(r_i, c_j, b) \, z_{ij}

  where :math:`b` is the weight-wise, :math:`r_i` the row-wise and :math:`c_j`
  the column-wise ratio. The ratio is 1 wherever a norm that it needs is zero:
  a zero row makes it 1 for every element of the row, and so on. A norm below
  the smallest normal float32 counts as zero, because most hardware flushes such
  numbers. With the default arguments no element is scaled beyond
  :math:`\max |w|` unless its ratio fell back to 1.

  With ``min_norm`` :math:`\mu`, ``trust_coefficient`` :math:`\kappa` and
  ``eps`` :math:`\varepsilon`, each ratio of two norms is
  :math:`\kappa \max(\|w\|, \mu) / (\max(\|z\|, \mu) + \varepsilon)`.

  ``min_ratio`` and ``max_ratio`` bound the largest ratio, by which elements are
  multiplied. With a lower bound there is no fallback to 1: where a norm is
  zero, the ratio is ``min_ratio``.

  ``weight_dimension_numbers`` specifies which axes are rows and columns, with
  the specs of :func:`optax.contrib.muon`. Axes that a spec does not name are
  batch axes (scanned layers, experts, heads): each matrix has its own norms,
  and gets the update that it would get on its own. Unlike in Muon,

  - a parameter with fewer than two axes has only the weight-wise ratio,
    whichever axes a spec names;
  - with an empty ``reduction_axis`` a parameter has only the weight-wise ratio
    over its output axes: use ``MuonDimensionNumbers((), (1,))`` for biases
    stacked as (layers, features);
  - ``None`` in a tree of specs means the weight-wise ratio over all axes;
  - ``MuonDimensionNumbers((), ())`` treats every element as a separate
    parameter, for scalars stacked as (layers,).

  Under ``jax.jit`` any sharding gives correct results. Inside ``jax.shard_map``
  a device sees only its own shards, so the norms are silently wrong unless it
  holds whole matrices. Compute gradients there, and call ``update`` outside.

  Without a spec, a parameter with more than two axes is treated as a stack of
  matrices over its last two axes, and ``init`` warns. (The authors' code takes
  the maxima over axis 1, over axis 0 and over the whole array, whatever these
  axes are.)

  Args:
    min_norm: Lower bound of every norm, >= 0. A bound above zero keeps a
      vanishing update small; otherwise the ratio scales it up to the size of
      the weights until it underflows, hundreds of steps later.
    trust_coefficient: Multiplier of the trust ratios, > 0.
    eps: Added to the norm of the update, >= 0.
    ratios: Which ratios take part in the maximum: one or more of ``'weight'``,
      ``'row'`` and ``'column'``.
    min_ratio: Lower bound of the largest ratio, > 0; ``None`` for none.
    max_ratio: Upper bound of the largest ratio, > 0 and at least ``min_ratio``;
      ``None`` for none.
    weight_dimension_numbers: A spec for all parameters
      (:class:`optax.contrib.MuonDimensionNumbers`), a tree of specs with the
      structure of the parameters or a prefix of it, or a function from
      parameters to such a tree.

  Returns:
    A stateless :class:`optax.GradientTransformation`, whose ``update`` needs
    ``params``. Ratios are computed in float32 or wider; updates have the dtype
    to which update and parameter promote.

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
    Algorithm 1. The fallback to 1 is that of the authors' code.
  """
  return _scale_by_trust_ratio(
    max_norm,
    min_norm,
    trust_coefficient,
    eps,
    ratios,
    min_ratio,
    max_ratio,
    weight_dimension_numbers,
  )


def scale_by_l2_norm_trust_ratio(
  min_norm: jax.typing.ArrayLike = 0.0,
  trust_coefficient: jax.typing.ArrayLike = 1.0,
  eps: jax.typing.ArrayLike = 0.0,
  *,
  ratios: Collection[str] = ('weight',),
  min_ratio: jax.typing.ArrayLike | None = None,
  max_ratio: jax.typing.ArrayLike | None = None,
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

  - The first step is that of each matrix: the first at which its update is
    finite and has a direction of its own. One that consists of weight decay to
    99 % or more, or is zero, has none: the gradient of a layer is zero as long
    as the layers after it are. Until then the ratio is 1.
  - The ratio of a matrix that is zero at that step stays at 1, because there is
    no size to compare with. ``min_norm`` provides one.

  Norms are sums whose terms are rounded such that their order does not matter:
  as with the max-norm, an update has the same bits on every mesh.

  Args:
    min_norm: Lower bound of every norm, >= 0.
    trust_coefficient: Multiplier of the trust ratios, > 0.
    eps: Added to the norm of the update, >= 0.
    ratios: Which ratios take part in the maximum: one or more of ``'weight'``,
      ``'row'`` and ``'column'``.
    min_ratio: Lower bound of the largest ratio, > 0; ``None`` for none.
    max_ratio: Upper bound of the largest ratio, > 0 and at least ``min_ratio``;
      ``None`` for none.
    calibrate: Whether to divide each ratio by that of its first step.
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
  return _scale_by_trust_ratio(
    l2_norm,
    min_norm,
    trust_coefficient,
    eps,
    ratios,
    min_ratio,
    max_ratio,
    weight_dimension_numbers,
    calibrate,
  )


def _scale_by_trust_ratio(
  norm: Norm,
  min_norm: jax.typing.ArrayLike,
  trust_coefficient: jax.typing.ArrayLike,
  eps: jax.typing.ArrayLike,
  ratios: Collection[str],
  min_ratio: jax.typing.ArrayLike | None,
  max_ratio: jax.typing.ArrayLike | None,
  weight_dimension_numbers: WeightDimensionNumbers,
  calibrate: bool = False,
) -> optax.GradientTransformation:
  """Scales by the largest trust ratio in some norm."""
  min_norm = _arguments.at_least_zero('min_norm', min_norm)
  trust_coefficient = _arguments.above_zero(
    'trust_coefficient', trust_coefficient
  )
  eps = _arguments.at_least_zero('eps', eps)
  ratios = check_ratios(ratios)
  calibrate = _arguments.boolean('calibrate', calibrate)
  min_ratio, max_ratio = _check_bounds(min_ratio, max_ratio)

  def ratios_of(
    update: jax.Array, param: jax.Array, axes: MatrixAxes
  ) -> Ratios:
    return trust_ratios(
      update, param, axes, ratios, min_norm, trust_coefficient, eps, norm
    )

  def scale(update: jax.Array, param: jax.Array, parts: Ratios) -> jax.Array:
    ratio = jnp.clip(
      largest_ratio(parts.values(), 1 if min_ratio is None else min_ratio),
      min_ratio,
      max_ratio,
    )
    return (ratio * widen(update)).astype(common_dtype(update, param))

  if calibrate:
    return scale_by_relative_ratios(
      ratios_of, scale, norm, weight_dimension_numbers
    )
  return per_parameter(
    lambda update, param, axes: scale(
      update, param, ratios_of(update, param, axes)
    ),
    weight_dimension_numbers,
  )


def _check_bounds(
  min_ratio: jax.typing.ArrayLike | None,
  max_ratio: jax.typing.ArrayLike | None,
) -> tuple[jax.typing.ArrayLike | None, jax.typing.ArrayLike | None]:
  """Returns the bounds of the ratio, checked to be in order."""
  least = 0.0
  if min_ratio is not None:
    min_ratio = _arguments.above_zero('min_ratio', min_ratio)
    if not isinstance(min_ratio, jax.core.Tracer):
      least = float(jax.device_get(min_ratio))
  if max_ratio is not None:
    max_ratio = _arguments.number(
      'max_ratio',
      max_ratio,
      'a finite number > 0 that is not below min_ratio',
      lambda x: x > 0 and x >= least,
    )
  return min_ratio, max_ratio


def check_ratios(ratios: Collection[str]) -> tuple[str, ...]:
  """Returns the ratios as a tuple, checked to be known and not empty."""
  is_collection = isinstance(ratios, Iterable) and not isinstance(ratios, str)
  names = list(ratios) if is_collection else []
  if not names or not all(name in RATIOS for name in names):
    raise ValueError(
      f'ratios must hold one or more of {RATIOS}, got {ratios!r}.'
    )
  return tuple(name for name in RATIOS if name in names)
