"""What MERIT would do to each parameter, for steps that are watched."""

from collections.abc import Callable
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from merit_optax._adam import scale_by_adam
from merit_optax._clip import elementwise_clip
from merit_optax._describe import scaled_axes
from merit_optax._dimension_numbers import MatrixAxes, path_name
from merit_optax._merit import merit
from merit_optax._norms import RATIOS, largest_ratio, trust_ratios
from merit_optax._trust_ratio import check_ratios


def merit_statistics(
  *args: Any, **kwargs: Any
) -> Callable[[Any, Any, Any], dict[str, jax.Array]]:
  r"""Makes a function that tells what a MERIT step does to each parameter.

  It computes the step anew from gradients, state and parameters, so that steps
  on which it is not called cost nothing, and the state holds nothing for it.

  Args:
    *args: Positional arguments of :func:`merit_optax.merit`, the same as those
      of the optimizer that is watched.
    **kwargs: Keyword arguments of it.

  Returns:
    A function ``(gradients, state, params)`` to a flat dictionary of float32
    scalars, which may be jitted. ``state`` is the state before the step, of
    ``merit`` or of any optimizer that has one Adam state in it; ``gradients``
    are those that reach ``merit`` (clipped, say). Trees of ``nnx.Optimizer``
    (``optimizer.opt_state`` and ``nnx.State``) fit too. Keys are the path of a
    parameter (of those that are not empty), a slash, and

    - ``trust_ratio_min``, ``trust_ratio_median``, ``trust_ratio_max``: over all
      elements (the median sorts them);
    - ``decided_by_weight``, ``decided_by_row``, ``decided_by_column``: share of
      elements whose ratio is the largest (of equal ones the first counts);
    - ``fallback``: share of elements with ratio 1, since a norm is zero;
    - ``clipped``: share of elements that the clip changes;
    - ``update_to_weight``: :math:`\max |\Delta w| / \max |w|`, infinite where a
      parameter that is zero moves.

  Raises:
    ValueError: As ``merit`` does; by the function if the state has no Adam
      state, or several, or one for other parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> import merit_optax
    >>> settings = dict(learning_rate=0.5, weight_decay=0.0)
    >>> optimizer = merit_optax.merit(**settings)
    >>> statistics = merit_optax.merit_statistics(**settings)
    >>> params = {'w': jnp.array([[4.0, 2.0], [1.0, 0.5]])}
    >>> gradients = {'w': jnp.ones((2, 2))}
    >>> watched = statistics(gradients, optimizer.init(params), params)
    >>> print(watched['w/decided_by_row'], watched['w/update_to_weight'])
    0.0 0.125
  """
  merit(*args, **kwargs)  # Checks the arguments.
  bound = inspect.signature(merit).bind(*args, **kwargs)
  bound.apply_defaults()
  settings = bound.arguments

  def statistics(
    gradients: Any, state: Any, params: Any
  ) -> dict[str, jax.Array]:
    adam = _align_state(_find_adam(state), params)
    gradients = _align(gradients, params)
    count = adam.count
    z = _decayed_direction(settings, gradients, adam, params)
    axes = scaled_axes(
      settings['weight_dimension_numbers'], settings['trust_ratio_mask'], params
    )
    learning_rate = _at(settings['learning_rate'], count)
    treedef: Any = jax.tree.structure(params)
    result = {}
    for (path, w), *leaf in zip(
      jax.tree_util.tree_leaves_with_path(params),
      *(treedef.flatten_up_to(tree) for tree in (z, axes)),
      strict=True,
    ):
      if w.size == 0:
        continue
      for name, value in _leaf_statistics(
        settings, learning_rate, w, *leaf
      ).items():
        result[f'{path_name(path)}/{name}'] = value.astype(jnp.float32)
    return result

  return statistics


def _leaf_statistics(
  settings: dict[str, Any],
  learning_rate: jax.typing.ArrayLike,
  param: jax.Array,
  z: jax.Array,
  axes: MatrixAxes | None,
) -> dict[str, jax.Array]:
  """Returns the statistics of one parameter."""
  parts: dict[str, jax.Array] = {}
  if axes is not None:
    ratios = check_ratios(settings['ratios'])
    parts = trust_ratios(z, param, axes, ratios, settings['min_norm'])
  ratio = largest_ratio(parts.values()) if parts else jnp.ones(())
  ratio = jnp.broadcast_to(ratio, param.shape)
  update = ratio * z
  clipped = update
  if settings['clip_threshold'] is not None:
    clip = elementwise_clip(settings['clip_threshold'])
    clipped, _ = clip.update(update, optax.EmptyState())
  moved = jnp.max(jnp.abs(learning_rate * clipped))
  return {
    'trust_ratio_min': jnp.min(ratio),
    'trust_ratio_median': jnp.median(ratio),
    'trust_ratio_max': jnp.max(ratio),
    **_shares(parts, param.shape),
    'clipped': jnp.mean(jnp.abs(update) > jnp.abs(clipped)),
    'update_to_weight': jnp.where(
      moved > 0, moved / jnp.max(jnp.abs(param)), moved
    ),
  }


def _shares(
  parts: dict[str, jax.Array], shape: tuple[int, ...]
) -> dict[str, jax.Array]:
  """Returns the share of elements that each ratio decides."""
  shares = {f'decided_by_{name}': jnp.zeros(()) for name in RATIOS}
  if not parts:
    return shares | {'fallback': jnp.zeros(())}
  ratios = jnp.stack([jnp.broadcast_to(x, shape) for x in parts.values()])
  is_void = jnp.max(ratios, axis=0) == jnp.inf
  first = jnp.argmax(ratios, axis=0)
  for i, name in enumerate(parts):
    shares[f'decided_by_{name}'] = jnp.mean((first == i) & ~is_void)
  return shares | {'fallback': jnp.mean(is_void)}


def _decayed_direction(
  settings: dict[str, Any],
  gradients: Any,
  adam: optax.ScaleByAdamState,
  params: Any,
) -> Any:
  """Returns Adam's update plus the weight decay."""
  names = inspect.signature(scale_by_adam).parameters
  transform = scale_by_adam(**{name: settings[name] for name in names})
  u, _ = transform.update(gradients, adam)
  decay = optax.add_decayed_weights(
    _at(settings['weight_decay'], adam.count), settings['mask']
  )
  return decay.update(u, decay.init(params), params)[0]


def _at(value: Any, count: jax.Array) -> Any:
  """Returns a number, or a schedule's value."""
  return value(count) if callable(value) else value


def _find_adam(state: Any) -> optax.ScaleByAdamState:
  """Returns the only Adam state in the state of an optimizer."""
  found = [
    leaf for leaf in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(leaf)
  ]
  if len(found) != 1:
    raise ValueError(
      f'state must hold one optax.ScaleByAdamState, found {len(found)}.'
    )
  return found[0]


def _is_adam(x: Any) -> bool:
  return isinstance(x, optax.ScaleByAdamState)


def _align_state(
  adam: optax.ScaleByAdamState, params: Any
) -> optax.ScaleByAdamState:
  """Returns the state with plain arrays, in trees like the parameters."""
  return optax.ScaleByAdamState(
    count=jax.tree.leaves(adam.count)[0],
    mu=_align(adam.mu, params),
    nu=_align(adam.nu, params),
  )


def _align(tree: Any, params: Any) -> Any:
  """Returns the leaves of a tree in the structure of the parameters."""
  leaves = jax.tree.leaves(tree)
  treedef: Any = jax.tree.structure(params)
  if len(leaves) != treedef.num_leaves:
    raise ValueError(
      'gradients, state and params must belong together, got '
      f'{len(leaves)} arrays for {treedef.num_leaves} parameters.'
    )
  return jax.tree.unflatten(treedef, leaves)
