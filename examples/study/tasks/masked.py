"""A masked language model: attention to both sides, loss on hidden tokens.

After Devlin et al., `BERT <https://arxiv.org/abs/1810.04805>`_, 2019, whose
masked tokens are at times kept or replaced by others; here they never are.

Axes: A micro-batches, B sequences, T tokens, M masked tokens of a sequence, D
features, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import optax

from examples.gpt2.config import Config
from examples.gpt2.model.attention import Attend
from examples.gpt2.model.loss import mean_cross_entropy, token_losses
from examples.gpt2.run.step import Trainer

SHARE = 0.15
"""Share of the tokens that are masked."""
# Of a hash of the tokens, modulo 2**32.
_MULTIPLIER = 0x9E3779B1


def attend_to_all(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, None]:
  """Attends from each token to all tokens; sees nothing."""
  return jax.nn.dot_product_attention(query, key, value), None


class MaskedTrainer(Trainer):
  """The trainer's model, which learns to fill in masked tokens.

  Sequences lose the last of their T + 1 tokens, which is no target here.
  """

  def __init__(
    self,
    config: Config,
    vocab_size: int,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
  ):
    """Makes a trainer, as the trainer does; the mask is one token more."""
    super().__init__(config, vocab_size + 1, mesh, optimizer)
    self._mask = vocab_size

  def loss(
    self, params: Any, tokens_BT: jax.Array, attend: Attend = attend_to_all
  ) -> tuple[jax.Array, Any]:
    """Returns the mean loss of the masked tokens; to be traced."""
    *inputs, seen = self._masked(params, tokens_BT, attend)
    return mean_cross_entropy(*inputs), seen

  def _masked(
    self, params: Any, tokens_BT: jax.Array, attend: Attend
  ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Returns features (B, M, D), head, targets (B, M), what attend saw."""
    tokens_BT = tokens_BT[:, :-1]
    positions_BM = masked_positions(tokens_BT)
    targets_BM = jnp.take_along_axis(tokens_BT, positions_BM, 1)
    inputs_BT = jnp.put_along_axis(
      tokens_BT, positions_BM, self._mask, 1, inplace=False
    )
    model = self.model(params)
    features_BTD, seen = model.features(inputs_BT, attend)
    features_BMD = jnp.take_along_axis(features_BTD, positions_BM[..., None], 1)
    return features_BMD, model.head_VD, targets_BM, seen

  def _attend(self, opt_state: Any) -> Attend:
    del opt_state
    return attend_to_all

  def _sequence_losses(self, params: Any, tokens_ABT: jax.Array) -> jax.Array:
    def measure(tokens_BT: jax.Array) -> jax.Array:
      *inputs, _ = self._masked(params, tokens_BT, attend_to_all)
      return token_losses(*inputs).mean(axis=-1)

    return jax.lax.map(measure, tokens_ABT)


def masked_positions(tokens_BT: jax.Array) -> jax.Array:
  """Returns the positions that are masked in each sequence, shape (B, M).

  They are random, but the same for the same tokens: held-out text is masked
  alike in all runs, and a batch whatever its micro-batches and devices.
  """
  length = tokens_BT.shape[1]
  powers_T = np.array(
    [pow(_MULTIPLIER, i + 1, 1 << 32) for i in range(length)], np.uint32
  )
  hashes_B = (tokens_BT.astype(jnp.uint32) * powers_T).sum(axis=1)
  count = max(1, round(SHARE * length))

  def choose(number: jax.Array) -> jax.Array:
    return jax.random.permutation(jax.random.key(number), length)[:count]

  return jax.vmap(choose)(hashes_B)
