"""Adam's direction, with a switch for the bias correction."""

import jax
import jax.numpy as jnp
import optax

from merit_optax import _arguments

# With 8 bits of significand, 0.995 * v rounds back to v: v would never decay.
_LARGEST_B2_IN_BFLOAT16 = 0.99


def scale_by_adam(
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.95,
  eps: jax.typing.ArrayLike = 1e-6,
  eps_root: jax.typing.ArrayLike = 0.0,
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
  :func:`optax.scale_by_adam`.

  Arithmetic is done in float32 or wider. Moments are stored in the dtypes that
  they were initialised with, so that the state never changes its type (the
  first moment of :func:`optax.scale_by_adam` turns into float32 when bfloat16
  parameters meet float32 gradients).

  Args:
    b1: Decay rate of the first moment, in [0, 1).
    b2: Decay rate of the second moment, in [0, 1).
    eps: Added to the root of the second moment, >= 0. With both ``eps`` and
      ``eps_root`` at zero, a zero gradient gives NaN.
    eps_root: Added to the second moment inside the root, >= 0. Needed to
      differentiate through the update.
    mu_dtype: dtype of the first moment; ``None`` for that of the parameter.
    nu_dtype: dtype of the second moment; ``None`` for that of the parameter. If
      either is bfloat16, ``b2`` must not be above 0.99: the moment would round
      back to its old value and never decay.
    bias_correction: Whether the moments are corrected for their start at zero.
      MERIT does not: its trust ratio cancels a factor common to all elements.

  Returns:
    A :class:`optax.GradientTransformation` whose state is an
    :class:`optax.ScaleByAdamState`. Updates have the shape of the gradients
    and the dtype to which gradient and first moment promote.

  Raises:
    ValueError: If an argument is outside its range, or if ``nu_dtype`` is
      bfloat16 and ``b2`` above 0.99, since such a moment would never decay.

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
  _arguments.check_decay_rate('b1', b1)
  _arguments.check_decay_rate('b2', b2)
  _arguments.check_at_least_zero('eps', eps)
  _arguments.check_at_least_zero('eps_root', eps_root)
  mu_dtype = _moment_dtype('mu_dtype', mu_dtype)
  nu_dtype = _moment_dtype('nu_dtype', nu_dtype)
  if nu_dtype == jnp.bfloat16:
    _arguments.check_number(
      'b2',
      b2,
      f'at most {_LARGEST_B2_IN_BFLOAT16} when nu_dtype is bfloat16 (the '
      'second moment would round back to its old value and never decay)',
      lambda x: x <= _LARGEST_B2_IN_BFLOAT16,
    )

  def init_fn(params: optax.Params) -> optax.ScaleByAdamState:
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
    g, mu, nu = jax.tree.map(_widen, (updates, state.mu, state.nu))
    mu = optax.tree.update_moment(g, mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(g, nu, b2, 2)
    count = optax.safe_increment(state.count)
    new_state = optax.ScaleByAdamState(
      count=count,
      mu=jax.tree.map(_cast_like, mu, state.mu),
      nu=jax.tree.map(_cast_like, nu, state.nu),
    )
    if bias_correction:
      mu = optax.tree.bias_correction(mu, b1, count)
      nu = optax.tree.bias_correction(nu, b2, count)
    u = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), mu, nu)
    return jax.tree.map(_cast_to_both, u, updates, state.mu), new_state

  return optax.GradientTransformation(init_fn, update_fn)


def _moment_dtype(
  name: str, dtype: jax.typing.DTypeLike | None
) -> jnp.dtype | None:
  """Returns the dtype of a moment, checked to be a floating one."""
  if dtype is None:
    return None
  try:
    canonical = jax.dtypes.canonicalize_dtype(dtype)
  except TypeError:
    canonical = None
  if canonical is None or not jnp.issubdtype(canonical, jnp.inexact):
    raise ValueError(
      f'{name} must be None or a floating-point dtype, got {dtype!r}.'
    )
  return canonical


def _widen(x: jax.Array) -> jax.Array:
  return jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))


def _cast_like(x: jax.Array, like: jax.Array) -> jax.Array:
  return x.astype(like.dtype)


def _cast_to_both(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(a.dtype, b.dtype))
