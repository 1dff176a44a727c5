"""Optimizers of the ablations that the library does not offer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from examples.gpt2.config import Config
from examples.gpt2.optim.optimizers import merit_settings
import merit_optax


def make_optimizer(arm: str, config: Config) -> optax.GradientTransformation:
  """Returns the optimizer of an arm, behind a clip of the gradient's norm.

  Args:
    arm: ``'l2'``: MERIT with l2 norms in the place of maxima.
      ``'decay_outside'``: MERIT whose weight decay is neither scaled by the
      ratio nor clipped, as in AdamW.
    config: Resolved settings, with ``optimizer='merit'``.
  """
  settings = merit_settings(config)
  decay = optax.add_decayed_weights(config.weight_decay, settings['mask'])
  clip = merit_optax.elementwise_clip(config.clip_threshold)
  return optax.chain(
    optax.clip_by_global_norm(config.max_gradient_norm),
    merit_optax.scale_by_adam(config.b1, config.b2),
    *_ARMS[arm](settings['weight_dimension_numbers'], decay, clip),
    optax.scale_by_learning_rate(settings['learning_rate']),
  )


def _l2(specs: Any, decay: Any, clip: Any) -> list[Any]:
  return [decay, scale_by_l2_trust_ratio(specs), clip]


def _decay_outside(specs: Any, decay: Any, clip: Any) -> list[Any]:
  ratio = merit_optax.scale_by_max_norm_trust_ratio(
    weight_dimension_numbers=specs
  )
  return [ratio, clip, decay]


_ARMS = {'l2': _l2, 'decay_outside': _decay_outside}


def scale_by_l2_trust_ratio(
  weight_dimension_numbers: Callable[[Any], Any],
) -> optax.GradientTransformation:
  """Scales by the largest of three ratios of l2 norms.

  As :func:`merit_optax.scale_by_max_norm_trust_ratio`, with l2 norms of the
  matrix, of its rows and of its columns.

  Args:
    weight_dimension_numbers: Function from parameters to a tree of
      :class:`optax.contrib.MuonDimensionNumbers`.
  """

  def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
    specs = weight_dimension_numbers(params)
    return jax.tree.map(_scale, updates, params, specs), state

  return optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)


def _scale(
  update: jax.Array, param: jax.Array, spec: MuonDimensionNumbers | None
) -> jax.Array:
  rows, columns = _axes(spec, param.ndim)
  groups = [rows + columns] + ([rows, columns] if rows else [])

  def norm(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))

  norms = [(norm(param, axes), norm(update, axes)) for axes in groups]
  void = jnp.zeros((), bool)
  largest = jnp.zeros(())
  for of_param, of_update in norms:
    void |= (of_param == 0) | (of_update == 0)
    ratio = of_param / jnp.where(of_update == 0, 1, of_update)
    largest = jnp.maximum(largest, ratio)
  return jnp.where(void, 1, largest) * update


def _axes(
  spec: MuonDimensionNumbers | None, ndim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the axes of rows, none if there is no matrix, and of columns."""
  if spec is None:
    return (), tuple(range(ndim))

  def as_tuple(axes: Any) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)

  return as_tuple(spec.reduction_axis), as_tuple(spec.output_axis)
