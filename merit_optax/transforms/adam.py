"""Adam's direction, with a switch for the bias correction."""

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax._internal.dtypes import (
  cast_to_both,
  check_decay,
  check_real,
  corrected,
  moment_dtype,
  widen,
)
from merit_optax._internal.trees import as_arrays, check_shapes


def scale_by_adam(
  b1: Number = 0.9,
  b2: Number = 0.95,
  eps: Number = 1e-6,
  eps_root: Number = 0.0,
  mu_dtype: jax.typing.DTypeLike | None = None,
  *,
  nu_dtype: jax.typing.DTypeLike | None = None,
  bias_correction: bool = False,
) -> optax.GradientTransformation:
  r"""Rescales updates according to the Adam algorithm.

  For a gradient :math:`g`,

  .. math::

    m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
    v &\leftarrow \beta_2 v + (1 - \beta_2) |g|^2 \\
    u &= m / (\sqrt{v + \bar\varepsilon} + \varepsilon)

  where :math:`m` is the first moment, :math:`v` the second moment,
  :math:`\varepsilon` is ``eps``, :math:`\bar\varepsilon` is ``eps_root`` and
  :math:`u` the update. With ``bias_correction=True``, :math:`m` and :math:`v`
  are divided by :math:`1 - \beta^t` before the last line, and the transform is
  :func:`optax.scale_by_adam`, which has other defaults (``b2`` 0.999, ``eps``
  1e-8, with bias correction).

  Arithmetic is done in float32 or wider. Moments keep the dtypes with which
  they were initialized, so the type of the state never changes (the first
  moment of :func:`optax.scale_by_adam` becomes float32 if parameters are
  bfloat16 and gradients float32).

  Args:
    b1: Decay rate of the first moment, in [0, 1).
    b2: Decay rate of the second moment, in [0, 1).
    eps: Added to the root of the second moment, >= 0. With both ``eps`` and
      ``eps_root`` at zero, a zero gradient gives NaN.
    eps_root: Added to the second moment inside the root, >= 0. Needed to
      differentiate through the update.
    mu_dtype: dtype of the first moment; ``None`` for that of the parameter.
    nu_dtype: dtype of the second moment; ``None`` for that of the parameter.
      The decay rates of moments in half precision are limited to 0.9960 in
      bfloat16 and 0.9995 in float16: above that, a moment would round back to
      its old value and never decay. Close to the limit it follows only large
      changes; up to 0.95 bfloat16 was tested in training. In float16 it is
      zero for gradients below about 1e-3 (``b2`` 0.95): give a wider dtype.
    bias_correction: Whether to correct the moments for their initialization at
      zero. MERIT does not, because its trust ratio cancels a factor common to
      all elements.

  Returns:
    A :class:`optax.GradientTransformation` whose state is an
    :class:`optax.ScaleByAdamState`. Updates have the shape of the gradients
    and the dtype to which gradient and first moment promote.

  Raises:
    ValueError: If an argument is out of range, if ``mu_dtype`` or ``nu_dtype``
      is no real floating-point dtype of 16 bits or more, or if a moment would
      never decay in its dtype (by ``init`` if that dtype is the parameter's);
      by ``init`` if ``mu_dtype`` is given for complex parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> transform = merit_optax.scale_by_adam(b1=0.5, b2=0.75, eps=0.0)
    >>> params = jnp.zeros(2)
    >>> state = transform.init(params)
    >>> updates, state = transform.update(jnp.array([4.0, -1.0]), state)
    >>> print(updates)
    [ 1. -1.]

  References:
    Luo et al., `MERIT: Maximum-normalized Element-wise Ratio for Language
    Model Large-batch Training <https://arxiv.org/abs/2508.20577>`_, 2025,
    Algorithm 1.

    Kingma et al., `Adam: A Method for Stochastic Optimization
    <https://arxiv.org/abs/1412.6980>`_, 2014.
  """
  b1 = arguments.decay_rate('b1', b1)
  b2 = arguments.decay_rate('b2', b2)
  eps = arguments.at_least_zero('eps', eps)
  eps_root = arguments.at_least_zero('eps_root', eps_root)
  bias_correction = arguments.boolean('bias_correction', bias_correction)
  mu_dtype = moment_dtype('mu_dtype', mu_dtype)
  nu_dtype = moment_dtype('nu_dtype', nu_dtype)
  check_decay('b1', b1, mu_dtype)
  check_decay('b2', b2, nu_dtype)

  def init_fn(params: optax.Params) -> optax.ScaleByAdamState:
    params = as_arrays(params)
    check_decay('b1', b1, mu_dtype, params)
    check_decay('b2', b2, nu_dtype, params)
    check_real('mu_dtype', mu_dtype, params)
    return optax.ScaleByAdamState(
      count=jnp.zeros([], jnp.int32),
      mu=optax.tree.zeros_like(params, dtype=mu_dtype),
      nu=optax.tree.zeros_like(params, dtype=nu_dtype),
    )

  def update_fn(
    updates: optax.Updates,
    state: optax.ScaleByAdamState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
    del params
    updates = as_arrays(updates, 'updates')
    check_shapes(state.mu, updates)
    g, mu, nu = jax.tree.map(widen, (updates, state.mu, state.nu))
    mu = optax.tree.update_moment(g, mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(g, nu, b2, 2)
    count = optax.safe_increment(state.count)
    new_state = optax.ScaleByAdamState(
      count=count,
      mu=optax.tree.cast_like(mu, state.mu),
      nu=optax.tree.cast_like(nu, state.nu),
    )
    if bias_correction:
      mu = corrected(mu, b1, count)
      nu = corrected(nu, b2, count)
    u = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), mu, nu)
    return jax.tree.map(cast_to_both, u, updates, state.mu), new_state

  return optax.GradientTransformation(init_fn, update_fn)
