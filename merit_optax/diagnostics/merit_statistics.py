"""Statistics of what MERIT does to each parameter, for diagnostics steps."""

from collections.abc import Callable
import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from merit_optax._internal.arguments import Number
from merit_optax._internal.dtypes import widen
from merit_optax._internal.sharding import unsplit
from merit_optax._internal.trees import (
  numbers_as_arrays,
  path_namer,
  path_names,
)
from merit_optax.diagnostics.updates import align, by_name, update_to_weight
from merit_optax.matrices.dimension_numbers import (
  MatrixAxes,
  matrix_axes,
)
from merit_optax.matrices.masks import broadcast_mask
from merit_optax.matrices.norms import RATIOS, Ratio, max_norm
from merit_optax.optimizers.merit import merit
from merit_optax.transforms.clip import elementwise_clip
from merit_optax.transforms.trust_ratio import (
  check_ratios,
  largest_ratio,
  trust_ratios,
)


def merit_statistics(
  learning_rate: optax.ScalarOrSchedule, **settings: Any
) -> Callable[[Any, Any, Any], dict[str, jax.Array]]:
  r"""Creates a function that measures what MERIT does to each parameter.

  The function computes the step again from gradients, state and parameters. It
  costs nothing on steps on which it is not called, and needs nothing in the
  state. Schedules are evaluated at their own counts in the state, or else at
  Adam's. Numbers in the state of an ``optax.inject_hyperparams`` around
  ``merit`` take precedence over those given here.

  Args:
    learning_rate: As given to the :func:`merit_optax.merit` to be measured.
    **settings: Its other arguments, by name.

  Returns:
    A function from ``(gradients, state, params)`` to a flat dictionary of
    float32 scalars, which may be jitted. ``state`` is the state before the
    step, of ``merit`` or of any optimizer around it that holds a single
    :class:`optax.ScaleByAdamState`. If there are several, as in a partition of
    MERIT and AdamW, pass the state of MERIT's part. ``gradients`` are those
    that reach ``merit`` (after clipping, for example). Trees of
    ``nnx.Optimizer`` (``optimizer.opt_state`` and ``nnx.State``) work too. Keys
    are the path of a parameter (unless it is empty, masked out or not part of
    this branch of a partition), a slash, and

    - ``trust_ratio_min``, ``trust_ratio_median``, ``trust_ratio_max``: over all
      elements (the median sorts them);
    - ``decided_by_weight``, ``decided_by_row``, ``decided_by_column``: share of
      elements for which this ratio is the largest (of equal ones, the first);
    - ``fallback``: share of elements with ratio 1, because a norm is zero;
    - ``clipped``: share of elements that the clip changes;
    - ``update_to_weight``: :math:`\max |\Delta w| / \max |w|`, the largest
      float32 if a parameter that is zero moves. See
      :func:`merit_optax.update_statistics` for more, with any optimizer.

  Raises:
    TypeError: If ``merit`` has no argument of a name.
    ValueError: As ``merit`` does; by the function if the state does not hold
      exactly one state of Adam, or holds one for other parameters, if gradients
      and parameters differ in structure or shapes, or if two paths are the same
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
  merit(learning_rate, **settings)  # Checks the arguments.
  bound = inspect.signature(merit).bind(learning_rate, **settings)
  bound.apply_defaults()
  given = bound.arguments

  def statistics(
    gradients: Any, state: Any, params: Any
  ) -> dict[str, jax.Array]:
    adam, injected, counts = _find_adam(state)
    now = given | {
      name: number
      for name, number in injected.items()
      if name in given and not callable(given[name])
    }
    for name, count in counts.items():
      if callable(now[name]):
        now[name] = now[name](count)
    params, gradients = (
      _with_moments(numbers_as_arrays(tree), adam.mu)
      for tree in (params, gradients)
    )
    adam = adam._replace(mu=align(adam.mu, params), nu=align(adam.nu, params))
    # MERIT without ratios, clip and learning rate.
    direction = merit(
      **now
      | {
        'learning_rate': -1.0,
        'clip_threshold': None,
        'trust_ratio_mask': lambda _: False,
      }
    )
    z, _ = direction.update(
      align(gradients, params), (adam, *direction.init(params)[1:]), params
    )
    scaled = broadcast_mask('trust_ratio_mask', now['trust_ratio_mask'], params)
    axes = matrix_axes(
      now['weight_dimension_numbers'],
      jax.tree.map(
        lambda x, is_scaled: x if is_scaled else None, params, scaled
      ),
    )
    measure = functools.partial(
      _leaf_statistics,
      ratios=check_ratios(now['ratios']),
      min_norm=now['min_norm'],
      clip_threshold=now['clip_threshold'],
      learning_rate=now['learning_rate'],
    )
    return by_name(measure, params, z, axes)

  return statistics


# Parameters of equal shape are traced and lowered once.
@functools.partial(jax.jit, static_argnames=('axes', 'ratios'))
def _leaf_statistics(
  param: jax.Array,
  z: jax.Array,
  axes: MatrixAxes | None,
  *,
  ratios: tuple[Ratio, ...],
  min_norm: Number,
  clip_threshold: Number | None,
  learning_rate: Number,
) -> dict[str, jax.Array]:
  """Returns the statistics of one parameter."""
  parts: dict[str, jax.Array] = {}
  if axes is not None:
    parts = _ratios(param, z, axes, names=ratios, min_norm=min_norm)
  ratio = largest_ratio(parts.values()) if parts else jnp.ones(())
  ratio = jnp.broadcast_to(ratio, param.shape)
  update = clipped = ratio * widen(z)
  if clip_threshold is not None:
    clip = elementwise_clip(clip_threshold)
    clipped, _ = clip.update(update, optax.EmptyState())
  everywhere = tuple(range(param.ndim))
  largest_move, largest_weight = (
    widen(max_norm(x, everywhere)).squeeze()
    for x in (learning_rate * clipped, param)
  )
  # An array split over Explicit axes of a mesh cannot be sorted.
  in_order = jnp.sort(unsplit(ratio).ravel())
  middle = in_order[(ratio.size - 1) // 2], in_order[ratio.size // 2]
  return {
    'trust_ratio_min': jnp.min(ratio),
    'trust_ratio_median': (middle[0] + middle[1]) / 2,
    'trust_ratio_max': jnp.max(ratio),
    **_shares(parts),
    'clipped': jnp.mean(jnp.abs(update) > jnp.abs(clipped)),
    'update_to_weight': update_to_weight(largest_move, largest_weight),
  }


def _ratios(
  param: jax.Array, z: jax.Array, axes: MatrixAxes, **settings: Any
) -> dict[str, jax.Array]:
  """Returns the trust ratios of all matrices that lie side by side."""
  found = [
    {
      name: x if axes == axes.single else jnp.broadcast_to(x, p.shape)
      for name, x in trust_ratios(u, p, axes.single, **settings).items()
    }
    for p, u in zip(axes.split(param), axes.split(z), strict=True)
  ]
  return {name: axes.join([x[name] for x in found]) for name in found[0]}


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


class _Found(NamedTuple):
  """What the state of an optimizer says of MERIT.

  Attributes:
    adam: The state of Adam.
    injected: Numbers that are injected around it, by name.
    counts: Counts of steps for schedules, by argument.
  """

  adam: optax.ScaleByAdamState
  injected: dict[str, Any]
  counts: dict[str, Any]


def _find_adam(state: Any) -> _Found:
  """Returns the one state of Adam, and what stands around and beside it."""
  found = optax.tree.get_all_with_path(state, 'ScaleByAdamState')
  if len(found) != 1:
    raise ValueError(
      f'state must hold one optax.ScaleByAdamState, found {len(found)}. Of a '
      "partition with several, pass the state of MERIT's part, such as "
      "state.inner_states['hidden']."
    )
  ((path, adam),) = found
  injected: dict[str, Any] = {}
  counts = dict.fromkeys(_STATES_OF_SCHEDULES, adam.count)
  for where, outer in optax.tree.get_all_with_path(
    state, 'InjectStatefulHyperparamsState'
  ):
    if path[: len(where)] == where:
      injected |= {name: _leaf(x) for name, x in outer.hyperparams.items()}
      counts = dict.fromkeys(counts, outer.count)
  chain = path[:-1]
  for name, kind in _STATES_OF_SCHEDULES.items():
    for where, schedule in optax.tree.get_all_with_path(state, kind):
      if where[: len(chain)] == chain:
        counts[name] = schedule.count
  return _Found(
    adam._replace(count=_leaf(adam.count)),
    injected,
    {name: _leaf(count) for name, count in counts.items()},
  )


_STATES_OF_SCHEDULES = {
  'learning_rate': 'ScaleByScheduleState',
  'weight_decay': 'WeightDecaySchedule',
}


def _leaf(x: Any) -> Any:
  """Returns an array that may be in a box of nnx."""
  return jax.tree.leaves(x)[0]


def _with_moments(tree: Any, moments: Any) -> Any:
  """Returns a tree like the parameters, less those without a moment."""
  names = {*path_names(moments)}
  name_of = path_namer(tree)
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x if name_of(path) in names else optax.MaskedNode(), tree
  )
