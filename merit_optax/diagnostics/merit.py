"""Statistics of what MERIT does to each parameter, for diagnostics steps."""

from collections.abc import Callable
import functools
import inspect
from typing import Any, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal.dtypes import widen
from merit_optax._internal.sharding import whole
from merit_optax._internal.trees import numbers_as_arrays
from merit_optax.diagnostics.state import (
  find_merit,
  leaves_with_moments,
  settings_of_step,
)
from merit_optax.diagnostics.updates import align, by_name, update_to_weight
from merit_optax.matrices.dimension_numbers import MatrixAxes
from merit_optax.matrices.masks import checked, scaled_axes
from merit_optax.matrices.norms import RATIOS, max_norm
from merit_optax.optimizers.merit import merit
from merit_optax.transforms.adam import scale_by_adam
from merit_optax.transforms.clip import elementwise_clip
from merit_optax.transforms.trust_ratio import (
  check_ratios,
  largest_ratio,
  trust_ratios,
)

_Arguments = ParamSpec('_Arguments')
_Statistics: TypeAlias = Callable[[Any, Any, Any], dict[str, jax.Array]]
_OF_ADAM = (
  *('b1', 'b2', 'eps', 'eps_root', 'mu_dtype', 'nu_dtype'),
  'bias_correction',
)


def _takes_arguments_of(
  optimizer: Callable[_Arguments, Any],
) -> Callable[
  [Callable[[dict[str, Any]], _Statistics]], Callable[_Arguments, _Statistics]
]:
  """Gives a function of settings the arguments of an optimizer."""
  signature = inspect.signature(optimizer)

  def decorate(
    measure: Callable[[dict[str, Any]], _Statistics],
  ) -> Callable[_Arguments, _Statistics]:
    @functools.wraps(measure)
    def statistics(
      *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Statistics:
      given = signature.bind(*args, **kwargs)
      given.apply_defaults()
      optimizer(*given.args, **given.kwargs)  # Checks the arguments.
      return measure(given.arguments)

    statistics.__signature__ = signature.replace(  # type: ignore[attr-defined]
      return_annotation=_Statistics
    )
    return statistics

  return decorate


@_takes_arguments_of(merit)
def merit_statistics(  # noqa: D417
  given: dict[str, Any],
) -> Callable[[Any, Any, Any], dict[str, jax.Array]]:
  r"""Creates a function that measures what MERIT does to each parameter.

  The function recomputes the step from gradients, state and parameters, so it
  costs nothing on steps on which it is not called, and needs nothing in the
  state. Numbers that ``optax.inject_hyperparams`` keeps in the state take
  precedence over those given here, and schedules are evaluated at their counts
  in the state.

  Args:
    *args: As given to the :func:`merit_optax.merit` to be measured.
    **kwargs: Likewise.

  Returns:
    A function from ``(gradients, state, params)`` to a flat dictionary of
    float32 scalars, which may be jitted. ``state`` is the state before the
    step, of ``merit`` or of any optimizer that contains a single Adam state, or
    a single one of ``merit`` among others, as in an :func:`optax.partition`.
    ``gradients`` are those that reach ``merit`` (after clipping, for example).
    Trees of ``nnx.Optimizer`` (``optimizer.opt_state`` and ``nnx.State``) work
    too. Keys are the path of a parameter (unless it is empty, masked out or not
    part of this branch of a partition), a slash, and

    - ``trust_ratio_min``, ``trust_ratio_median``, ``trust_ratio_max``: over all
      elements (the median sorts them);
    - ``decided_by_weight``, ``decided_by_row``, ``decided_by_column``: share of
      elements for which this ratio is the largest (of equal ones, the first);
    - ``fallback``: share of elements with ratio 1, because a norm is zero;
    - ``clipped``: share of elements that the clip changes;
    - ``update_to_weight``: :math:`\max |\Delta w| / \max |w|`, infinite if a
      parameter that is zero moves. See :func:`merit_optax.update_statistics`
      for further measurements, with any optimizer.

  Raises:
    ValueError: As in ``merit``; by the function if the state contains no Adam
      state, or several, or one for other parameters, if gradients and
      parameters differ in structure or shapes, or if two paths are the same
      when written with slashes.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> settings = dict(learning_rate=0.5, weight_decay=0.0)
    >>> optimizer = merit_optax.merit(**settings)
    >>> statistics = merit_optax.merit_statistics(**settings)
    >>> params = {'w': jnp.array([[4.0, 2.0], [1.0, 0.5]])}
    >>> gradients = {'w': jnp.ones((2, 2))}
    >>> measured = statistics(gradients, optimizer.init(params), params)
    >>> print(measured['w/decided_by_row'], measured['w/update_to_weight'])
    0.0 0.125
  """

  def statistics(
    gradients: Any, state: Any, params: Any
  ) -> dict[str, jax.Array]:
    found = find_merit(state)
    settings = settings_of_step(given, found)
    params = numbers_as_arrays(params)
    gradients = align(gradients, params)
    params, gradients = (
      leaves_with_moments(tree, found.adam.mu) for tree in (params, gradients)
    )
    adam = optax.ScaleByAdamState(
      jax.tree.leaves(found.adam.count)[0],
      align(found.adam.mu, params),
      align(found.adam.nu, params),
    )
    z = _decayed_direction(settings, gradients, adam, params)
    axes = scaled_axes(
      settings['weight_dimension_numbers'], settings['trust_ratio_mask'], params
    )
    return by_name(
      params,
      jax.tree.map(
        lambda *leaf: _leaf_statistics(settings, *leaf), params, z, axes
      ),
    )

  return statistics


def _leaf_statistics(
  settings: dict[str, Any],
  param: jax.Array,
  z: jax.Array,
  axes: MatrixAxes | None,
) -> dict[str, jax.Array]:
  """Returns the statistics of one parameter."""
  if param.size == 0:
    return {}
  parts: dict[str, jax.Array] = {}
  if axes is not None:
    ratios = check_ratios(settings['ratios'])
    parts = trust_ratios(
      z, param, axes, names=ratios, min_norm=settings['min_norm']
    )
  ratio = largest_ratio(parts.values()) if parts else jnp.ones(())
  ratio = jnp.broadcast_to(ratio, param.shape)
  update = ratio * widen(z)
  clipped = update
  if settings['clip_threshold'] is not None:
    clip = elementwise_clip(settings['clip_threshold'])
    clipped, _ = clip.update(update, optax.EmptyState())
  everywhere = tuple(range(param.ndim))
  largest_move, largest_weight = (
    widen(max_norm(x, everywhere)).squeeze()
    for x in (settings['learning_rate'] * clipped, param)
  )
  return {
    'trust_ratio_min': jnp.min(ratio),
    'trust_ratio_median': _median(ratio),
    'trust_ratio_max': jnp.max(ratio),
    **_shares(parts),
    'clipped': jnp.mean(jnp.abs(update) > jnp.abs(clipped)),
    'update_to_weight': update_to_weight(largest_move, largest_weight),
  }


def _shares(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the share of elements that each ratio decides."""
  shares = {f'decided_by_{name}': jnp.zeros(()) for name in RATIOS}
  if not parts:
    return shares | {'fallback': jnp.zeros(())}
  # Broadcast by operators, which on a mesh of Explicit axes keep shardings.
  largest = functools.reduce(jnp.maximum, parts.values())
  is_void = largest == jnp.inf
  is_open = ~is_void
  for name, ratio in parts.items():
    is_decided = is_open & (ratio == largest)
    shares[f'decided_by_{name}'] = jnp.mean(is_decided)
    is_open &= ~is_decided
  return shares | {'fallback': jnp.mean(is_void)}


def _decayed_direction(
  settings: dict[str, Any],
  gradients: Any,
  adam: optax.ScaleByAdamState,
  params: Any,
) -> Any:
  """Returns Adam's update plus the weight decay."""
  transform = scale_by_adam(**{name: settings[name] for name in _OF_ADAM})
  u, _ = transform.update(gradients, adam)
  mask = settings['mask']
  if mask is not None:
    mask = checked('mask', mask)
  decay = optax.add_decayed_weights(settings['weight_decay'], mask)
  return decay.update(u, decay.init(params), params)[0]


def _median(x: jax.Array) -> jax.Array:
  """Returns the median, on a mesh of Explicit axes too, where nothing sorts."""
  return jnp.median(whole(x))
