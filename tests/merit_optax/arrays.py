"""Arrays and runs of optimizers that tests share."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


def normal(seed: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
  """Returns random numbers, the same for each seed."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


class Step(NamedTuple):
  """What an optimizer gives in a step, and the parameters after it."""

  updates: Any
  state: Any
  params: Any


def run(
  optimizer: optax.GradientTransformation, params: Any, gradients: Iterable[Any]
) -> Iterator[Step]:
  """Yields the steps of an optimizer, under jit."""
  update = jax.jit(optimizer.update)
  state = optimizer.init(params)
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    yield Step(updates, state, params)
