"""Diagnostics of a step, compiled on their own: other steps pay nothing.

Letters at the end of a name give the axes of an array: A micro-batches, B
sequences, T tokens, L layers, H heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.gpt2.config import Config
from examples.gpt2.devices import sharding
from examples.gpt2.model.attention import causal_attention
from examples.gpt2.optim.optimizers import merit_settings
from examples.gpt2.run.step import Trainer, TrainState
from merit_optax import attention_statistics, merit_statistics

_SHARES = (
  'decided_by_weight', 'decided_by_row', 'decided_by_column', 'clipped',
  'fallback',
)  # fmt: skip
# Parts that a batch of one micro-batch is cut into, for the gradient's noise.
_PARTS = (8, 4, 2)


class Watch:
  """Looks at attention, gradient and update of a step that is to be taken."""

  def __init__(self, config: Config, trainer: Trainer):
    self._config = config
    self._trainer = trainer
    self._measure = jax.jit(
      self._measure_all, out_shardings=sharding.replicated(trainer.mesh)
    )
    self._measure_attention = jax.jit(
      self._attention, out_shardings=sharding.replicated(trainer.mesh)
    )

  def __call__(
    self, state: TrainState, tokens_ABT: jax.Array
  ) -> dict[str, Any]:
    """Measures a step before it is taken.

    Args:
      state: State before the step; it is not donated.
      tokens_ABT: The step's micro-batches.

    Returns:
      JSON values. A list has an entry for each layer:

      - ``max_attention_logit``, ``max_centred_attention_logit`` (after the mean
        of each query's logits is taken off) and ``attention_entropy`` (mean
        over heads and queries, nats);
      - ``layers``: by name, ``gradient_norm`` (before the global clip),
        ``update_to_weight`` (ratio of l2 norms) and, of MERIT, the smallest and
        the largest trust ratio and the shares of elements that
        :func:`merit_optax.merit_statistics` tells;
      - ``others``: the same for each parameter outside of the layers;
      - ``gradient_noise``: the trace of the covariance of a sequence's
        gradient, and the squared norm of the true one, both without bias;
      - ``noise_scale_tokens``: their ratio times the sequence length, the batch
        beyond which more tokens a step pay less and less; None if the batch is
        too small to tell.
    """
    measured = jax.device_get(self._measure(state, tokens_ABT))
    measured = jax.tree.map(np.ndarray.tolist, measured)
    noise = measured['gradient_noise']
    scale = None
    if noise is not None and noise['squared_norm'] > 0:
      scale = noise['trace'] / noise['squared_norm']
      scale *= self._config.context_length
    return measured | {'noise_scale_tokens': scale}

  def attention(self, params: Any, tokens_ABT: jax.Array) -> dict[str, Any]:
    """Measures attention alone: the first three entries of a call."""
    measured = jax.device_get(self._measure_attention(params, tokens_ABT))
    return jax.tree.map(np.ndarray.tolist, measured)

  def _measure_all(
    self, state: TrainState, tokens_ABT: jax.Array
  ) -> dict[str, Any]:
    parts_ABT = self._cut(tokens_ABT)
    gradients, noise = self._gradients(state.params, parts_ABT)
    return {
      **self._attention(state.params, tokens_ABT),
      **self._updates(state, gradients),
      'gradient_noise': noise,
    }

  def _attention(
    self, params: Any, tokens_ABT: jax.Array
  ) -> dict[str, jax.Array]:
    """Returns what attention saw, each of shape (L,)."""

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
    """Cuts one micro-batch to several, if the mesh can still split them."""
    micro_batches, size, length = tokens_ABT.shape
    shards = sharding.num_batch_shards(self._trainer.mesh)
    fitting = [n for n in _PARTS if size % (n * shards) == 0]
    if micro_batches > 1 or not fitting:
      return tokens_ABT
    parts_ABT = tokens_ABT.reshape(-1, size // fitting[0], length)
    return jax.lax.with_sharding_constraint(
      parts_ABT, sharding.batch_sharding(self._trainer.mesh)
    )

  def _gradients(
    self, params: Any, parts_ABT: jax.Array
  ) -> tuple[Any, dict[str, jax.Array] | None]:
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
    total, squares = jax.lax.scan(add, zero, parts_ABT)
    gradients = jax.tree.map(lambda x: x / count, total)
    if count == 1:
      return gradients, None
    large = count * small
    large_square = optax.tree.norm(gradients, squared=True)
    small_square = jnp.mean(squares)
    return gradients, {
      'trace': (small_square - large_square) / (1 / small - 1 / large),
      'squared_norm': (large * large_square - small * small_square)
      / (large - small),
    }

  def _updates(self, state: TrainState, gradients: Any) -> dict[str, Any]:
    """Returns what the optimizer does, by layer and by other parameter."""
    updates, _ = self._trainer.optimizer.update(
      gradients, state.opt_state, state.params
    )
    statistics = {
      'gradient_norm': _map_layers(_norm, gradients),
      'update_to_weight': _map_layers(
        lambda update, param: _norm(update) / _norm(param),
        updates,
        state.params,
      ),
    }
    if self._config.optimizer == 'merit':
      statistics |= self._merit_statistics(state, gradients)
    names = ('layers', *state.params.keys() - {'blocks'})
    table = {
      name: {key: value[name] for key, value in statistics.items()}
      for name in sorted(names)
    }
    return {'layers': table.pop('layers'), 'others': table}

  def _merit_statistics(
    self, state: TrainState, gradients: Any
  ) -> dict[str, dict[str, jax.Array]]:
    """Returns trust ratios and clip shares by layer and other parameter."""
    clip = optax.clip_by_global_norm(self._config.max_gradient_norm)
    clipped, _ = clip.update(gradients, clip.init(gradients))
    adam = optax.tree.get(state.opt_state, 'ScaleByAdamState')
    statistics = merit_statistics(**merit_settings(self._config, stacked=False))

    def measure(
      gradients: Any, mu: Any, nu: Any, params: Any
    ) -> dict[str, jax.Array]:
      moments = optax.ScaleByAdamState(adam.count, mu, nu)
      by_param = statistics(gradients, moments, params)
      return _summarize(by_param, params)

    by_group = _map_layers(measure, clipped, adam.mu, adam.nu, state.params)
    keys = by_group['layers'].keys()
    return {
      key: {name: group[key] for name, group in by_group.items()}
      for key in keys
    }


def _map_layers(function: Any, *trees: Any) -> dict[str, Any]:
  """Applies a function to each layer (``'layers'``) and other parameter."""
  blocks = [tree['blocks'] for tree in trees]
  others = trees[0].keys() - {'blocks'}
  return {'layers': jax.vmap(function)(*blocks)} | {
    name: function(*(tree[name] for tree in trees)) for name in others
  }


def _norm(tree: Any) -> jax.Array:
  return optax.tree.norm(tree)


def _summarize(
  by_param: dict[str, jax.Array], params: Any
) -> dict[str, jax.Array]:
  """Returns statistics of several parameters together."""
  sizes = {
    sharding.path_name(path, '/'): x.size
    for path, x in jax.tree.leaves_with_path(params)
  }
  total = sum(sizes.values())

  def all_of(key: str) -> jax.Array:
    return jnp.stack([by_param[f'{name}/{key}'] for name in sizes])

  def mean(key: str) -> jax.Array:
    shares = jnp.array([size / total for size in sizes.values()])
    return jnp.sum(shares * all_of(key))

  return {
    'trust_ratio_min': all_of('trust_ratio_min').min(),
    'trust_ratio_max': all_of('trust_ratio_max').max(),
    # The median would sort every parameter.
    **{key: mean(key) for key in _SHARES},
  }
