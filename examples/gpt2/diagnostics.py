"""Diagnostics of a step, a separate program: other steps pay nothing.

A measurement is an entry of the dictionary that ``measure`` returns; one of
each layer is an array of shape (L,). A metric of every step belongs to
``step.py``.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.gpt2 import sharding
from examples.gpt2.config import Config
from examples.gpt2.model import causal_attention
from examples.gpt2.optimizers import merit_arguments
from examples.gpt2.schedules import optimizer_settings
from examples.gpt2.step import Trainer, TrainState
from merit_optax import attention_statistics, merit_statistics

# Of merit_statistics; the median would sort every parameter.
_SHARES = (
  'decided_by_weight', 'decided_by_row', 'decided_by_column', 'clipped',
  'fallback',
)  # fmt: skip


def make_diagnostics(config: Config, trainer: Trainer) -> Any:
  """Returns a compiled function that measures a step before it is taken.

  Args:
    config: Settings of the run.
    trainer: Its model and optimizer.

  Returns:
    Function from a state, which is not donated, and tokens of shape (A, B,
    T + 1) to a dictionary. An array has an entry for each layer:

    - ``max_attention_logit``, ``max_centred_attention_logit`` (after the mean
      of each query's logits is taken off) and ``attention_entropy`` (mean over
      heads and queries, nats);
    - ``layers``: by name, ``gradient_norm`` (before the global clip),
      ``update_to_weight`` (ratio of l2 norms) and, of MERIT, the smallest and
      the largest trust ratio and the shares of elements of
      :func:`merit_optax.merit_statistics`;
    - ``others``: the same for each parameter outside of the layers;
    - ``gradient_noise``: the trace of the covariance of a sequence's gradient,
      and the squared norm of the true one, both without bias; None for a batch
      of one sequence of each shard;
    - ``noise_scale_tokens``: their ratio times the sequence length, the batch
      beyond which more tokens a step pay less and less; NaN if the batch is too
      small to tell.
  """
  return jax.jit(
    _Diagnostics(config, trainer).measure,
    out_shardings=sharding.replicated(trainer.mesh),
  )


class _Diagnostics:
  """What is measured; all methods are to be traced."""

  def __init__(self, config: Config, trainer: Trainer):
    self._config, self._trainer = config, trainer

  def measure(self, state: TrainState, tokens_ABT: jax.Array) -> dict[str, Any]:
    gradients, noise = self._gradients(state.params, self._cut(tokens_ABT))
    return {
      **self._attention(state.params, tokens_ABT),
      **self._updates(state, gradients),
      'gradient_noise': noise,
      'noise_scale_tokens': self._noise_scale(noise),
    }

  def _noise_scale(self, noise: dict[str, jax.Array] | None) -> Any:
    if noise is None:
      return None
    trace, square = noise['trace'], noise['squared_norm']
    scale = trace / square * self._config.model.context_length
    return jnp.where(square > 0, scale, jnp.nan)

  def _attention(self, params: Any, tokens_ABT: jax.Array) -> dict[str, Any]:
    """Returns statistics of the attention logits, each of shape (L,)."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
      return causal_attention(q, k, v)[0], attention_statistics(q, k)

    def measure(tokens_BT: jax.Array) -> Any:
      model = self._trainer.model(params)
      return model.features(tokens_BT[:, :-1], attend)[1]

    seen_ALH = jax.lax.map(measure, tokens_ABT)
    return {
      'max_attention_logit': seen_ALH.max_logit.max((0, 2)),
      'max_centred_attention_logit': seen_ALH.max_centred_logit.max((0, 2)),
      'attention_entropy': seen_ALH.entropy.mean((0, 2)),
    }

  def _cut(self, tokens_ABT: jax.Array) -> jax.Array:
    """Cuts one micro-batch to up to eight, which the mesh must still split."""
    micro_batches, size, length = tokens_ABT.shape
    if micro_batches > 1:
      return tokens_ABT
    shards = sharding.num_batch_shards(self._trainer.mesh)
    parts = math.gcd(size // shards, 8)
    # Each part takes sequences of all shards, so that none has to move.
    by_shard = tokens_ABT.reshape(shards, parts, -1, length)
    return jax.lax.with_sharding_constraint(
      jnp.moveaxis(by_shard, 0, 1).reshape(parts, -1, length),
      sharding.batch_sharding(self._trainer.mesh),
    )

  def _gradients(self, params: Any, parts_ABT: jax.Array) -> tuple[Any, Any]:
    """Returns the mean gradient, and its noise if there are several parts.

    After McCandlish et al., `An Empirical Model of Large-Batch Training
    <https://arxiv.org/abs/1812.06162>`_, 2018, appendix A.
    """
    count, small, _ = parts_ABT.shape

    def add(total: Any, tokens_BT: jax.Array) -> tuple[Any, jax.Array]:
      gradients = jax.grad(self._trainer.loss)(params, tokens_BT)
      total = jax.tree.map(jnp.add, total, gradients)
      return total, optax.tree.norm(gradients, squared=True)

    zero = jax.tree.map(jnp.zeros_like, params)
    total, squares_A = jax.lax.scan(add, zero, parts_ABT)
    gradients = jax.tree.map(lambda x: x / count, total)
    if count == 1:
      return gradients, None
    large = count * small
    large_square = optax.tree.norm(gradients, squared=True)
    small_square = jnp.mean(squares_A)
    return gradients, {
      'trace': (small_square - large_square) / (1 / small - 1 / large),
      'squared_norm': (large * large_square - small * small_square)
      / (large - small),
    }

  def _updates(self, state: Any, gradients: Any) -> dict[str, Any]:
    """Returns what the optimizer does, by layer and by other parameter."""
    params, opt_state = state.params, state.opt_state
    updates, _ = self._trainer.optimizer.update(gradients, opt_state, params)
    # Of MERIT beside Adam, only some parameters have ratios.
    if self._config.optimizer != 'merit':
      return _by_group(_norms, params, gradients, updates)
    clip = optax.clip_by_global_norm(self._config.max_gradient_norm)
    clipped, _ = clip.update(gradients, clip.init(gradients))
    adam = optax.tree.get(opt_state, 'ScaleByAdamState')
    statistics = merit_statistics(
      **merit_arguments(**optimizer_settings(self._config))
    )

    def measure(
      params: Any, gradients: Any, updates: Any, clipped: Any, mu: Any, nu: Any
    ) -> dict[str, Any]:
      moments = optax.ScaleByAdamState(adam.count, mu, nu)
      by_param = statistics(clipped, moments, params)
      return _norms(params, gradients, updates) | _pool(by_param, params)

    return _by_group(
      measure, params, gradients, updates, clipped, adam.mu, adam.nu
    )


def _by_group(measure: Any, *trees: Any) -> dict[str, Any]:
  """Applies a function to each layer, and to each parameter outside of them."""
  groups = {name: [tree[name] for tree in trees] for name in trees[0]}
  return {
    'layers': jax.vmap(measure)(*groups.pop('blocks')),
    'others': {name: measure(*group) for name, group in groups.items()},
  }


def _norms(params: Any, gradients: Any, updates: Any) -> dict[str, jax.Array]:
  return {
    'gradient_norm': optax.tree.norm(gradients),
    'update_to_weight': optax.tree.norm(updates) / optax.tree.norm(params),
  }


def _pool(by_param: dict[str, jax.Array], params: Any) -> dict[str, jax.Array]:
  """Returns the statistics of several parameters together."""
  sizes = np.array([x.size for x in jax.tree.leaves(params)])

  def of_all(key: str) -> jax.Array:
    return jnp.stack([x for k, x in by_param.items() if k.endswith(f'/{key}')])

  return {
    'trust_ratio_min': of_all('trust_ratio_min').min(),
    'trust_ratio_max': of_all('trust_ratio_max').max(),
    **{k: jnp.sum(sizes / sizes.sum() * of_all(k)) for k in _SHARES},
  }
