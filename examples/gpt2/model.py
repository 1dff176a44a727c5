"""A decoder of language, GPT-2 or Llama, in Flax NNX, with scanned layers.

Names of arrays end in letters that give their axes, in all of the repository:

A micro-batches of a step, B sequences, T tokens (queries of attention), S
source tokens (its keys and values, slots of the cache), N tokens of all
sequences together, C tokens of a chunk, D features, F hidden features of the
MLP, H heads, G groups of heads (each with a key and a value of its own), K
features of a head, X queries, key and value of a group, L layers, V vocabulary,
1 an axis of size one.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

from flax import nnx
import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as kernels,
  splash_attention_mask as masks,
)
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from examples.gpt2.config import ModelConfig
from examples.gpt2.sharding import (
  BATCH_AXES,
  constrain,
  gather_parameters,
  has_fsdp,
)

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""Function from queries, (B, T, H, K), keys and values, (B, T, G, K), to what
attention returns, of the shape of the queries, and anything that the caller
wants to be measured."""

# Queries, and keys, whose logits are on the chip of a TPU at once.
_MOST_IN_BLOCK = 512
_LEAST_IN_BLOCK = 128


class Transformer(nnx.Module):
  """Embedding, blocks and a norm; the head is the embedding unless untied.

  Parameters of the blocks are stacked on a leading axis of layers.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.token_embedding = _embedding(config, config.vocab_size, rngs)
    if config.architecture == 'gpt2':
      self.position_embedding = _embedding(config, config.context_length, rngs)
    make = nnx.vmap(lambda rngs: Block(config, rngs))
    self.blocks = nnx.split_rngs(splits=config.num_layers)(make)(rngs)
    self.final_norm = _norm(config, rngs)
    if config.untied_head:
      self.head = _linear(
        config, config.width, config.vocab_size, rngs, use_bias=False
      )

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the logits of each next token, float32, shape (B, T, V)."""
    features_BTD, _ = self.features(tokens_BT)
    return self.logits(features_BTD)

  def features(
    self,
    tokens_BT: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]] | None = None,
    *,
    first_position: jax.typing.ArrayLike = 0,
    by_layer: Any = (),
  ) -> tuple[jax.Array, Any]:
    """Runs all blocks.

    Args:
      tokens_BT: Tokens.
      attend: Function from queries, keys, values and the layer's part of
        ``by_layer`` to weighted values and anything to be returned by layer.
        Default: :func:`causal_attention`.
      first_position: Position of the first token.
      by_layer: Arguments of ``attend`` with a leading axis of layers.

    Returns:
      Features that the head reads, (B, T, D), and all that ``attend`` measured.
    """
    attend = attend or causal_attention
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
    self.attention_norm = _norm(config, rngs)
    self.attention = Attention(config, rngs)
    self.mlp_norm = _norm(config, rngs)
    self.mlp = MLP(config, rngs)

  def __call__(
    self, x_BTD: jax.Array, positions_T: jax.Array, attend: Attend
  ) -> tuple[jax.Array, Any]:
    """Returns the residual stream after the block, and what attend measured."""
    y_BTD, measured = self.attention(
      self.attention_norm(x_BTD), positions_T, attend
    )
    x_BTD = constrain(x_BTD + y_BTD)
    return constrain(x_BTD + self.mlp(self.mlp_norm(x_BTD))), measured


class Attention(nnx.Module):
  """Causal self-attention, in Llama with rotary positions and grouped queries.

  The kernel of queries, keys and values has the shape (width, groups, heads of
  a group + 2, head features), which is (width, heads, 3, head features) unless
  heads share keys: a shard of the tensor axis holds whole groups, and dimension
  numbers can take it as one matrix, or as one for each place in a group, or for
  each head.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    groups = config.num_kv_heads
    columns = groups, config.num_heads // groups + 2, config.head_width
    self.qkv = _linear(config, config.width, columns, rngs)
    self.out = _linear(
      config, config.attention_width, config.width, rngs, residual=True
    )
    if config.qk_norm:
      norm = functools.partial(
        nnx.RMSNorm,
        config.head_width,
        epsilon=1e-6,
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
      )
      self.query_norm, self.key_norm = norm(), norm()

  def __call__(
    self, x_BTD: jax.Array, positions_T: jax.Array, attend: Attend
  ) -> tuple[jax.Array, Any]:
    """Returns what the residual stream gets, and what attend measured."""
    qkv_BTGXK = constrain(_by_token(self.qkv, x_BTD), 'heads')
    *queries, key, value = jnp.moveaxis(qkv_BTGXK, 3, 0)
    heads = self.config.num_heads, self.config.head_width
    query = jnp.stack(queries, 3).reshape(*x_BTD.shape[:2], *heads)
    if self.config.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    if self.config.architecture == 'llama':
      frequencies_K = rotary_frequencies(self.config)
      query, key = (rotate(x, positions_T, frequencies_K) for x in (query, key))
    y_BTHK, measured = attend(query, key, value)
    y_BTD = y_BTHK.reshape(*x_BTD.shape[:2], -1)
    return _by_token(self.out, y_BTD), measured


class MLP(nnx.Module):
  """GELU between two linear layers; Llama: SwiGLU, with a third as gate."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    width, inner = config.width, config.mlp_width
    self.is_gated = config.architecture == 'llama'
    if self.is_gated:
      self.gate = _linear(config, width, inner, rngs)
    self.up = _linear(config, width, inner, rngs)
    self.down = _linear(config, inner, width, rngs, residual=True)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what is added to the residual stream, shape (B, T, D)."""
    return _by_token(self._transform, x_BTD)

  def _transform(self, x_ND: jax.Array) -> jax.Array:
    up_NF = self.up(x_ND)
    if self.is_gated:
      return self.down(jax.nn.silu(self.gate(x_ND)) * up_NF)
    return self.down(jax.nn.gelu(up_NF, approximate=True))


def _by_token(
  function: Callable[[jax.Array], jax.Array], x_BTD: jax.Array
) -> jax.Array:
  """Applies a function of (N, D) to tokens of shape (B, T, D)."""
  # With sequences and tokens as one axis, XLA copies less on CPU.
  y = function(x_BTD.reshape(-1, x_BTD.shape[-1]))
  return y.reshape(*x_BTD.shape[:2], *y.shape[1:])


def _linear(
  config: ModelConfig,
  inputs: int,
  outputs: int | tuple[int, ...],
  rngs: nnx.Rngs,
  *,
  residual: bool = False,
  use_bias: bool = True,
) -> nnx.LinearGeneral:
  """Makes a linear layer; one that ends a residual branch starts smaller."""
  # GPT-2 divides by the root of the number of residual branches.
  branches = 2 * config.num_layers if residual else 1
  stddev = config.init_std / math.sqrt(branches)
  return nnx.LinearGeneral(
    inputs,
    outputs,
    use_bias=use_bias and config.architecture == 'gpt2',
    dtype=jnp.dtype(config.dtype),
    kernel_init=nnx.initializers.normal(stddev),
    rngs=rngs,
  )


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
  """Makes the norm that stands before a branch; it computes in float32."""
  kind = nnx.LayerNorm if config.architecture == 'gpt2' else nnx.RMSNorm
  return kind(
    config.width,
    epsilon=config.norm_epsilon,
    dtype=jnp.dtype(config.dtype),
    # The fast variance, E[x^2] - E[x]^2, cancels digits that GPT-2 keeps.
    use_fast_variance=False,
    rngs=rngs,
  )


class Embedding(nnx.Embed):
  """Table of features, whose gradient is added up in float32.

  The gradient of a row is added up token by token, of which a common one has
  thousands. Flax's table adds in the dtype of the activations: bfloat16 would
  round each sum, and is slow on GPUs.
  """

  def __call__(self, tokens: jax.Array) -> jax.Array:  # type: ignore[override]
    """Returns the rows of tokens in the layer's dtype, (*tokens.shape, D)."""
    return _look_up(self.embedding.get_value(), tokens, self.dtype)


def _embedding(config: ModelConfig, rows: int, rngs: nnx.Rngs) -> Embedding:
  """Makes a table of features, shape (rows, width)."""
  return Embedding(
    rows,
    config.width,
    dtype=jnp.dtype(config.dtype),
    embedding_init=nnx.initializers.normal(config.init_std),
    rngs=rngs,
  )


# Devices send the table in the dtype of the activations. A lookup in float32
# that is rounded afterwards would have them send twice as much, once more for
# each micro-batch.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(
  table_VD: jax.Array, tokens: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  return jnp.take(table_VD.astype(dtype), tokens, axis=0)


def _look_up_forward(
  table_VD: jax.Array, tokens: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _look_up(table_VD, tokens, dtype), (table_VD, tokens)


def _look_up_backward(
  dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None]:
  table_VD, tokens = residuals
  gradient_VD = jnp.zeros_like(table_VD).at[tokens].add(g.astype(jnp.float32))
  if dtype != table_VD.dtype:
    # Else XLA adds to the gradient of a tied head, which it gathers for that.
    gradient_VD = jax.lax.optimization_barrier(gradient_VD)
  return gradient_VD, None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def rotary_frequencies(config: ModelConfig) -> jax.Array:
  """Returns by how much features turn from token to token, (K / 2,)."""
  half = config.head_width // 2
  frequencies = config.rope_theta ** (-jnp.arange(half) / half)
  if config.rope_scaling is None:
    return frequencies
  factor, low, high, length = config.rope_scaling
  turns = length * frequencies / (2 * math.pi)
  kept = jnp.clip((turns - low) / (high - low), 0, 1)
  return kept * frequencies + (1 - kept) * frequencies / factor


def rotate(
  x_BTHK: jax.Array, positions_T: jax.Array, frequencies_K: jax.Array
) -> jax.Array:
  """Turns features i and i + K / 2 by angles that grow with the position.

  After Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
  """
  angles = positions_T[:, None, None] * frequencies_K
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)


def causal_attention(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, None]:
  """Attends from each token to itself and those before it; measures nothing.

  On TPUs, and in half precision on GPUs, a kernel never writes the logits to
  memory.
  """
  platform = _platform()
  if platform == 'tpu' and query.shape[1] % _LEAST_IN_BLOCK == 0:
    return splash_attention(query, key, value), None
  is_fused = platform == 'gpu' and query.dtype == jnp.bfloat16
  y_BTHK = jax.nn.dot_product_attention(
    query,
    key,
    value,
    is_causal=True,
    implementation='cudnn' if is_fused else None,
  )
  return y_BTHK, None


def _platform() -> str:
  """Returns that of the mesh, for which a program may be compiled elsewhere."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return (device and device.platform) or jax.default_backend()


def splash_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Returns causal attention of jax's kernel for TPUs, (B, T, H, K).

  On a mesh, each device attends with its own sequences and heads, since the
  compiler cannot partition a kernel. ``interpret`` runs it without a TPU.
  """
  length, head_width = query.shape[1], query.shape[3]
  size = math.gcd(length, _MOST_IN_BLOCK)
  blocks: dict[str, Any] = dict.fromkeys(
    ('block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv', 'block_q_dq',
     'block_kv_dq'), size,
  )  # fmt: skip

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    mask = masks.CausalMask((length, length))
    kernel = kernels.make_splash_mha_single_device(
      masks.MultiHeadMask([mask] * q.shape[2]),
      block_sizes=kernels.BlockSizes(**blocks),
      interpret=interpret,
    )
    q, k, v = (x.swapaxes(1, 2) for x in (q * head_width**-0.5, k, v))
    return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)

  if not jax.sharding.get_abstract_mesh().empty:
    spec = P(BATCH_AXES, None, 'tensor')
    attend = jax.shard_map(
      attend, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
  return attend(query, key, value)


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
