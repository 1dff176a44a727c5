"""Optimizers by name, with their defaults, and learning rates by the step.

To add one, add it to :data:`OPTIMIZERS`: the flags, the presets, the checks and
the checkpoints follow.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

import merit_optax

if TYPE_CHECKING:
  from examples.gpt2.config import Config

# Of Adam's first moment beside Muon, whose own decays more slowly.
_OTHERS_B1 = 0.9
GPT2_WIDTH = 768  # Of GPT-2 small.


class Optimizer(NamedTuple):
  """An optimizer that a run may choose."""

  make: Callable[[Config], optax.GradientTransformation]
  # The settings that it has, each with its default: a value, or a function of
  # the settings with those before it. The flag of a setting that stands here
  # for other optimizers only is refused. A setting of the model, such as
  # init_std, may get another default too.
  defaults: dict[str, Any]


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """Returns the optimizer of a run, behind the clip of the gradient."""
  return optax.chain(
    optax.clip_by_global_norm(config.max_gradient_norm),
    OPTIMIZERS[config.optimizer].make(config),
  )


def make_schedule(config: Config) -> optax.Schedule:
  """Returns the learning rate by the number of steps done."""
  peak, warmup = config.learning_rate, in_steps(config.warmup, config.steps)
  return optax.join_schedules(
    [
      optax.linear_schedule(peak / max(1, warmup), peak, warmup),
      _schedule_after(config, warmup),
    ],
    [warmup],
  )


def _schedule_after(config: Config, warmup: int) -> optax.Schedule:
  """Returns the learning rate by the number of steps after the warm-up."""
  peak, least = config.learning_rate, config.min_rate
  # All of it may be warm-up; Optax wants a step of the rest.
  steps = max(1, config.steps - warmup)
  if config.schedule == 'cosine':
    return optax.cosine_decay_schedule(peak, steps, least)
  if config.schedule == 'linear':
    return optax.linear_schedule(peak, least * peak, steps)
  if config.schedule == 'inverse-sqrt':
    start = max(1, warmup)
    return lambda step: (
      peak * jnp.maximum(jnp.sqrt(start / (start + step)), least)
    )
  decay = min(in_steps(config.decay, config.steps), steps)
  power = {'linear': 1.0, '1-sqrt': 0.5}[config.decay_shape]

  def stable_then_decay(step: jax.typing.ArrayLike) -> jax.Array:
    done = jnp.maximum(step - (steps - decay), 0) / max(1, decay)
    return peak * (1 - (1 - least) * jnp.minimum(done, 1) ** power)

  return stable_then_decay


def in_steps(value: float, steps: int) -> int:
  """Returns a number of steps, which below 1 is a share of all steps."""
  return round(value * steps if value < 1 else value)


def merit_settings(config: Config) -> dict[str, Any]:
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
  stacked = {r'^blocks/\D': 1}
  overrides = {
    r'/qkv/kernel$': MuonDimensionNumbers((-4,), columns),
    r'/qkv/bias$': MuonDimensionNumbers((), columns),
  }
  names = '\n'.join(
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, _ in jax.tree.leaves_with_path(params)
  )

  def matching(patterns: dict[str, Any]) -> dict[str, Any]:
    """Returns the patterns that match a parameter; others are refused."""
    return {k: x for k, x in patterns.items() if re.search(k, names, re.M)}

  return merit_optax.flax_dimension_numbers(
    params, stacked=matching(stacked), overrides=matching(overrides)
  )


def _specs(config: Config) -> Any:
  return functools.partial(dimension_numbers, qkv=config.qkv)


def _adam_settings(config: Config) -> dict[str, Any]:
  return dict(
    learning_rate=make_schedule(config),
    b1=config.b1,
    b2=config.b2,
    weight_decay=config.weight_decay,
  )


def _merit(config: Config) -> optax.GradientTransformation:
  return merit_optax.merit(**merit_settings(config))


def _merit_hidden(config: Config) -> optax.GradientTransformation:
  adam = _adam(config, config.b1)
  return merit_optax.partition_hidden(_merit(config), others=adam)


def _muon(config: Config) -> optax.GradientTransformation:
  return merit_optax.muon(
    make_schedule(config),
    config.b1,
    weight_decay=config.weight_decay,
    others=_adam(config, _OTHERS_B1),
    weight_dimension_numbers=_specs(config),
    ns_dtype=config.model.dtype,
  )


def _muon_hyperball(config: Config) -> optax.GradientTransformation:
  return merit_optax.muon_hyperball(
    make_schedule(config),
    config.b1,
    # Without a correction of its bias, as in examples/study.
    others=_adam(config, _OTHERS_B1, bias_correction=False),
    weight_dimension_numbers=_specs(config),
    ns_dtype=config.model.dtype,
  )


def _adam(
  config: Config, b1: float, *, bias_correction: bool = True
) -> optax.GradientTransformation:
  """Returns Adam for other parameters, whose rate follows the schedule."""
  rate, share = make_schedule(config), config.adam_rate / config.learning_rate
  return optax.chain(
    merit_optax.scale_by_adam(b1, config.b2, bias_correction=bias_correction),
    optax.add_decayed_weights(config.weight_decay),
    optax.scale_by_learning_rate(lambda step: share * rate(step)),
  )


def usual_init_std(width: int, scale: float = 1.0) -> float:
  """Returns a multiple of GPT-2 small's 0.02, in proportion to the width."""
  return float(f'{scale * 0.02 * math.sqrt(GPT2_WIDTH / width):.3g}')


def _starting_rate(name: Any) -> Callable[[Config], float | None]:
  return lambda config: merit_optax.starting_learning_rate(
    name, config.steps, config.model.width
  )


_MERIT: dict[str, Any] = dict(
  learning_rate=_starting_rate('merit'), weight_decay=0.01, b1=0.9, b2=0.95,
  clip_threshold=1.0, min_norm=0.0, qkv='fused',
)  # fmt: skip

OPTIMIZERS = {
  'merit': Optimizer(_merit, _MERIT),
  # The rate of Adam is that of examples/study.
  'merit-hidden': Optimizer(_merit_hidden, _MERIT | dict(adam_rate=0.004)),
  'adamw': Optimizer(
    lambda config: optax.adamw(**_adam_settings(config)),
    # The best at width 128 and 4 layers (of 0.7, 1 and 1.4 times that), and of
    # examples/study (width 64) at 305 and 610 steps.
    dict(
      learning_rate=lambda config: float(f'{1 / config.model.width:.2g}'),
      weight_decay=0.1, b1=0.9, b2=0.95,
    ),
  ),
  'lamb': Optimizer(
    lambda config: optax.lamb(**_adam_settings(config)),
    dict(
      learning_rate=_starting_rate('lamb'), weight_decay=0.01, b1=0.9, b2=0.95,
    ),
  ),
  'lion': Optimizer(
    lambda config: optax.lion(**_adam_settings(config)),
    # A usual rate, which was not tuned.
    dict(learning_rate=1e-3, weight_decay=0.1, b1=0.9, b2=0.99),
  ),
  'muon': Optimizer(
    _muon,
    dict(
      learning_rate=_starting_rate('muon'), weight_decay=0.1, b1=0.9, b2=0.95,
      adam_rate=lambda config: config.learning_rate, qkv='fused',
    ),
  ),
  'muon-hyperball': Optimizer(
    _muon_hyperball,
    dict(
      learning_rate=_starting_rate('muon_hyperball'), weight_decay=0.0, b1=0.9,
      b2=0.95, adam_rate=lambda config: config.learning_rate / 3, qkv='fused',
      # Norms are kept at twice the usual size.
      init_std=lambda config: usual_init_std(config.model.width, 2),
    ),
  ),
}  # fmt: skip
