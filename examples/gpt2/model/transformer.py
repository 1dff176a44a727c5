"""A decoder of language, GPT-2 or Llama, in Flax NNX, with scanned layers.

Axes: B sequences, T tokens, D features, V vocabulary, L layers.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from examples.gpt2.config import ModelConfig
from examples.gpt2.model import layers
from examples.gpt2.model.attention import Attend, Attention, causal_attention
from examples.gpt2.sharding import (
  constrain,
  gather_parameters,
  has_fsdp,
)


def _all_but_gathered(primitive: Any, *inputs: Any, **params: Any) -> bool:
  """Whether to keep a value, which is not one of the gathered parameters."""
  # Those of all layers would be the whole model. A copy in a wider dtype
  # follows the constraint that gathers them; no other needs to be kept.
  if primitive.name == 'convert_element_type':
    return params['new_dtype'].itemsize <= inputs[0].dtype.itemsize
  return primitive.name != 'sharding_constraint'


# What the backward pass need not recompute.
_KEPT = {
  'none': _all_but_gathered,
  'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'full': jax.checkpoint_policies.nothing_saveable,
}


class Block(nnx.Module):
  """Pre-norm transformer block."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.attention_norm = layers.norm(config, rngs)
    self.attention = Attention(config, rngs)
    self.mlp_norm = layers.norm(config, rngs)
    self.mlp = layers.MLP(config, rngs)

  def __call__(
    self, x_BTD: jax.Array, positions_T: jax.Array, attend: Attend
  ) -> tuple[jax.Array, Any]:
    """Returns the residual stream after the block, and what attend measured."""
    y_BTD, measured = self.attention(
      self.attention_norm(x_BTD), positions_T, attend
    )
    x_BTD = constrain(x_BTD + y_BTD)
    return constrain(x_BTD + self.mlp(self.mlp_norm(x_BTD))), measured


class Transformer(nnx.Module):
  """Embedding, blocks and a norm; the head is the embedding unless untied.

  Parameters of the blocks are stacked on a leading axis of layers.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.token_embedding = layers.embedding(config, config.vocab_size, rngs)
    if config.architecture == 'gpt2':
      self.position_embedding = layers.embedding(
        config, config.context_length, rngs
      )
    make = nnx.vmap(lambda rngs: Block(config, rngs))
    self.blocks = nnx.split_rngs(splits=config.num_layers)(make)(rngs)
    self.final_norm = layers.norm(config, rngs)
    if config.untied_head:
      self.head = layers.linear(
        config, config.width, config.vocab_size, rngs, use_bias=False
      )

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the logits of each next token, float32, shape (B, T, V)."""
    features_BTD, _ = self.features(tokens_BT)
    return self.logits(features_BTD)

  def features(
    self,
    tokens_BT: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]] = causal_attention,
    *,
    first_position: jax.typing.ArrayLike = 0,
    by_layer: Any = (),
  ) -> tuple[jax.Array, Any]:
    """Runs all blocks.

    Args:
      tokens_BT: Tokens.
      attend: Function from queries, keys, values and the layer's part of
        ``by_layer`` to weighted values and anything to be returned by layer.
      first_position: Position of the first token.
      by_layer: Arguments of ``attend`` with a leading axis of layers.

    Returns:
      Features that the head reads, (B, T, D), and all that ``attend`` measured.
    """
    positions_T = jnp.asarray(first_position) + jnp.arange(tokens_BT.shape[1])
    x_BTD = self.token_embedding(tokens_BT)
    if self.config.architecture == 'gpt2':
      x_BTD += self.position_embedding(positions_T)
    graphdef, blocks = nnx.split(self.blocks)
    blocks = nnx.as_pure(blocks)

    def run(x_BTD: jax.Array, layer: tuple[Any, Any]) -> tuple[jax.Array, Any]:
      params, given = layer
      if tokens_BT.shape[1] > 1:
        # Not for each token that is generated, which is less than a layer.
        params = gather_parameters(params, x_BTD.dtype)
      block = nnx.merge(graphdef, params)
      return block(x_BTD, positions_T, lambda *qkv: attend(*qkv, *given))

    if self.config.remat != 'none' or has_fsdp():
      # In a scan nothing can be merged with the forward pass anyway.
      policy = _KEPT[self.config.remat]
      run = jax.checkpoint(run, policy=policy, prevent_cse=False)
    x_BTD, measured = jax.lax.scan(
      run, constrain(x_BTD), (blocks, by_layer), unroll=self.config.unroll or 1
    )
    return self.final_norm(x_BTD), measured

  @property
  def head_VD(self) -> jax.Array:
    """Matrix whose products with features are logits, float32."""
    if self.config.untied_head:
      return self.head.kernel.get_value().T
    return self.token_embedding.embedding.get_value()

  def logits(self, features_BTD: jax.Array) -> jax.Array:
    """Returns the logits of features, float32, shape (B, T, V)."""
    return jnp.einsum(
      'BTD,VD->BTV',
      features_BTD,
      self.head_VD.astype(features_BTD.dtype),
      preferred_element_type=jnp.float32,
    )


def as_module(config: ModelConfig, params: Any) -> Transformer:
  """Returns the model with some parameters; to be traced."""
  return nnx.merge(_split(config)[0], params)


def shapes(config: ModelConfig) -> Any:
  """Returns the tree of the shapes of a model's parameters."""
  return nnx.as_pure(_split(config)[1])


@functools.cache
def _split(config: ModelConfig) -> tuple[nnx.GraphDef[Transformer], nnx.State]:
  model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return nnx.split(model)
