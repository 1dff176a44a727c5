"""Optimizers by name, with schedule, masks and dimension numbers."""

from collections.abc import Callable
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from examples.gpt2.config import RunConfig
from examples.gpt2.devices.sharding import by_path, path_name
import merit_optax

OTHERS_B1 = 0.9
"""Decay of Adam's first moment beside Muon, whose own decays more slowly."""


def make_schedule(config: RunConfig) -> optax.Schedule:
  """Returns the learning rate by the number of steps done."""
  warmup_steps = config.warmup_steps
  if warmup_steps is None:
    warmup_steps = round(config.warmup_share * config.steps)
  peak = config.learning_rate
  # Optax's of warm-up and cosine in one asks whether the peak is 0, which may
  # be traced. All of it may be warm-up; Optax wants a step of the rest.
  rest = max(1, config.steps - warmup_steps)
  return optax.join_schedules(
    [
      optax.linear_schedule(peak / max(1, warmup_steps), peak, warmup_steps),
      _after_warmup(config, max(1, warmup_steps), rest),
    ],
    [warmup_steps],
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
  decay_steps = config.decay_steps
  if decay_steps is None:
    decay_steps = config.steps // 5
  decay_steps = min(decay_steps, steps)
  power = {'linear': 1.0, '1-sqrt': 0.5}[config.decay_shape]

  def stable_then_decay(step: jax.typing.ArrayLike) -> jax.Array:
    done = jnp.maximum(step - (steps - decay_steps), 0) / max(1, decay_steps)
    return peak * (1 - (1 - least) * jnp.minimum(done, 1) ** power)

  return stable_then_decay


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
  """Returns the optimizer of a run."""
  return with_clips(_OPTIMIZERS[config.optimizer](config), config)


def with_clips(
  optimizer: optax.GradientTransformation, config: RunConfig
) -> optax.GradientTransformation:
  """Puts an optimizer behind the clip of the gradient, and before QK-clip."""
  optimizer = optax.chain(
    optax.clip_by_global_norm(config.max_gradient_norm), optimizer
  )
  if config.qk_clip is None:
    return optimizer
  query, key = (
    {r'(^|/)qkv/': merit_optax.AttentionHeads(-3, layers=0, part=(-2, part))}
    for part in (slice(0, -2), -2)
  )
  clip = merit_optax.qk_clip(config.qk_clip, query=query, key=key)
  return optax.chain(optimizer, clip)


def describe(config: RunConfig, params: Any) -> str:
  """Returns a table of what Muon or MERIT does with each parameter."""
  settings = merit_settings(config)
  shown = ('weight_dimension_numbers', 'trust_ratio_mask', 'mask', 'ratios')
  return merit_optax.describe(
    params, **{name: settings[name] for name in shown}
  )


def merit_settings(config: RunConfig) -> dict[str, Any]:
  """Returns the arguments of :func:`merit_optax.merit`."""
  is_unbounded = math.isinf(config.clip_threshold)
  matrices_only = config.trust_ratio == 'matrices'
  return _adam_settings(config) | dict(
    clip_threshold=None if is_unbounded else config.clip_threshold,
    ratios=config.ratios,
    min_norm=config.min_norm,
    trust_ratio_mask=is_matrix if matrices_only else None,
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


def is_matrix(params: Any) -> Any:
  """Returns a tree of whether each parameter is a weight matrix."""
  return jax.tree.map_with_path(
    lambda path, _: path_name(path[-1:]) in ('kernel', 'embedding'), params
  )


def _adam_settings(config: RunConfig) -> dict[str, Any]:
  return dict(
    learning_rate=make_schedule(config),
    b1=config.b1,
    b2=config.b2,
    weight_decay=config.weight_decay,
    mask=decay_mask(config),
  )


def decay_mask(config: RunConfig) -> Callable[[Any], Any] | None:
  """Returns what says which parameters decay, None for all."""
  masks = {'matrices': is_matrix, 'hidden': merit_optax.hidden_matrices}
  return masks.get(config.decay)


def _specs(config: RunConfig) -> Callable[[Any], Any]:
  return functools.partial(dimension_numbers, qkv=config.qkv)


def size_of_adam(rows: int, columns: int) -> float:
  """Returns what gives an orthogonal matrix the size of Adam's updates."""
  return 0.2 * math.sqrt(max(rows, columns))


def _muon(config: RunConfig) -> optax.GradientTransformation:
  return merit_optax.muon(
    make_schedule(config),
    config.b1,
    weight_decay=config.weight_decay,
    others=_others(config, bias_correction=True),
    weight_dimension_numbers=_specs(config),
    ns_dtype=_ns_dtype(config),
  )


def _muon_hyperball(config: RunConfig) -> optax.GradientTransformation:
  return merit_optax.muon_hyperball(
    make_schedule(config),
    config.b1,
    others=_others(config, bias_correction=False),
    weight_dimension_numbers=_specs(config),
    ns_dtype=_ns_dtype(config),
  )


def _others(
  config: RunConfig, *, bias_correction: bool
) -> optax.GradientTransformation:
  """Returns Adam for all but hidden matrices."""
  rate = make_schedule(config)
  adam_rate = 1.0 if config.adam_rate is None else config.adam_rate
  decay, mask = config.weight_decay, decay_mask(config)
  if config.decay == 'hidden':
    decay, mask = 0.0, None
  return optax.chain(
    merit_optax.scale_by_adam(
      OTHERS_B1, config.b2, bias_correction=bias_correction
    ),
    optax.add_decayed_weights(decay, mask),
    optax.scale_by_learning_rate(lambda step: adam_rate * rate(step)),
  )


def _ns_dtype(config: RunConfig) -> str:
  """Returns the dtype of Muon's products, by default that of activations."""
  return config.ns_dtype or config.dtype


_OPTIMIZERS = {
  'merit': lambda config: merit_optax.merit(**merit_settings(config)),
  'adamw': lambda config: optax.adamw(**_adam_settings(config)),
  'lamb': lambda config: optax.lamb(**_adam_settings(config)),
  'lion': lambda config: optax.lion(**_adam_settings(config)),
  'muon': _muon,
  'muon-hyperball': _muon_hyperball,
}
