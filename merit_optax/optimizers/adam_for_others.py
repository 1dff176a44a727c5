"""Adam for what is no hidden matrix, beside an optimizer of these."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from merit_optax._internal import arguments
from merit_optax._internal.trees import as_arrays, path_namer, with_update
from merit_optax.matrices import masks
from merit_optax.matrices.dimension_numbers import WeightDimensionNumbers
from merit_optax.matrices.per_parameter import NO_PARAMS_MESSAGE
from merit_optax.optimizers.hidden import (
  Hidden,
  check_hidden,
  check_matrices,
  hidden_matrices,
  is_vector,
)


class Others(NamedTuple):
  """What updates parameters that are no hidden matrices.

  Attributes:
    adam: Direction of Adam.
    learning_rate: Its learning rate.
    vector_learning_rate: That of vectors, None for the same.
    weight_decay: Weight decay.
    weight_decay_mask: What decays, None for all.
  """

  adam: optax.GradientTransformation
  learning_rate: optax.ScalarOrSchedule
  vector_learning_rate: optax.ScalarOrSchedule | None
  weight_decay: optax.ScalarOrSchedule
  weight_decay_mask: Any | Callable[[optax.Params], Any] | None


def with_adam(
  hidden_optimizer: optax.GradientTransformation,
  others: Others,
  hidden: Hidden,
  weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformationExtraArgs:
  """Returns the partition of hidden matrices and of what Adam updates.

  Args:
    hidden_optimizer: Optimizer of hidden matrices.
    others: What updates all other parameters.
    hidden: Which parameters are hidden matrices.
    weight_dimension_numbers: As they were given.
  """
  weight_decay = arguments.weight_decay(
    'adam_weight_decay', others.weight_decay
  )
  mask = others.weight_decay_mask
  if mask is not None:
    mask = masks.checked('adam_weight_decay_mask', mask)
  rates = {
    'others': arguments.learning_rate(
      'adam_learning_rate', others.learning_rate
    )
  }
  if others.vector_learning_rate is not None:
    rates['vectors'] = arguments.learning_rate(
      'vector_learning_rate', others.vector_learning_rate
    )
  parts = {
    name: optax.chain(
      others.adam,
      optax.add_decayed_weights(weight_decay, mask),
      optax.scale_by_learning_rate(rate),
    )
    for name, rate in rates.items()
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
    if jax.tree.leaves(params):
      check_matrices(params, hidden, weight_dimension_numbers)
    return both.init(params)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    if params is None:
      raise ValueError(NO_PARAMS_MESSAGE)
    updates = as_arrays(updates, 'updates')
    # A partition takes no params with leaves that have no update.
    params = with_update(params, updates)
    updates, state = both.update(updates, state, params, **extra_args)
    return updates, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
