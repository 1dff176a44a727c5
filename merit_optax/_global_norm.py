"""The clip of the gradient's norm, with the same bits on every mesh."""

import jax
import jax.numpy as jnp
import optax

from merit_optax import _arguments
from merit_optax._leaves import as_arrays
from merit_optax._norms import l2_norm, widen


def clip_by_global_norm(
  max_norm: jax.typing.ArrayLike,
) -> optax.GradientTransformation:
  r"""Scales all updates down so that their global norm is within a bound.

  For the updates :math:`u_1, u_2, \ldots` of all parameters,

  .. math::

    u_i \leftarrow u_i \min\left(1,
      \frac{c}{\sqrt{\sum_j \|u_j\|_2^2}}\right)

  where :math:`c` is ``max_norm``, as :func:`optax.clip_by_global_norm` does it.
  Unlike there, the norm is a sum that does not depend on the order in which
  devices add numbers up, and so the clipped updates have the same bits on every
  mesh. It reads an update several times, and over an axis that is sharded,
  devices exchange its maximum and several sums (eight for 128,256 elements),
  along one axis after the other.

  Args:
    max_norm: Largest global norm, > 0.

  Returns:
    A stateless :class:`optax.GradientTransformation`. Updates keep their
    dtypes; norms are computed in float32 or wider. If the global norm is not
    finite, all updates become zero or NaN.

  Raises:
    ValueError: If ``max_norm`` is not a finite number > 0.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> clip = merit_optax.clip_by_global_norm(1.0)
    >>> updates = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([4.0])}
    >>> updates, _ = clip.update(updates, clip.init(updates))
    >>> print(updates['a'], updates['b'])
    [0.6 0. ] [0.8]
  """
  max_norm = _arguments.above_zero('max_norm', max_norm)

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params
    updates = as_arrays(updates, 'updates')
    norms = [_norm(x) for x in jax.tree.leaves(updates) if x.size]
    if not norms:
      return updates, state
    norm = _norm(jnp.stack(norms))

    # Not a number stays that.
    factor = jnp.where(norm <= max_norm, 1, max_norm / norm)
    return jax.tree.map(
      lambda x: (widen(x) * factor).astype(x.dtype), updates
    ), state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)


def _norm(x: jax.Array) -> jax.Array:
  """Returns the Euclidean norm of all elements, shape ()."""
  return l2_norm(x, tuple(range(x.ndim))).reshape(())
