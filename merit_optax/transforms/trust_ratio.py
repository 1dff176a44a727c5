"""Trust ratios, weight-wise, row-wise and column-wise, for any direction.

The rule of MERIT is :func:`trust_ratios` and :func:`largest_ratio`.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax._internal.dtypes import common_dtype, widen
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
)
from merit_optax.matrices.norms import (
  RATIOS,
  Norm,
  Ratio,
  max_norm,
  norms_by_name,
)
from merit_optax.matrices.per_parameter import per_parameter

# By name, each infinite where one of its norms is zero.
Ratios: TypeAlias = dict[Ratio, jax.Array]


def trust_ratios(
  update: jax.Array,
  param: jax.Array,
  axes: MatrixAxes,
  *,
  names: Sequence[Ratio] = RATIOS,
  norm: Norm = max_norm,
  min_norm: Number = 0.0,
  trust_coefficient: Number = 1.0,
  eps: Number = 0.0,
) -> Ratios:
  """Returns |w| / |z| of each matrix, of its rows and of its columns.

  Each ratio has float32 or a wider dtype, broadcasts to the parameter's shape,
  and is infinite where one of its norms is zero.

  Args:
    update: Update z, of any shape.
    param: Parameter w of that shape.
    axes: Axes of the parameter's matrices. Without rows, there is the
      weight-wise ratio only.
    names: Names of the ratios wanted.
    norm: The norm.
    min_norm: Lower bound of every norm.
    trust_coefficient: Multiplier of the ratios.
    eps: Added to the norm of the update.
  """
  names = names if axes.rows else ('weight',)
  w = norms_by_name(param, axes, norm, names)
  z = norms_by_name(update, axes, norm, names)
  return {
    name: ratio(
      jnp.multiply(trust_coefficient, jnp.maximum(w[name], min_norm)),
      jnp.maximum(z[name], min_norm),
      eps,
    )
    for name in names
  }


def largest_ratio(
  ratios: Iterable[jax.Array], without_norm: Number = 1
) -> jax.Array:
  """Returns the largest of the ratios.

  An infinite one has a norm that is zero. Where that is the update's, there is
  nothing to multiply, and any ratio will do: ``without_norm``.
  """
  ratio = functools.reduce(jnp.maximum, ratios)
  return jnp.where(ratio == jnp.inf, without_norm, ratio)


def ratio(
  param_norm: jax.Array,
  update_norm: jax.Array,
  eps: Number = 0.0,
) -> jax.Array:
  """Returns the ratio of two norms, infinite where one of them is zero."""
  limits = jnp.finfo(update_norm.dtype)
  # Subnormal norms count as zero, since most hardware flushes them.
  vanished = (param_norm < limits.tiny) | (update_norm < limits.tiny)
  # An infinite ratio would turn the zeros of the update into NaN, so quotients
  # that overflow are bounded by 1 / tiny.
  least = jnp.maximum(update_norm + eps, param_norm * limits.tiny)
  # The division comes last: XLA does it once for each norm, and what comes
  # after it, once for each element.
  return jnp.where(
    vanished, jnp.inf, jnp.minimum(param_norm, limits.max)
  ) / jnp.where(vanished, 1, least)


def scale_by_max_norm_trust_ratio(
  min_norm: Number = 0.0,
  trust_coefficient: Number = 1.0,
  eps: Number = 0.0,
  *,
  ratios: Iterable[Ratio] = RATIOS,
  min_ratio: Number | None = None,
  max_ratio: Number | None = None,
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
  rule = trust_ratio_rule(
    max_norm, ratios, min_norm, trust_coefficient, eps, min_ratio, max_ratio
  )
  return scale_by_rule(rule, weight_dimension_numbers)


class TrustRatioRule(NamedTuple):
  """What is done to the update of one parameter.

  Attributes:
    ratios: Function from update, parameter and axes of its matrices to ratios.
    scale: Function from update, parameter and ratios to the scaled update.
  """

  ratios: Callable[[jax.Array, jax.Array, MatrixAxes], Ratios]
  scale: Callable[[jax.Array, jax.Array, Ratios], jax.Array]


def trust_ratio_rule(
  norm: Norm,
  ratios: Iterable[Ratio],
  min_norm: Number,
  trust_coefficient: Number,
  eps: Number,
  min_ratio: Number | None,
  max_ratio: Number | None,
) -> TrustRatioRule:
  """Returns the rule with these settings, checked to be in range."""
  ratios_of = functools.partial(
    trust_ratios,
    names=check_ratios(ratios),
    norm=norm,
    min_norm=arguments.at_least_zero('min_norm', min_norm),
    trust_coefficient=arguments.above_zero(
      'trust_coefficient', trust_coefficient
    ),
    eps=arguments.at_least_zero('eps', eps),
  )
  min_ratio, max_ratio = _check_bounds(min_ratio, max_ratio)

  def scale(update: jax.Array, param: jax.Array, ratios: Ratios) -> jax.Array:
    largest = largest_ratio(
      ratios.values(), 1 if min_ratio is None else min_ratio
    )
    bounded = jnp.clip(largest, min_ratio, max_ratio)
    return (bounded * widen(update)).astype(common_dtype(update, param))

  return TrustRatioRule(ratios_of, scale)


def scale_by_rule(
  rule: TrustRatioRule, weight_dimension_numbers: WeightDimensionNumbers
) -> optax.GradientTransformation:
  """Returns the transform that applies a rule to each parameter."""
  return per_parameter(
    lambda update, param, axes: rule.scale(
      update, param, rule.ratios(update, param, axes)
    ),
    weight_dimension_numbers,
  )


def _check_bounds(
  min_ratio: Number | None,
  max_ratio: Number | None,
) -> tuple[Number | None, Number | None]:
  """Returns the bounds of the ratio, checked to be in order."""
  least = 0.0
  if min_ratio is not None:
    min_ratio = arguments.above_zero('min_ratio', min_ratio)
    if not isinstance(min_ratio, jax.core.Tracer):
      least = float(jax.device_get(min_ratio))
  if max_ratio is not None:
    max_ratio = arguments.number(
      'max_ratio',
      max_ratio,
      'a finite number > 0 that is not below min_ratio',
      lambda x: x > 0 and x >= least,
    )
  return min_ratio, max_ratio


def check_ratios(ratios: Iterable[Ratio]) -> tuple[Ratio, ...]:
  """Returns the ratios as a tuple, checked to be known and not empty."""
  is_collection = isinstance(ratios, Iterable) and not isinstance(ratios, str)
  names = list(ratios) if is_collection else []
  if not names or not all(name in RATIOS for name in names):
    raise ValueError(
      f'ratios must hold one or more of {RATIOS}, got {ratios!r}.'
    )
  return tuple(name for name in RATIOS if name in names)
