"""Trust ratios, weight-wise, row-wise and column-wise, for any direction.

The rule of MERIT is :func:`trust_ratios` and :func:`largest_ratio`.
"""

from collections.abc import Callable, Collection, Iterable
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal import arguments
from merit_optax._internal.dtypes import common_dtype, widen
from merit_optax._internal.trees import as_arrays, join, split
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  WeightDimensionNumbers,
  check_params,
  matrix_axes,
)
from merit_optax.matrices.norms import (
  RATIOS,
  Norm,
  l2_norm,
  max_norm,
  norms_by_name,
)
from merit_optax.matrices.per_parameter import aligned, per_parameter

# By name, each infinite where one of its norms is zero.
Ratios: TypeAlias = dict[str, jax.Array]


def trust_ratios(
  update: jax.Array,
  param: jax.Array,
  axes: MatrixAxes,
  *,
  names: Collection[str] = RATIOS,
  norm: Norm = max_norm,
  min_norm: jax.typing.ArrayLike = 0.0,
  trust_coefficient: jax.typing.ArrayLike = 1.0,
  eps: jax.typing.ArrayLike = 0.0,
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
  ratios: Iterable[jax.Array], without_norm: jax.typing.ArrayLike = 1
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
  eps: jax.typing.ArrayLike = 0.0,
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
    norm=max_norm,
    min_norm=min_norm,
    trust_coefficient=trust_coefficient,
    eps=eps,
    ratios=ratios,
    min_ratio=min_ratio,
    max_ratio=max_ratio,
    weight_dimension_numbers=weight_dimension_numbers,
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

  Norms are float32 sums, so the updates of two meshes differ by rounding. A
  norm below 1e-14 counts as zero.

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
    norm=l2_norm,
    min_norm=min_norm,
    trust_coefficient=trust_coefficient,
    eps=eps,
    ratios=ratios,
    min_ratio=min_ratio,
    max_ratio=max_ratio,
    weight_dimension_numbers=weight_dimension_numbers,
    calibrate=calibrate,
  )


def _scale_by_trust_ratio(
  *,
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
  calibrate = arguments.boolean('calibrate', calibrate)
  min_ratio, max_ratio = _check_bounds(min_ratio, max_ratio)
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

  def scale(update: jax.Array, param: jax.Array, ratios: Ratios) -> jax.Array:
    largest = largest_ratio(
      ratios.values(), 1 if min_ratio is None else min_ratio
    )
    bounded = jnp.clip(largest, min_ratio, max_ratio)
    return (bounded * widen(update)).astype(common_dtype(update, param))

  if calibrate:
    return _scale_by_relative_ratios(
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


def check_ratios(ratios: Collection[str]) -> tuple[str, ...]:
  """Returns the ratios as a tuple, checked to be known and not empty."""
  is_collection = isinstance(ratios, Iterable) and not isinstance(ratios, str)
  names = list(ratios) if is_collection else []
  if not names or not all(name in RATIOS for name in names):
    raise ValueError(
      f'ratios must hold one or more of {RATIOS}, got {ratios!r}.'
    )
  return tuple(name for name in RATIOS if name in names)


# An update has a direction of its own if it is not longer than this many times
# what is left of it without its part along the parameter.
_MOSTLY_DECAY = 100


class CalibrationState(NamedTuple):
  """First ratios of all parameters.

  Attributes:
    first_ratios: Shape (ratios,), dtype float32: those of each parameter after
      the other. Zero before the first step of a ratio, infinite if a parameter
      was zero then.
  """

  first_ratios: jax.Array


def _scale_by_relative_ratios(
  ratios_of: Callable[[jax.Array, jax.Array, MatrixAxes], Ratios],
  scale: Callable[[jax.Array, jax.Array, Ratios], jax.Array],
  norm: Norm,
  weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
  """Returns the transform that scales by ratios relative to the first ones.

  Args:
    ratios_of: Function from update, parameter and axes of its matrices to
      ratios.
    scale: Function from update, parameter and relative ratios to an update.
    norm: The norm of the ratios.
    weight_dimension_numbers: As the user gave them.
  """

  def init_fn(params: optax.Params) -> CalibrationState:
    params = as_arrays(params)
    check_params(weight_dimension_numbers, params)
    # Placeholders of optax.tree.map_params have no leaves.
    if not jax.tree.leaves(params):
      return CalibrationState(join(()))
    axes = matrix_axes(weight_dimension_numbers, params)
    _refuse_parts(params, axes)
    ratios = jax.eval_shape(
      lambda x: join(jax.tree.map(ratios_of, x, x, axes)), params
    )
    # A type may tell that a mesh splits parameters, which these are not.
    return CalibrationState(jnp.zeros(ratios.shape, jnp.float32))

  def update_fn(
    updates: optax.Updates,
    state: CalibrationState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, CalibrationState]:
    updates, params, axes = aligned(updates, params, weight_dimension_numbers)
    ratios = jax.tree.map(ratios_of, updates, params, axes)
    if not jax.tree.leaves(ratios):
      return updates, state
    first = jax.tree.map(
      functools.partial(_first_ratios, norm),
      updates,
      params,
      axes,
      ratios,
      split(state.first_ratios, ratios),
    )
    relative = jax.tree.map(_relative, ratios, first)
    return (
      jax.tree.map(scale, updates, params, relative),
      CalibrationState(join(first)),
    )

  return optax.GradientTransformation(init_fn, update_fn)


def _refuse_parts(params: optax.Params, axes: Any) -> None:
  """Raises ``ValueError`` for matrices that lie side by side in one kernel."""
  structure: Any = jax.tree.structure(params)
  if any(a.parts for a in structure.flatten_up_to(axes)):
    raise ValueError(
      'weight_dimension_numbers must not hold FusedDimensionNumbers with '
      'calibrate=True.'
    )


def _first_ratios(
  norm: Norm,
  update: jax.Array,
  param: jax.Array,
  axes: MatrixAxes,
  ratios: Ratios,
  before: Ratios,
) -> Ratios:
  """Returns the first ratios, given those known before this step."""

  def first(name: str) -> jax.Array:
    # What would be zero if the update were a multiple of the parameter. It is
    # NaN where something is not finite. (The ratios may have other norms.)
    plain = trust_ratios(update, param, axes, names=(name,), norm=norm)[name]
    rest = widen(update) - widen(param) / plain
    lengths = trust_ratios(rest, update, axes, names=(name,), norm=norm)[name]
    is_first = (before[name] == 0) & (lengths < _MOSTLY_DECAY)
    return jnp.where(is_first, ratios[name], before[name])

  return {name: first(name) for name in ratios}


def _relative(now: jax.Array, first: jax.Array) -> jax.Array:
  """Returns ratios relative to the first ones, where these say something."""
  is_known = (first > 0) & (first < jnp.inf)
  relative = ratio(now, jnp.where(is_known, first, 1))
  return jnp.where(is_known, jnp.where(now == jnp.inf, now, relative), 1)
