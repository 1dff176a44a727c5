"""Pretrains GPT-2 or Llama on a mesh of devices: one file, to be copied.

    python examples/pretrain.py  # some minutes on two CPU cores
    JAX_NUM_CPU_DEVICES=8 python examples/pretrain.py --mesh fsdp=8 \
      --optimizer muon --out-dir runs/8

A run that was stopped resumes from its last checkpoint when the same command is
given again. On a pod or cluster, give it to every process, with --distributed
on. The commands of examples/gpt2 read its folder: generate, evaluate, convert
and plot.

Letters at the end of a name are the axes of an array: A micro-batches, B
sequences, T tokens, S shards of the batch, C tokens of a chunk, D features, F
hidden features of the MLP, H heads, X query, key and value, K features of a
head, L layers, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
import time
from typing import Any, Literal
import zlib

from etils.epath import Path
from flax import nnx
import fsspec
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers
import orbax.checkpoint as ocp
import safetensors.numpy
import tyro

import merit_optax

# Layers are stacked; queries, keys and values of all heads are one matrix.
matrices = functools.partial(
  merit_optax.flax_dimension_numbers,
  stacked={'^blocks/': 1},
  overrides={'qkv/kernel$': MuonDimensionNumbers((-4,), (-3, -2, -1))},
)
peak = merit_optax.starting_learning_rate
merit = functools.partial(
  merit_optax.merit, weight_decay=0.01, weight_dimension_numbers=matrices
)
adamw = functools.partial(optax.adamw, b2=0.95, weight_decay=0.1)
muon = functools.partial(
  merit_optax.muon, weight_decay=0.1, weight_dimension_numbers=matrices
)
hyperball = functools.partial(
  merit_optax.muon_hyperball, weight_dimension_numbers=matrices
)
# An optimizer of a learning rate and the settings, and its usual peak.
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
  'merit': (lambda rate, c: merit(rate), lambda c: peak('merit', c.steps)),
  'merit-hidden': (
    lambda rate, c: merit_optax.partition_hidden(
      merit(rate), others=optax.adam(make_schedule(c, 0.004), b2=0.95)
    ),
    lambda c: peak('merit', c.steps),
  ),
  'adamw': (lambda rate, c: adamw(rate), lambda c: 1 / c.width),
  'muon': (
    lambda rate, c: muon(rate, ns_dtype=c.dtype),
    lambda c: peak('muon', c.steps, c.width),
  ),
  'muon-hyperball': (
    lambda rate, c: hyperball(rate, ns_dtype=c.dtype),
    lambda c: peak('muon_hyperball', c.steps),
  ),
}


@dataclasses.dataclass(frozen=True)
class Config:
  """Pretrains GPT-2 or Llama."""

  data: str = 'stdlib'  # Folder of tokens, also s3:// or gs://. Or the stdlib.
  vocab_size: int = 256  # Above every token, where there is no index.json.
  out_dir: Path = Path('runs/pretrain')  # All hosts must see it; or gs://.
  seed: int = 0  # Of the weights and of the order of the data.

  architecture: Literal['gpt2', 'llama'] = 'gpt2'
  num_layers: int = 4
  num_heads: int = 4
  width: int = 128  # Features of the residual stream.
  init_std: float | None = None  # Of most matrices. None: by the width.
  context_length: int = 128  # Tokens in a sequence.
  qk_norm: bool = False  # Whether each query and key goes through an RMSNorm.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Of activations.
  # What the backward pass computes again: nothing, all but products, a block.
  remat: Literal['none', 'dots', 'full'] = 'none'
  unroll: int = 1  # Layers compiled one by one: slower, but faster on GPUs.

  optimizer: Literal[*OPTIMIZERS] = 'merit'  # type: ignore[valid-type]
  """Name in OPTIMIZERS."""
  learning_rate: float | None = None  # Peak. None: by the optimizer.
  batch_size: int = 32  # Sequences in a step, on all devices together.
  # Sequences that a shard of the batch has at once; the gradient is added up.
  micro_batch_size: int | None = 8
  steps: int = 400  # Updates.

  eval_every: int = 50  # Steps between evaluations.
  eval_sequences: int = 256  # At the most, in whole micro-batches.
  checkpoint_every: int = 50  # Steps between checkpoints.
  wandb: str | None = None  # Project at Weights & Biases to log to.

  mesh: str = ''  # Such as fsdp=4,tensor=2. Devices that are left are data.
  # Whether to connect to the other processes of a pod or job.
  distributed: Literal['on', 'off'] = 'off'

  @property
  def rows(self) -> int:
    """Rows of the embedding."""
    return -(-self.vocab_size // 64) * 64

  @property
  def mlp_width(self) -> int:
    """Hidden features of the MLP; SwiGLU has a third matrix."""
    is_gated = self.architecture == 'llama'
    return -(-self.width // 6) * 16 if is_gated else 4 * self.width


# These may change when a run resumes. The others decide its losses.
FREE = {
  'out_dir', 'remat', 'unroll', 'micro_batch_size', 'eval_every', 'mesh',
  'eval_sequences', 'checkpoint_every', 'wandb', 'distributed',
}  # fmt: skip


def with_defaults(config: Config) -> Config:
  """Returns the settings with those that follow from others."""
  # GPT-2's at its width. Twice that was better where norms are kept.
  size = 0.04 if config.optimizer == 'muon-hyperball' else 0.02
  defaults: dict[str, Any] = dict(
    init_std=size * (768 / config.width) ** 0.5,
    learning_rate=OPTIMIZERS[config.optimizer][1](config),
  )
  missing = {k: x for k, x in defaults.items() if getattr(config, k) is None}
  missing['vocab_size'] = read_index(config).get(
    'vocab_size', config.vocab_size
  )
  return dataclasses.replace(config, **missing)


normal = nnx.initializers.normal
# The mesh axes data and fsdp split the batch. Matrices and their moments are
# split by fsdp along the residual stream, by tensor along heads and hidden
# features, by both along the vocabulary. All else is copied to every device.
BATCH = ('data', 'fsdp')
AXES = (*BATCH, 'tensor')
MATRICES = {
  'token_embedding.embedding': P(('tensor', 'fsdp'), None),  # VD
  'qkv.kernel': P(None, 'fsdp', 'tensor', None, None),  # LDHXK
  'out.kernel': P(None, 'tensor', 'fsdp'),  # L(HK)D
  'up.kernel': P(None, 'fsdp', 'tensor'),  # LDF
  'gate.kernel': P(None, 'fsdp', 'tensor'),  # LDF
  'down.kernel': P(None, 'tensor', 'fsdp'),  # LFD
}


def make_mesh(config: Config) -> Mesh:
  """Returns the device mesh; the axis data takes the devices that are left."""
  axes = dict.fromkeys(AXES, 1)
  for part in filter(None, config.mesh.split(',')):
    name, _, size = part.partition('=')
    if name not in AXES[1:] or not size.isdecimal() or not int(size):
      raise ValueError(f'mesh must be as fsdp=4,tensor=2, got {config.mesh!r}.')
    axes[name] = int(size)
  axes['data'] = jax.device_count() // (axes['fsdp'] * axes['tensor'])
  sizes: Any = vars(config) | axes
  sizes |= dict(devices=jax.device_count(), rows=config.rows)
  for name, *parts in (  # JAX would copy what it cannot split.
    ('devices', 'fsdp', 'tensor'), ('rows', 'fsdp', 'tensor'),
    ('width', 'fsdp'), ('width', 'num_heads'), ('num_heads', 'tensor'),
    ('batch_size', 'data', 'fsdp'),
  ):  # fmt: skip
    if sizes[name] % np.prod([sizes[x] for x in parts]):
      raise ValueError(f'{"*".join(parts)} must divide {name} {sizes[name]}.')
  shape, types = [axes[x] for x in AXES], (AxisType.Auto,) * 3
  mesh = jax.make_mesh(shape, AXES, axis_types=types)
  if config.batch_size % (rows := micro_batch(config, mesh)):
    raise ValueError(f'batch_size must be a multiple of {rows}, a micro-batch.')
  return mesh


def micro_batch(config: Config, mesh: Mesh) -> int:
  """Returns the sequences of a micro-batch, on all devices together."""
  shards = mesh.shape['data'] * mesh.shape['fsdp']
  size = config.micro_batch_size or config.batch_size
  return min(size * shards, config.batch_size)


def name_of(path: tuple[Any, ...]) -> str:
  """Returns the path of an array, such as params.blocks.mlp.up.kernel."""
  return jax.tree_util.keystr(path, simple=True, separator='.')


def pin(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
  """Fixes where an array of the training state is; to be traced."""
  # The path of a moment ends with that of its parameter. What an optimizer
  # keeps of its rows or columns has fewer axes.
  spec = MATRICES.get(name_of(path[-2:]), P())
  spec = spec if len(spec) == x.ndim else P()
  return jax.lax.with_sharding_constraint(x, spec)


def read_index(config: Config) -> dict[str, Any]:
  """Returns what examples.gpt2.prepare says of its shards, {} of others."""
  file = Path(config.data) / 'index.json'
  return json.loads(file.read_text()) if file.exists() else {}


class Tokens:
  """Tokens of files on a disk or in a bucket, read where they are asked for.

  Attributes:
    sizes: Number of tokens of each file.
  """

  def __init__(self, addresses: list[str], dtype: str, vocab_size: int):
    """Takes addresses and the type of tokens, and what they are below."""
    self.system, _ = fsspec.url_to_fs(addresses[0])
    self.paths = [fsspec.url_to_fs(address)[1] for address in addresses]
    self.dtype, self.vocab_size = np.dtype(dtype), vocab_size
    sizes = [self.system.size(path) for path in self.paths]
    self.sizes = np.array(sizes) // self.dtype.itemsize

  def count(self, length: int) -> int:
    """Returns the number of windows, each of which lies in one file."""
    return int(np.maximum(self.sizes - length + 1, 0).sum())

  def windows(self, numbers: Any, length: int) -> np.ndarray:
    """Returns windows by their numbers, int32, (windows, length)."""
    counts = np.maximum(self.sizes - length + 1, 0)
    ends = np.cumsum(counts)
    files = np.searchsorted(ends, numbers, 'right')
    starts = numbers - (ends - counts)[files]
    size = self.dtype.itemsize
    # Those in a bucket are read at the same time.
    contents = self.system.cat_ranges(
      [self.paths[i] for i in files],
      (starts * size).tolist(),
      ((starts + length) * size).tolist(),
      on_error='raise',
    )
    tokens = np.stack([np.frombuffer(x, self.dtype) for x in contents])
    # JAX does not check indices: a larger token would make the loss NaN.
    if (largest := tokens.max()) >= self.vocab_size:
      raise ValueError(f'vocab_size must be above {largest}, a token.')
    return tokens.astype(np.int32)


def load_tokens(config: Config) -> list[Tokens]:
  """Returns tokens to train on and tokens to validate on."""
  folder, dtype = config.data, 'uint16'
  if config.vocab_size > 1 << 16:
    dtype = 'uint32'
  if folder == 'stdlib':
    folder, dtype = 'memory://stdlib', 'uint8'
    files = sorted(Path(os.__file__).parent.glob('*.py'))
    text = b''.join(file.read_bytes() for file in files)
    end = len(text) * 95 // 100
    fsspec.filesystem('memory').pipe(
      {f'{folder}/train.bin': text[:end], f'{folder}/val.bin': text[end:]}
    )
  parts, index = [], read_index(config)
  dtype = index.get('dtype', dtype)
  for part in ('train', 'val'):
    names = index.get('shards', {}).get(part, [f'{part}.bin'])
    addresses = [f'{folder}/{name}' for name in names]
    tokens = Tokens(addresses, dtype, config.vocab_size)
    if not tokens.count(config.context_length + 1):
      size = tokens.sizes.max()
      raise ValueError(f'context_length must be below {size}, as {part} has.')
    parts.append(tokens)
  return parts


def digest(parts: list[Tokens], length: int) -> str:
  """Returns a hash of sizes, and of windows spread over the tokens."""
  code = zlib.crc32(json.dumps([x.sizes.tolist() for x in parts]).encode())
  for tokens in parts:
    numbers = np.linspace(0, tokens.count(length) - 1, 64, dtype=int)
    code = zlib.crc32(tokens.windows(numbers, length).tobytes(), code)
  return f'{code:08x}'


def make_batch(tokens: Tokens, config: Config, step: int) -> jax.Array:
  """Returns the sequences of a step, or of validation, int32, (A, B, T + 1)."""
  mesh, length = jax.sharding.get_mesh(), config.context_length + 1
  rows, count = micro_batch(config, mesh), tokens.count(length)
  if step:
    # By seed and step alone: a run resumes with the batches it would have had.
    rng = np.random.default_rng((config.seed, step))
    numbers = rng.integers(count, size=config.batch_size)
  else:
    # To validate on: spread evenly, the same for any seed.
    size = max(rows, config.eval_sequences // rows * rows)
    numbers = np.linspace(0, count - 1, size, dtype=int)
  numbers_AB = numbers.reshape(-1, rows)

  def read(index: Any) -> np.ndarray:
    part_AB = numbers_AB[index[:2]]
    return tokens.windows(part_AB.ravel(), length).reshape(*part_AB.shape, -1)

  # A process reads the sequences of its own devices only.
  sharding = NamedSharding(mesh, P(None, BATCH))
  shape = (*numbers_AB.shape, length)
  return jax.make_array_from_callback(shape, sharding, read)


def make_norm(config: Config, rngs: nnx.Rngs) -> nnx.Module:
  """Returns a norm of the residual stream."""
  kind = nnx.RMSNorm if config.architecture == 'llama' else nnx.LayerNorm
  return kind(
    config.width,
    epsilon=1e-5,
    dtype=config.dtype,
    use_fast_variance=False,  # Which cancels digits.
    rngs=rngs,
  )


def make_linear(
  config: Config, inputs: int, outputs: Any, rngs: nnx.Rngs, branches: int = 1
) -> nnx.Module:
  """Returns a linear layer; what a residual stream adds up starts smaller."""
  return nnx.LinearGeneral(
    inputs,
    outputs,
    use_bias=config.architecture == 'gpt2',
    dtype=config.dtype,
    kernel_init=normal(config.init_std / branches**0.5),
    rngs=rngs,
  )


def rotate(x_BTHK: jax.Array) -> jax.Array:
  """Turns pairs of features by angles that grow with the position: RoPE."""
  length, half = x_BTHK.shape[1], x_BTHK.shape[-1] // 2
  angles_TK = np.outer(np.arange(length), 1e4 ** (-np.arange(half) / half))
  cos, sin = jnp.cos(angles_TK)[:, None], jnp.sin(angles_TK)[:, None]
  a, b = jnp.split(x_BTHK.astype('float32'), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
  return turned.astype(x_BTHK.dtype)


class Attention(nnx.Module):
  """Causal self-attention."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.config, width = config, config.width
    head = width // config.num_heads
    # H comes before X, so that a device of the axis tensor has whole heads.
    self.qkv = make_linear(config, width, (config.num_heads, 3, head), rngs)
    branches = 2 * config.num_layers
    self.out = make_linear(config, width, width, rngs, branches)
    if config.qk_norm:
      norm = functools.partial(nnx.RMSNorm, dtype=config.dtype, rngs=rngs)
      self.query_norm, self.key_norm = norm(head), norm(head)

  def query_key_value(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the queries, keys and values of all heads, (B, T, H, K) each."""
    query, key, value = jnp.moveaxis(self.qkv(x_BTD), 3, 0)
    if self.config.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    if self.config.architecture == 'llama':
      query, key = rotate(query), rotate(key)
    return query, key, value

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what the residual stream gets."""
    # cuDNN's kernel does not store the logits, (B, H, T, T); it takes bfloat16.
    is_fused = jax.default_backend() == 'gpu' and x_BTD.dtype == jnp.bfloat16
    y_BTHK = jax.nn.dot_product_attention(
      *self.query_key_value(x_BTD),
      is_causal=True,
      implementation='cudnn' if is_fused else 'xla',
    )
    return self.out(y_BTHK.reshape(x_BTD.shape))


class MLP(nnx.Module):
  """GELU between two linear layers; Llama: SwiGLU, with a third as gate."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    width, hidden = config.width, config.mlp_width
    self.is_gated = config.architecture == 'llama'
    if self.is_gated:
      self.gate = make_linear(config, width, hidden, rngs)
    self.up = make_linear(config, width, hidden, rngs)
    self.down = make_linear(config, hidden, width, rngs, 2 * config.num_layers)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns what the residual stream gets."""
    if self.is_gated:
      return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))
    return self.down(jax.nn.gelu(self.up(x_BTD)))


class Block(nnx.Module):
  """Transformer block: attention and an MLP, each after a norm."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.attention_norm = make_norm(config, rngs)
    self.attention = Attention(config, rngs)
    self.mlp_norm = make_norm(config, rngs)
    self.mlp = MLP(config, rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the residual stream after the block."""
    x_BTD += self.attention(self.attention_norm(x_BTD))
    return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Transformer(nnx.Module):
  """The model, the parameters of its blocks stacked on an axis of layers."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    embedding: Any = functools.partial(
      nnx.Embed,
      embedding_init=normal(config.init_std),
      dtype=config.dtype,
      rngs=rngs,
    )
    self.config = config
    self.token_embedding = embedding(config.rows, config.width)
    if config.architecture == 'gpt2':
      self.position_embedding = embedding(config.context_length, config.width)
    keys = jax.random.split(rngs.params(), config.num_layers)
    self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(keys)
    self.final_norm = make_norm(config, rngs)

  def embed(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the residual stream before the first block, (B, T, D)."""
    # The gradient of a row is added up token by token, hence in float32:
    # bfloat16 would round each sum, and is slow on GPUs.
    tokens_BTD = self.token_embedding.embedding[tokens_BT]
    if self.config.architecture == 'llama':
      return tokens_BTD.astype(self.config.dtype)
    positions_TD = self.position_embedding.embedding[: tokens_BT.shape[1]]
    dtype = self.config.dtype
    return tokens_BTD.astype(dtype) + positions_TD.astype(dtype)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the features that the head reads, (B, T, D)."""
    x_BTD = self.embed(tokens_BT)
    # The scan compiles one block, and gives it one layer's arrays at a time.
    structure, arrays = nnx.split(self.blocks)

    def apply(x_BTD: jax.Array, arrays: Any) -> tuple[jax.Array, None]:
      # Without this, the compiler may split features, as in the parameters.
      x_BTD = jax.lax.with_sharding_constraint(x_BTD, P(BATCH))
      return nnx.merge(structure, arrays)(x_BTD), None

    if self.config.remat != 'none':
      policy = None
      if self.config.remat == 'dots':
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
      # In a scan, nothing could be merged anyway.
      apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
    x_BTD, _ = jax.lax.scan(apply, x_BTD, arrays, unroll=self.config.unroll)
    return self.final_norm(x_BTD)


def make_schedule(config: Config, peak: Any) -> optax.Schedule:
  """Returns a learning rate with warm-up and cosine decay."""
  warmup = config.steps // 10
  return optax.warmup_cosine_decay_schedule(
    peak / max(1, warmup), peak, warmup, config.steps
  )


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """Returns the optimizer, after a gradient clip."""
  make, _ = OPTIMIZERS[config.optimizer]
  rate = make_schedule(config, config.learning_rate)
  return optax.chain(optax.clip_by_global_norm(1.0), make(rate, config))


def init_params(config: Config) -> Any:
  """Returns the first parameters, a tree of arrays."""
  return nnx.as_pure(nnx.state(Transformer(config, nnx.Rngs(config.seed))))


@functools.partial(jax.jit, static_argnames='config')
def init_state(config: Config) -> dict[str, Any]:
  """Returns the first parameters and optimizer state, as trees of arrays."""
  params = init_params(config)
  state = dict(params=params, opt_state=make_optimizer(config).init(params))
  return jax.tree.map_with_path(pin, state)


def make_model(params: Any, config: Config) -> Transformer:
  """Returns the model with these parameters."""
  # No arrays yet.
  model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
  nnx.update(model, params)
  return model


LOGITS_AT_ONCE = 1 << 27  # Of a device, in float32: half a gigabyte.


@jax.custom_vjp
def cross_entropy(
  features_BTD: jax.Array, head_VD: jax.Array, labels_BT: jax.Array
) -> jax.Array:
  """Returns the mean cross-entropy in nats per token.

  There are logits of some tokens at a time, and once: gradients are computed
  beside the loss.
  """
  return loss_and_gradients(features_BTD, head_VD, labels_BT)[0]


def loss_and_gradients(
  features_BTD: jax.Array, head_VD: jax.Array, labels_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the mean cross-entropy, and its gradients of features and head."""
  shape, dtype = jax.sharding.get_abstract_mesh().shape, features_BTD.dtype
  shards, size = shape['data'] * shape['fsdp'], len(head_VD)
  # Each shard of the batch has the head, and adds up a gradient of its own.
  head_SVD = jnp.broadcast_to(head_VD.astype(dtype), (shards, *head_VD.shape))
  head_SVD = jax.lax.with_sharding_constraint(head_SVD, P(BATCH, 'tensor'))
  tokens = labels_BT.size // shards
  most = min(tokens, max(1, LOGITS_AT_ONCE // size))
  chunk = next(x for x in range(most, 0, -1) if tokens % x == 0)

  def cut(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x.reshape(shards, -1, chunk, *x.shape[2:]), 1, 0)

  def loss_fn(features_SCD: Any, head_SVD: Any, labels_SC: Any) -> jax.Array:
    logits_SCV = jnp.einsum(
      'SCD,SVD->SCV', features_SCD, head_SVD, preferred_element_type='float32'
    )
    # Unlike integer labels, a comparison is fused, and splits over the mesh.
    labels_SCV = jax.nn.one_hot(labels_SC, size)
    return optax.softmax_cross_entropy(logits_SCV, labels_SCV).sum()

  def add(total: Any, chunk: Any) -> tuple[Any, jax.Array]:
    grad_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
    loss, (features_SCD, grad_SVD) = grad_fn(chunk[0], head_SVD, chunk[1])
    return (total[0] + loss, total[1] + grad_SVD), features_SCD

  zero = jnp.float32(0), jnp.zeros_like(head_SVD, 'float32')
  chunks = cut(features_BTD), cut(labels_BT)
  (loss, grad_SVD), grads = jax.lax.scan(add, zero, chunks)
  grad_BTD = jnp.moveaxis(grads, 0, 1).reshape(features_BTD.shape)
  count = labels_BT.size
  return loss / count, (grad_BTD / count, grad_SVD.sum(0) / count)


cross_entropy.defvjp(
  loss_and_gradients,
  lambda gradients, g: (*((g * x).astype(x.dtype) for x in gradients), None),
)


def loss_fn(params: Any, tokens_BT: jax.Array, config: Config) -> jax.Array:
  """Returns the mean cross-entropy in nats per token."""
  features_BTD = make_model(params, config)(tokens_BT[:, :-1])
  head_VD = params['token_embedding']['embedding']
  return cross_entropy(features_BTD, head_VD, tokens_BT[:, 1:])


@functools.partial(jax.jit, static_argnames='config', donate_argnames='state')
def train_step(state: Any, tokens_ABT: jax.Array, config: Config) -> Any:
  """Returns the next state, and the loss and gradient norm before the step."""
  params, opt_state = state['params'], state['opt_state']

  def add(total: Any, tokens_BT: jax.Array) -> tuple[Any, None]:
    one = jax.value_and_grad(loss_fn)(params, tokens_BT, config)
    return jax.tree.map(jnp.add, total, one), None

  zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
  total, _ = jax.lax.scan(add, zero, tokens_ABT)
  loss, grads = jax.tree.map(lambda x: x / len(tokens_ABT), total)
  updates, opt_state = make_optimizer(config).update(grads, opt_state, params)
  state = dict(params=optax.apply_updates(params, updates), opt_state=opt_state)
  metrics = dict(train_loss=loss, gradient_norm=optax.tree.norm(grads))
  return jax.tree.map_with_path(pin, state), metrics


@functools.partial(jax.jit, static_argnames='config')
def eval_step(params: Any, tokens_ABT: jax.Array, config: Config) -> jax.Array:
  """Returns the mean loss."""
  return jax.lax.map(lambda x: loss_fn(params, x, config), tokens_ABT).mean()


@jax.jit
def is_finite(state: Any) -> jax.Array:
  """Returns whether all numbers of a state are finite."""
  found = [jnp.isfinite(x).all() for x in jax.tree.leaves(state)]
  return jnp.array(found).all()


def by_path(tree: Any) -> dict[str, Any]:
  """Returns the arrays of a tree by their paths, as checkpoints hold them."""
  return {name_of(path): x for path, x in jax.tree.leaves_with_path(tree)}


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
  """Returns the manager of the checkpoints of a run, of which two are kept."""
  last_two = ocp.checkpoint_managers.LatestN(2)
  options = ocp.CheckpointManagerOptions(preservation_policy=last_two)
  handlers = ocp.PyTreeCheckpointHandler()
  folder = folder / 'checkpoints'
  return ocp.CheckpointManager(folder, item_handlers=handlers, options=options)


def start(manager: Any, config: Config, settings: Any) -> tuple[int, Any]:
  """Returns the steps that are done, and the state after them."""
  state, step = init_state(config), manager.latest_step()
  if step is None:
    return 0, state
  old = manager.metadata(step).custom_metadata or {}
  changed = {k: old.get(k) for k, v in settings.items() if old.get(k) != v}
  if changed:
    raise ValueError(f'{config.out_dir} holds a run with {changed}.')
  # What an array is and where it goes; itself it would be in the way.
  state = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  like = by_path(state)
  places = ocp.checkpoint_utils.construct_restore_args(like)
  args = ocp.args.PyTreeRestore(like, restore_args=places)
  arrays = manager.restore(step, args=args)
  leaves = [arrays[name] for name in like]
  return step, jax.tree.unflatten(jax.tree.structure(state), leaves)


def save(manager: Any, step: int, state: Any, settings: Any) -> None:
  """Starts to save a state; the next step may change it meanwhile."""
  # A loss is of the weights before its step.
  if not is_finite(state):
    raise FloatingPointError(f'A weight is not finite after step {step}.')
  args = ocp.args.PyTreeSave(by_path(state))
  manager.save(step, args=args, custom_metadata=settings)


def write_whole(file: Path, content: bytes) -> None:
  """Writes a file, or leaves the one that is there."""
  scratch = file.with_name(f'{file.name}.tmp')
  scratch.write_bytes(content)
  scratch.replace(file)


def write_description(config: Config, folder: Path) -> None:
  """Writes what the model is, for the commands of examples/gpt2."""
  folder.mkdir(parents=True, exist_ok=True)
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    if (file := Path(config.data) / name).exists():
      write_whole(folder / name, file.read_bytes())
  names = (
    'architecture', 'num_layers', 'num_heads', 'width', 'mlp_width', 'init_std',
    'context_length', 'qk_norm', 'dtype', 'remat', 'unroll',
  )  # fmt: skip
  model = {name: getattr(config, name) for name in names}
  model |= dict(
    vocab_size=config.rows, num_kv_heads=config.num_heads, untied_head=False,
    head_width=config.width // config.num_heads, norm_epsilon=1e-5,
    rope_theta=1e4, rope_scaling=None,
  )  # fmt: skip
  text = json.dumps({'num_tokens': config.vocab_size, 'config': model})
  write_whole(folder / 'model.json', text.encode())


def write_weights(params: Any, folder: Path) -> None:
  """Writes the parameters; all processes call it, and process 0 writes."""
  gather = functools.partial(multihost_utils.process_allgather, tiled=True)
  arrays = {k: np.asarray(gather(x)) for k, x in by_path(params).items()}
  if jax.process_index() == 0:
    content = safetensors.numpy.save(arrays)
    write_whole(folder / 'weights.safetensors', content)


class Log:
  """Writes the metrics of each step as a line of JSON, and to W&B.

  Attributes:
    losses: Losses of the steps that are done.
    running: Numbers and metrics of steps that may still run.
    since: When the first of these began.
  """

  def __init__(self, config: Config, folder: Path, first: int):
    self.config, self.file = config, folder / 'metrics.jsonl'
    schedule = make_schedule(config, config.learning_rate)
    self.rates = jax.vmap(schedule)(np.arange(config.steps)).tolist()
    self.losses: list[float] = []
    self.running: list[tuple[int, Any]] = []
    self.wandb: Any = None
    self.since = time.perf_counter()
    if jax.process_index() == 0:
      # Steps after the last checkpoint come again; a kill may tear a line.
      text = self.file.read_text() if self.file.exists() else ''
      write_whole(self.file, lines_until(first, text).encode())
      self.wandb = open_wandb(config, folder) if config.wandb else None

  def write(self, evaluate: Any = None) -> dict[str, float]:
    """Waits for the steps that run, and returns the metrics of the last."""
    tokens = self.config.batch_size * self.config.context_length
    jax.block_until_ready(self.running)
    seconds = (time.perf_counter() - self.since) / len(self.running)
    line, lines = dict[str, float](), []
    for step, metrics in self.running:
      found = {name: float(x) for name, x in metrics.items()}
      if not np.isfinite([*found.values()]).all():
        raise FloatingPointError(f'Step {step} had {found}.')
      line = dict(
        step=step, tokens=step * tokens, learning_rate=self.rates[step - 1],
        **found, tokens_per_second=tokens / seconds,
      )  # fmt: skip
      if evaluate and step == self.running[-1][0]:
        line['val_loss'] = float(evaluate())
      self.losses.append(line['train_loss'])
      lines.append(f'{json.dumps(line)}\n')
      if self.wandb:
        self.wandb.log(line, step=step)
    if jax.process_index() == 0:
      is_bucket = '://' in str(self.file)  # Which cannot append.
      lines = [self.file.read_text(), *lines] if is_bucket else lines
      with self.file.open('w' if is_bucket else 'a') as file:
        file.writelines(lines)
    self.running, self.since = [], time.perf_counter()
    return line


def lines_until(step: int, text: str) -> str:
  """Returns the lines of metrics of the first steps."""
  lines = []
  for line in text.splitlines(keepends=True):
    with contextlib.suppress(ValueError):
      if json.loads(line)['step'] <= step:
        lines.append(line)
  return ''.join(lines)


def open_wandb(config: Config, folder: Path) -> Any:
  """Returns the run at Weights & Biases; one that resumes goes on there."""
  import wandb  # noqa: PLC0415  Optional.

  file = folder / 'wandb_id.txt'
  known = file.read_text() if file.exists() else None
  settings = {k: str(v) for k, v in vars(config).items()}
  place = None if '://' in str(folder) else str(folder)
  run = wandb.init(
    project=config.wandb, id=known, resume='allow', config=settings, dir=place
  )
  file.write_text(run.id)
  return run


STOP = threading.Event()  # Set by SIGTERM.


def asked_to_stop(step: int) -> bool:
  """Returns whether to stop after a step, the same in all processes."""
  # jax takes over SIGTERM, and has all of them stop after the same step.
  if jax.process_count() > 1:
    return bool(multihost_utils.reached_preemption_sync_point(step))
  return STOP.is_set()


def train(config: Config) -> list[float]:
  """Trains from the last checkpoint on, and returns the loss of each step."""
  if config.distributed == 'on':
    jax.distributed.initialize()
  config, is_process_0 = with_defaults(config), jax.process_index() == 0
  say = functools.partial(print, flush=True) if is_process_0 else lambda _: None
  folder = Path(os.getcwd()) / config.out_dir  # Orbax wants absolute ones.
  if str(config.out_dir).startswith('s3:'):
    raise ValueError(f'out_dir must be on a disk or gs://: {config.out_dir}')
  tokens, val_tokens = load_tokens(config)
  settings: dict[str, Any] = {
    k: str(v) for k, v in vars(config).items() if k not in FREE
  }
  settings['checksums'] = None  # Which checkpoints of examples/gpt2 have.
  # The text itself, wherever it is.
  settings['data'] = digest([tokens, val_tokens], config.context_length + 1)
  with jax.set_mesh(make_mesh(config)), open_checkpoints(folder) as manager:
    first, state = start(manager, config, settings)
    if is_process_0:
      write_description(config, folder)
    devices = f'{jax.device_count()} {jax.default_backend()} devices'
    say(f'{config.out_dir}: step {first} of {config.steps} on {devices}')
    val_ABT = make_batch(val_tokens, config, step=0)
    log = Log(config, folder, first)
    for step in range(first + 1, config.steps + 1):
      # Does not wait for the devices: they work while the next batch is made.
      batch_ABT = make_batch(tokens, config, step)
      if step == first + 1:
        take_step = train_step.lower(state, batch_ABT, config).compile()
        # Devices wait for each other half a minute only.
        everyone = set(range(jax.process_count()))
        ocp.multihost.sync_global_processes(
          '', timeout=3600, processes=everyone
        )
      state, metrics = take_step(state, batch_ABT)
      log.running.append((step, metrics))
      is_last = (is_stopped := asked_to_stop(step)) or step == config.steps
      is_saved = is_last or step % config.checkpoint_every == 0
      evaluate = None
      if is_last or step % config.eval_every == 0:
        params = state['params']
        evaluate = functools.partial(eval_step, params, val_ABT, config)
      if evaluate or is_saved or step % 10 == 0 or step == first + 1:
        found = log.write(evaluate)
        text = f'step {step} loss {found["train_loss"]:.3f}'
        if evaluate:
          text += f' val {found["val_loss"]:.3f}'
        say(f'{text} {found["tokens_per_second"]:,.0f} tokens/s')
      if is_saved:
        save(manager, step, state, settings)
        log.since = time.perf_counter()  # Saves are not in the speed.
      if is_stopped:
        STOP.set()
        break
    else:
      write_weights(state['params'], folder)
  say(f'{"stopped" if STOP.is_set() else "finished"}: {config.out_dir}')
  return log.losses


def main() -> None:
  """Runs the command line; SIGTERM has it save and end, with status 143."""
  signal.signal(signal.SIGTERM, lambda *_: STOP.set())
  train(tyro.cli(Config))
  if STOP.is_set():
    sys.exit(128 + signal.SIGTERM)


if __name__ == '__main__':
  main()
