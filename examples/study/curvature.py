"""Curvature of the training loss at the final weights.

The Hessian H of the mean loss over a fixed sample of the training text, which
is the same for all runs of a text, is seen only through its products with
vectors.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, TypeAlias

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from matfree import decomp, stochtrace

from examples.gpt2.config import Config
from examples.gpt2.data.batches import training_batch
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices.sharding import num_batch_shards
from examples.gpt2.run.step import Trainer, TrainState

Product: TypeAlias = Callable[[Any], Any]
"""Product of a symmetric matrix with a vector, both trees of parameters."""

SEQUENCES = 128
"""Size of the sample."""
_SAMPLE_SEED = 2**31
"""Of the sample, and of the vectors that begin; no run has it."""
LANCZOS_STEPS = 48
"""Products with a vector that the top eigenvalue takes."""
TRACE_SAMPLES = 24
"""Random vectors that the trace is estimated with."""


def measure(
  trainer: Trainer, config: Config, tokens: Tokens, state: TrainState
) -> dict[str, Any]:
  """Measures the curvature at the end of a run.

  Returns:
    JSON values, None where they are not finite:

    - ``top_eigenvalue`` of H, and ``residual``, the distance in which H has an
      eigenvalue for certain, as a part of it;
    - ``trace`` of H, and ``trace_error``, its standard error;
    - ``relative_eigenvalue`` and ``relative_residual``: the top one of D H D
      with D = diag(|w|), which is that for steps in parts of each weight. It is
      the sharpness of Kwon et al., `ASAM
      <https://arxiv.org/abs/2102.11600>`_, 2021, to second order: what scales
      weights and leaves the function as it is does not change it.
  """

  def measure_all(params: Any, tokens_ABT: jax.Array) -> dict[str, jax.Array]:
    product = hessian_product(trainer, params, tokens_ABT)
    eigenvalue, residual = top_eigenvalue(product, params)
    trace, error = estimate_trace(product, params)
    size = jax.tree.map(jnp.abs, params)
    relative, relative_residual = top_eigenvalue(
      between(product, times(size)), params
    )
    return {
      'top_eigenvalue': eigenvalue,
      'residual': residual,
      'trace': trace,
      'trace_error': error,
      'relative_eigenvalue': relative,
      'relative_residual': relative_residual,
    }

  batch = sample(trainer, config, tokens)
  return as_json(jax.jit(measure_all)(state.params, batch))


def sample(trainer: Trainer, config: Config, tokens: Tokens) -> jax.Array:
  """Returns the fixed sample, in micro-batches: shape (A, B, T + 1)."""
  shards = num_batch_shards(trainer.mesh)
  config = dataclasses.replace(
    config,
    seed=_SAMPLE_SEED,
    batch_size=SEQUENCES,
    micro_batch_size=math.gcd(SEQUENCES // shards, config.micro_batch_size),
  )
  return training_batch(tokens.train, config, 0, trainer.mesh)


def hessian_product(
  trainer: Trainer, params: Any, tokens_ABT: jax.Array
) -> Product:
  """Returns the product with the Hessian of the mean loss, to be traced.

  Forward over reverse: the derivative of the gradient along the vector, summed
  over micro-batches as the gradient is.
  """

  def gradient(params: Any) -> Any:
    _, gradients, _ = trainer.loss_and_gradients(params, tokens_ABT)
    return gradients

  return lambda vector: jax.jvp(gradient, (params,), (vector,))[1]


def times(diagonal: Any) -> Product:
  """Returns the product with a diagonal matrix."""
  return lambda vector: jax.tree.map(jnp.multiply, diagonal, vector)


def between(product: Product, root: Product) -> Product:
  """Returns the product with R H R, of a symmetric matrix R."""
  return lambda vector: root(product(root(vector)))


def top_eigenvalue(product: Product, like: Any) -> tuple[jax.Array, jax.Array]:
  """Returns the largest eigenvalue by Lanczos iterations, and its residual.

  The residual is the norm of what the product with the unit eigenvector is off,
  over the eigenvalue. ``like`` has the shapes of the vectors.
  """
  flat, unravel = ravel_pytree(like)
  start = jax.random.normal(jax.random.key(_SAMPLE_SEED), flat.shape)
  tridiagonalize = decomp.tridiag_sym(min(LANCZOS_STEPS, flat.size))
  _, matrix, rest, _ = tridiagonalize(
    lambda x: ravel_pytree(product(unravel(x)))[0], start
  )
  values, vectors = jnp.linalg.eigh(matrix)
  off = jnp.linalg.norm(rest) * jnp.abs(vectors[-1, -1])
  rounding = jnp.finfo(values.dtype).eps
  return values[-1], jnp.maximum(off / jnp.abs(values[-1]), rounding)


def estimate_trace(product: Product, like: Any) -> tuple[jax.Array, jax.Array]:
  """Returns Hutchinson's estimate of the trace, and its standard error."""
  estimate = stochtrace.estimator_monte_carlo(
    stochtrace.monte_carlo_trace(), stochtrace.sampler_signs(like, num=1)
  )
  keys = jax.random.split(jax.random.key(_SAMPLE_SEED), TRACE_SAMPLES)
  # One vector at a time: each needs the memory of a backward pass.
  found = jax.lax.map(lambda key: estimate(product, key), keys)
  return found.mean(), found.std(ddof=1) / math.sqrt(TRACE_SAMPLES)


def as_json(values: dict[str, jax.Array]) -> dict[str, float | None]:
  """Returns numbers with five digits, None for those that are not finite."""
  numbers = {name: float(x) for name, x in values.items()}
  return {
    name: float(f'{x:.5g}') if math.isfinite(x) else None
    for name, x in numbers.items()
  }
