"""Learning rates by the step, and the optimizer of a run that follows them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.gpt2.config import Config, by_name
from examples.gpt2.optimizers import OPTIMIZERS


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """Returns the optimizer of a run, behind the clip of the gradient."""
  return optax.chain(
    optax.clip_by_global_norm(config.max_gradient_norm),
    OPTIMIZERS[config.optimizer].make(**optimizer_settings(config)),
  )


def optimizer_settings(config: Config) -> dict[str, Any]:
  """Returns the settings that the optimizer has, with schedules as rates."""
  values, rate = by_name(config), make_schedule(config)
  found = {k: values[k] for k in OPTIMIZERS[config.optimizer].defaults}
  if 'adam_rate' in found:
    share = config.adam_rate / config.learning_rate
    found['adam_rate'] = lambda step: share * rate(step)
  return found | {'learning_rate': rate}


def learning_rates(config: Config) -> np.ndarray:
  """Returns the learning rate of each step."""
  return np.asarray(jax.vmap(make_schedule(config))(np.arange(config.steps)))


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
