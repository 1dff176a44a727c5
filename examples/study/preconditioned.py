r"""Curvature as the optimizer sees it: of the preconditioned Hessian.

A step along the gradient G changes the weights by :math:`-\eta P^{-1} G`, and
what decides whether steps of a rate are stable is the top eigenvalue of
:math:`P^{-1} H`, or of the symmetric :math:`P^{-1/2} H P^{-1/2}`. With P as the
optimizer has it at the end of the run:

- AdamW, and what Muon leaves to Adam: :math:`P = \mathrm{diag}(\sqrt v) +
  \epsilon`, after Cohen et al., `Adaptive Gradient Methods at the Edge of
  Stability <https://arxiv.org/abs/2207.14484>`_, 2022.
- Muon, for a hidden matrix with the momentum :math:`M = U S V^\top`: its
  step :math:`c \, U V^\top` is :math:`P^{-1} M` with :math:`P = U S U^\top /
  c`, or the like of V where there are more rows than columns. Singular values
  are taken to be no smaller than what five Newton-Schulz steps bring to 1.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.gpt2.config import Config
from examples.gpt2.data.tokens import Tokens
from examples.gpt2.devices.sharding import by_path, path_name
from examples.gpt2.run.step import Trainer, TrainState
from examples.study import curvature

_EPSILON = 1e-8
"""Of ``optax.adamw`` and ``optax.contrib.muon``."""
_SCALE = 0.2
"""Of the trainer's Muon: root mean square of its steps for a rate of 1."""
# Newton-Schulz multiplies the smallest singular values by 3.4445 in each step,
# after the Frobenius norm has been divided out.
_SMALLEST = 3.4445**-5


def measure(
  trainer: Trainer, config: Config, tokens: Tokens, state: TrainState
) -> dict[str, Any]:
  """Measures the curvature at the end of a run with AdamW or Muon.

  Returns:
    JSON values: those of :func:`examples.study.curvature.measure`, and
    ``preconditioned_eigenvalue``, in inverse learning rates, with its
    ``preconditioned_residual``.
  """

  def measure_eigenvalue(
    state: TrainState, tokens_ABT: jax.Array
  ) -> dict[str, jax.Array]:
    product = curvature.hessian_product(trainer, state.params, tokens_ABT)
    root = make_root(state.opt_state)
    value, residual = curvature.top_eigenvalue(
      curvature.between(product, root), state.params
    )
    return {
      'preconditioned_eigenvalue': value,
      'preconditioned_residual': residual,
    }

  batch = curvature.sample(trainer, config, tokens)
  return curvature.measure(trainer, config, tokens, state) | curvature.as_json(
    jax.jit(measure_eigenvalue)(state, batch)
  )


def make_root(opt_state: Any) -> curvature.Product:
  r"""Returns the product with :math:`P^{-1/2}`, to be traced.

  Args:
    opt_state: State of the trainer's AdamW or Muon.
  """
  second = _moments(opt_state, 'nu')
  first = _moments(opt_state, 'mu')
  scales = {
    path: jax.lax.rsqrt(jnp.sqrt(x) + _EPSILON) for path, x in second.items()
  }
  # What has no second moment is a hidden matrix of Muon's.
  roots = {
    path: _matrix_root(x) for path, x in first.items() if path not in second
  }

  def multiply(path: Any, vector: jax.Array) -> jax.Array:
    name = path_name(path)
    if name in scales:
      return scales[name] * vector
    flat = _as_matrices(vector)
    root = roots[name]
    is_wide = flat.shape[-2] <= flat.shape[-1]
    flat = root @ flat if is_wide else flat @ root
    return flat.reshape(vector.shape)

  return lambda vector: jax.tree.map_with_path(multiply, vector)


def _moments(opt_state: Any, name: str) -> Mapping[str, jax.Array]:
  """Returns moments by the paths of their parameters."""
  found: dict[str, jax.Array] = {}
  for _, tree in optax.tree.get_all_with_path(opt_state, name):
    found |= by_path(tree)
  return found


def _as_matrices(x: jax.Array) -> jax.Array:
  """Returns kernels of layers as matrices, shape (layers, inputs, outputs)."""
  return x.reshape(*x.shape[:2], -1)


def _matrix_root(momentum: jax.Array) -> jax.Array:
  """Returns the root of Muon's inverse preconditioner, on the shorter side."""
  flat = _as_matrices(momentum)
  if flat.shape[-2] > flat.shape[-1]:
    flat = flat.mT
  vectors, values, _ = jnp.linalg.svd(flat, full_matrices=False)
  norm = jnp.linalg.norm(values, axis=-1, keepdims=True)
  values = jnp.maximum(values, jnp.maximum(_SMALLEST * norm, _EPSILON))
  size = _SCALE * jnp.sqrt(flat.shape[-1])
  return (vectors * jnp.sqrt(size / values)[..., None, :]) @ vectors.mT
