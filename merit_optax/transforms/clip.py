"""The element-wise clip of the update, applied before the learning rate."""

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal import arguments
from merit_optax._internal.arguments import Number
from merit_optax._internal.trees import as_arrays


def elementwise_clip(
  max_delta: Number = 1.0,
) -> optax.GradientTransformation:
  r"""Clips the magnitude of every element of the updates.

  .. math::

    u_i \leftarrow u_i \min(1, \delta / |u_i|)

  with :math:`\delta` = ``max_delta``. For real numbers this is
  :func:`optax.clip`; complex numbers, which ``optax.clip`` refuses, keep their
  phase.

  Args:
    max_delta: Largest magnitude of an element, > 0.

  Returns:
    A stateless :class:`optax.GradientTransformation` that preserves shapes and
    dtypes.

  Raises:
    ValueError: If ``max_delta`` is not a finite number > 0.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> transform = merit_optax.elementwise_clip(1.0)
    >>> updates, _ = transform.update(
    ...     jnp.array([0.5, -3.0]), transform.init(None))
    >>> print(updates)
    [ 0.5 -1. ]

  References:
    Luo et al., `MERIT: Maximum-normalized Element-wise Ratio for Language
    Model Large-batch Training <https://arxiv.org/abs/2508.20577>`_, 2025,
    Algorithm 1.
  """
  max_delta = arguments.above_zero('max_delta', max_delta)

  def clip(update: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(update):
      size = jnp.abs(update)
      # Zeros divide by max_delta, or their gradient would be NaN.
      scale = max_delta / jnp.maximum(size, max_delta)
      clipped = jnp.where(size > max_delta, update * scale, update)
    else:
      clipped = jnp.clip(update, jnp.negative(max_delta), max_delta)
    return clipped.astype(update.dtype)

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params
    return jax.tree.map(clip, as_arrays(updates, 'updates')), state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)
