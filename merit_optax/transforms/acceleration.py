"""MONA's acceleration of gradients, for any direction after it."""

from typing import NamedTuple

import jax
import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax._internal.dtypes import (
  cast_to_both,
  check_decay,
  check_real,
  moment_dtype,
  widen,
)
from merit_optax._internal.trees import as_arrays, check_shapes


class AccelerationState(NamedTuple):
  """Means of gradients.

  Attributes:
    mu: Exponential moving averages of the gradients, with the shapes of the
      parameters and their dtypes or ``mu_dtype``.
  """

  mu: optax.Updates


def add_acceleration(
  decay: Number = 0.99,
  coefficient: Number | None = None,
  mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
  r"""Adds an average of gradient differences to the gradients.

  It comes first in a chain, before the momentum. For a gradient :math:`g_t`,

  .. math::

    a_t &= \beta a_{t-1} + (1 - \beta) (g_t - g_{t-1}) \\
    g_t &\leftarrow g_t + \alpha a_t

  where :math:`\beta` is ``decay``, :math:`\alpha` is ``coefficient``, and
  :math:`a_0 = g_0 = 0`. Differences of gradients are large in directions of
  high curvature, from which a negative :math:`\alpha` leads away.

  The state is half as large as these formulas suggest: with the moving average
  :math:`m_t = \beta m_{t-1} + (1 - \beta) g_t` of the gradients themselves,
  :math:`a_t = (1 - \beta) (g_t - m_{t-1})`, so :math:`m` is all that is stored.
  For the default :math:`\alpha`, the result is :math:`(g_t + m_{t-1}) / 2`.

  Args:
    decay: Decay rate :math:`\beta` of the average, in [0, 1).
    coefficient: Coefficient :math:`\alpha`; ``None`` for
      :math:`-1 / (2 (1 - \beta))`.
    mu_dtype: dtype of the state; ``None`` for that of the parameter.

  Returns:
    A :class:`optax.GradientTransformation` whose state has one moving average
    for each parameter. Arithmetic is done in float32 or wider. Updates have the
    shape of the gradients and the dtype to which gradient and state promote.

  Raises:
    ValueError: If an argument is out of range, if ``mu_dtype`` is no real
      floating-point dtype of 16 bits or more, or if the average would never
      decay in its dtype (by ``init`` if that dtype is the parameter's); by
      ``init`` if ``mu_dtype`` is given for complex parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> transform = merit_optax.add_acceleration(decay=0.5, coefficient=-1.0)
    >>> state = transform.init(jnp.zeros(1))
    >>> for gradient in (4.0, 8.0, 8.0):
    ...   updates, state = transform.update(jnp.array([gradient]), state)
    ...   print(updates)
    [2.]
    [5.]
    [6.5]

  References:
    Li et al., `MONA: Muon Optimizer with Nesterov Acceleration for Scalable
    Language Model Training <https://arxiv.org/abs/2605.26842>`_, 2026.

    Zhao et al., `Exploring Landscapes for Better Minima along Valleys
    <https://arxiv.org/abs/2510.27153>`_, 2025, which adds the same term to
    other optimizers.
  """
  decay = arguments.decay_rate('decay', decay)
  if coefficient is not None:
    coefficient = arguments.number('coefficient', coefficient)
  mu_dtype = moment_dtype('mu_dtype', mu_dtype)
  check_decay('decay', decay, mu_dtype)
  weight = -0.5 if coefficient is None else coefficient * (1 - decay)

  def init_fn(params: optax.Params) -> AccelerationState:
    params = as_arrays(params)
    check_decay('decay', decay, mu_dtype, params)
    check_real('mu_dtype', mu_dtype, params)
    return AccelerationState(optax.tree.zeros_like(params, dtype=mu_dtype))

  def update_fn(
    updates: optax.Updates,
    state: AccelerationState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, AccelerationState]:
    del params
    updates = as_arrays(updates, 'updates')
    check_shapes(state.mu, updates)
    g, mu = jax.tree.map(widen, (updates, state.mu))
    accelerated = jax.tree.map(lambda g, m: g + weight * (g - m), g, mu)
    mu = optax.tree.update_moment(g, mu, decay, 1)
    return (
      jax.tree.map(cast_to_both, accelerated, updates, state.mu),
      AccelerationState(optax.tree.cast_like(mu, state.mu)),
    )

  return optax.GradientTransformation(init_fn, update_fn)
