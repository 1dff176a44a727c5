"""Optimizers by name, with schedule and dimension numbers."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from examples.gpt2.config import RunConfig, in_steps
from examples.gpt2.devices.sharding import by_path
import merit_optax

_OTHERS_B1 = 0.9
"""Decay of Adam's first moment beside Muon, whose own decays more slowly."""


def make_schedule(config: RunConfig) -> optax.Schedule:
  """Returns the learning rate by the number of steps done."""
  peak, warmup = config.learning_rate, in_steps(config.warmup, config)
  # All of it may be warm-up; Optax wants a step of the rest.
  rest = max(1, config.steps - warmup)
  return optax.join_schedules(
    [
      optax.linear_schedule(peak / max(1, warmup), peak, warmup),
      _after_warmup(config, max(1, warmup), rest),
    ],
    [warmup],
  )


def _after_warmup(config: RunConfig, before: int, steps: int) -> optax.Schedule:
  """Returns the learning rate of the steps after the warm-up."""
  peak, least = config.learning_rate, config.min_rate
  if config.schedule == 'cosine':
    return optax.cosine_decay_schedule(peak, steps, least)
  if config.schedule == 'linear':
    return optax.linear_schedule(peak, least * peak, steps)
  if config.schedule == 'inverse-sqrt':
    return lambda step: (
      peak * jnp.maximum(jnp.sqrt(before / (before + step)), least)
    )
  decay = min(in_steps(config.decay, config), steps)
  power = {'linear': 1.0, '1-sqrt': 0.5}[config.decay_shape]

  def stable_then_decay(step: jax.typing.ArrayLike) -> jax.Array:
    done = jnp.maximum(step - (steps - decay), 0) / max(1, decay)
    return peak * (1 - (1 - least) * jnp.minimum(done, 1) ** power)

  return stable_then_decay


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
  """Returns the optimizer of a run, behind the clip of the gradient."""
  return optax.chain(
    optax.clip_by_global_norm(config.max_gradient_norm),
    _OPTIMIZERS[config.optimizer](config),
  )


def merit_settings(config: RunConfig) -> dict[str, Any]:
  """Returns the arguments of :func:`merit_optax.merit`."""
  is_unbounded = math.isinf(config.clip_threshold)
  return _adam_settings(config) | dict(
    clip_threshold=None if is_unbounded else config.clip_threshold,
    min_norm=config.min_norm,
    weight_dimension_numbers=_specs(config),
  )


def dimension_numbers(params: Any, qkv: str) -> Any:
  """Returns which axes of each parameter are rows and columns of a matrix.

  Query, key and value count as one matrix (``'fused'``), as three (``'split'``)
  or as three for each head (``'heads'``). Of groups of heads that share keys,
  the first heads of all count as a matrix, the second ones, and so on
  (``'split'``). The parameters are those of a model, or of one of its layers.
  """
  # The kernel's axes are (width, groups, heads + 2, features), after layers.
  columns = {'fused': (-3, -2, -1), 'split': (-3, -1), 'heads': (-1,)}[qkv]
  # Paths have slashes in merit_optax, dots here; 'blocks.0' is not stacked.
  stacked = {r'^blocks.\D': 1}
  overrides = {
    r'.qkv.kernel$': MuonDimensionNumbers((-4,), columns),
    r'.qkv.bias$': MuonDimensionNumbers((), columns),
  }

  def matching(patterns: dict[str, Any]) -> dict[str, Any]:
    """Returns the patterns that match a parameter; others are refused."""
    names = '\n'.join(by_path(params))
    return {k: x for k, x in patterns.items() if re.search(k, names, re.M)}

  return merit_optax.flax_dimension_numbers(
    params, stacked=matching(stacked), overrides=matching(overrides)
  )


def _specs(config: RunConfig) -> Any:
  return functools.partial(dimension_numbers, qkv=config.qkv)


def _adam_settings(config: RunConfig) -> dict[str, Any]:
  return dict(
    learning_rate=make_schedule(config),
    b1=config.b1,
    b2=config.b2,
    weight_decay=config.weight_decay,
  )


def _merit(config: RunConfig) -> optax.GradientTransformation:
  merit = merit_optax.merit(**merit_settings(config))
  if config.others == 'same':
    return merit
  adam = _adam(
    config, config.b1, (config.adam_rate or 0) / config.learning_rate
  )
  return merit_optax.partition_hidden(merit, others=adam)


def _muon(config: RunConfig) -> optax.GradientTransformation:
  return merit_optax.muon(
    make_schedule(config),
    config.b1,
    weight_decay=config.weight_decay,
    others=_adam(config, _OTHERS_B1, config.adam_rate or 0),
    weight_dimension_numbers=_specs(config),
    ns_dtype=config.dtype,
  )


def _muon_hyperball(config: RunConfig) -> optax.GradientTransformation:
  return merit_optax.muon_hyperball(
    make_schedule(config),
    config.b1,
    others=_adam(config, _OTHERS_B1, config.adam_rate or 0),
    weight_dimension_numbers=_specs(config),
    ns_dtype=config.dtype,
  )


def _adam(
  config: RunConfig, b1: float, share: float
) -> optax.GradientTransformation:
  """Returns Adam for other parameters, at a share of the learning rate."""
  rate = make_schedule(config)
  return optax.chain(
    merit_optax.scale_by_adam(
      b1,
      config.b2,
      # As in examples/study.
      bias_correction=config.optimizer != 'muon-hyperball',
    ),
    optax.add_decayed_weights(config.weight_decay),
    optax.scale_by_learning_rate(lambda step: share * rate(step)),
  )


_OPTIMIZERS = {
  'merit': _merit,
  'adamw': lambda config: optax.adamw(**_adam_settings(config)),
  'lamb': lambda config: optax.lamb(**_adam_settings(config)),
  'lion': lambda config: optax.lion(**_adam_settings(config)),
  'muon': _muon,
  'muon-hyperball': _muon_hyperball,
}
