"""Adam for what is no hidden matrix, beside an optimizer of these."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from merit_optax import _arguments, _masks
from merit_optax._hidden import (
  Hidden,
  check_hidden,
  check_names_of_hidden,
  hidden_matrices,
  is_vector,
)
from merit_optax._leaves import as_arrays, with_update
from merit_optax._paths import path_namer
from merit_optax._per_parameter import NO_PARAMS_MESSAGE


def with_adam(
  hidden_optimizer: optax.GradientTransformation,
  adam: optax.GradientTransformation,
  learning_rates: Mapping[str, optax.ScalarOrSchedule],
  weight_decay: optax.ScalarOrSchedule,
  weight_decay_mask: Any | Callable[[optax.Params], Any] | None,
  hidden: Hidden,
  has_default_numbers: bool,
) -> optax.GradientTransformationExtraArgs:
  """Returns the partition of hidden matrices and of what Adam updates.

  Args:
    hidden_optimizer: Optimizer of hidden matrices.
    adam: Direction of Adam.
    learning_rates: Those of Adam: of ``'vectors'``, if they have one of their
      own, and of all ``'others'``.
    weight_decay: Weight decay of what Adam updates.
    weight_decay_mask: What of that decays.
    hidden: Which parameters are hidden matrices.
    has_default_numbers: Whether dimension numbers follow from names and shapes,
      which are checked by ``init`` then.
  """
  weight_decay = _arguments.weight_decay('adam_weight_decay', weight_decay)
  if weight_decay_mask is not None:
    weight_decay_mask = _masks.checked(
      'adam_weight_decay_mask', weight_decay_mask
    )
  parts = {
    name: optax.chain(
      adam,
      optax.add_decayed_weights(weight_decay, weight_decay_mask),
      optax.scale_by_learning_rate(rate),
    )
    for name, rate in learning_rates.items()
  }
  hidden = check_hidden(hidden)

  def labels(params: optax.Params) -> Any:
    name_of = path_namer(params)

    def label(path: Any, param: Any, is_hidden: bool) -> str:
      if is_hidden:
        return 'hidden'
      has_own_rate = 'vectors' in parts and is_vector(name_of(path), param)
      return 'vectors' if has_own_rate else 'others'

    return jax.tree_util.tree_map_with_path(
      label, params, hidden_matrices(params, hidden)
    )

  both = optax.partition({'hidden': hidden_optimizer, **parts}, labels)

  def init_fn(params: optax.Params) -> optax.OptState:
    params = as_arrays(params)
    # Placeholders of optax.tree.map_params have no leaves.
    if has_default_numbers and jax.tree.leaves(params):
      check_names_of_hidden(params, hidden)
    return both.init(params)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    if params is None:
      raise ValueError(NO_PARAMS_MESSAGE)
    # A partition takes no params with leaves that have no update.
    params = with_update(params, updates)
    updates, state = both.update(updates, state, params, **extra_args)
    return updates, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
