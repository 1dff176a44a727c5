"""GPT-2 in Flax NNX.

Letters at the end of a name give the axes of an array: B sequences, T tokens,
S tokens attended to, D features, H heads, K features of a head, V vocabulary.
"""

import dataclasses
import math

from flax import nnx
import jax
import jax.numpy as jnp

from examples.gpt2.sharding import constrain
from merit_optax import attention_statistics

_STDDEV = 0.02


@dataclasses.dataclass(frozen=True)
class GPT2Config:
  """Sizes of the model.

  Attributes:
    vocab_size: Number of token identifiers.
    context_length: Largest number of tokens in a sequence.
    num_layers: Transformer blocks.
    num_heads: Attention heads in a block, a divisor of ``width``.
    width: Features of the residual stream.
  """

  vocab_size: int
  context_length: int
  num_layers: int
  num_heads: int
  width: int


class Attention(nnx.Module):
  """Causal self-attention.

  The columns of the ``qkv`` kernel are ordered by head, and within a head by
  query, key and value, so that a shard of the tensor axis holds whole heads.
  (Max-norms do not depend on the order of rows or columns.)
  """

  def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
    width = config.width
    self.num_heads = config.num_heads
    self.qkv = _linear(width, 3 * width, _STDDEV, rngs)
    self.out = _linear(width, width, _residual_stddev(config), rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what is added to the residual stream, shape (B, T, D)."""
    q_BTHK, k_BTHK, v_BTHK = self.project(x_BTD)
    y_BTHK = jax.nn.dot_product_attention(
      q_BTHK, k_BTHK, v_BTHK, is_causal=True
    )
    return self.out(y_BTHK.reshape(x_BTD.shape))

  def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values, each of shape (B, T, H, K)."""
    batch, length, width = x_BTD.shape
    head_width = width // self.num_heads
    qkv = self.qkv(x_BTD).reshape(batch, length, self.num_heads, 3, head_width)
    return tuple(jnp.moveaxis(constrain(qkv, 'heads'), 3, 0))


class MLP(nnx.Module):
  """Two linear layers around GELU in the tanh approximation."""

  def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
    width = config.width
    self.up = _linear(width, 4 * width, _STDDEV, rngs)
    self.down = _linear(4 * width, width, _residual_stddev(config), rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what is added to the residual stream, shape (B, T, D)."""
    return self.down(jax.nn.gelu(self.up(x_BTD), approximate=True))


class Block(nnx.Module):
  """Pre-LayerNorm transformer block."""

  def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
    self.attention_norm = _layer_norm(config, rngs)
    self.attention = Attention(config, rngs)
    self.mlp_norm = _layer_norm(config, rngs)
    self.mlp = MLP(config, rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the residual stream after the block, shape (B, T, D)."""
    x_BTD = constrain(x_BTD + self.attention(self.attention_norm(x_BTD)))
    return constrain(x_BTD + self.mlp(self.mlp_norm(x_BTD)))


class GPT2(nnx.Module):
  """GPT-2: learned positions, pre-LayerNorm blocks, tied embeddings."""

  def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
    self.token_embedding = _embedding(config.vocab_size, config, rngs)
    self.position_embedding = _embedding(config.context_length, config, rngs)
    self.blocks = nnx.List(
      [Block(config, rngs) for _ in range(config.num_layers)]
    )
    self.final_norm = _layer_norm(config, rngs)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the logits of each next token, float32, shape (B, T, V)."""
    x_TD = self.position_embedding(jnp.arange(tokens_BT.shape[1]))
    x_BTD = constrain(self.token_embedding(tokens_BT) + x_TD)
    for block in self.blocks:
      x_BTD = block(x_BTD)
    return self.token_embedding.attend(self.final_norm(x_BTD))


def logits_and_max_attention_logits(
  model: GPT2, tokens_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the model's logits and what its attention saw.

  Args:
    model: The model.
    tokens_BT: Tokens, shape (B, T).

  Returns:
    Logits of each next token, shape (B, T, V), and the largest attention logit
    of each layer, shape (layers,).
  """
  forward = nnx.capture(
    model, nnx.Intermediate, method_outputs=nnx.Intermediate
  )
  logits_BTV, outputs = forward(tokens_BT)
  blocks = nnx.to_pure_dict(outputs)['blocks']
  heads = [blocks[i]['attention']['project'][0] for i in range(len(blocks))]
  largest = [attention_statistics(q, k).max_logit.max() for q, k, _ in heads]
  return logits_BTV, jnp.stack(largest)


def _residual_stddev(config: GPT2Config) -> float:
  """GPT-2 divides by the root of the number of residual branches."""
  return _STDDEV / math.sqrt(2 * config.num_layers)


def _linear(
  inputs: int, outputs: int, stddev: float, rngs: nnx.Rngs
) -> nnx.Linear:
  return nnx.Linear(
    inputs, outputs, kernel_init=nnx.initializers.normal(stddev), rngs=rngs
  )


def _embedding(rows: int, config: GPT2Config, rngs: nnx.Rngs) -> nnx.Embed:
  init = nnx.initializers.normal(_STDDEV)
  return nnx.Embed(rows, config.width, embedding_init=init, rngs=rngs)


def _layer_norm(config: GPT2Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
  # The fast variance, E[x^2] - E[x]^2, cancels digits that GPT-2 keeps.
  return nnx.LayerNorm(
    config.width, epsilon=1e-5, use_fast_variance=False, rngs=rngs
  )
