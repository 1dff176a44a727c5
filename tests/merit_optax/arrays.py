"""Arrays and runs of optimizers that tests share."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax

# Matrices of numbers whose squares float32 holds, and of zeros.
_SIZES = st.floats(2.0**-10, 2.0**10, width=32)
MATRICES = hnp.arrays(
  np.float32,
  (3, 4),
  elements=st.one_of(st.just(0.0), _SIZES, _SIZES.map(lambda x: -x)),
)


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
