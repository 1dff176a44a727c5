"""Pretrains GPT-2 with MERIT on a mesh of devices: one file, to be copied.

    python examples/pretrain.py  # some minutes on two CPU cores
    JAX_NUM_CPU_DEVICES=8 python examples/pretrain.py --fsdp 8 --out-dir runs/8

A run that was stopped resumes from its last checkpoint when the same command is
given again. On a pod or cluster, give it to every process, with --distributed.

Letters at the end of a name are the axes of an array: A micro-batches, B
sequences, T tokens, D features, F hidden features of the MLP, H heads, X query,
key and value, K features of a head, L layers, V vocabulary.
"""

import dataclasses
import functools
import os
import time
from typing import Any, Literal
import zlib

from etils.epath import Path
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro

import merit_optax


@dataclasses.dataclass(frozen=True)
class Config:
  """Pretrains GPT-2 with MERIT."""

  data: Path | None = None  # Folder of uint16 train.bin, val.bin. None: stdlib.
  vocab_size: int = 256  # Above every token; a multiple of 64 is faster.
  out_dir: Path = Path('runs/pretrain')  # All hosts must see it; or gs://.
  seed: int = 0  # Of the weights and of the order of the data.

  num_layers: int = 4
  num_heads: int = 4
  width: int = 128  # Features of the residual stream.
  init_std: float = 0.049  # Of most matrices. Take 0.02 * sqrt(768 / width).
  context_length: int = 128  # Tokens in a sequence.
  qk_norm: bool = False  # Whether each query and key goes through an RMSNorm.
  llama: bool = False  # Llama's blocks: RMSNorm, RoPE, SwiGLU, no biases.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Of activations.
  remat: bool = False  # Compute each block again in the backward pass.
  unroll: bool = False  # Compile each layer: slower, but faster steps on GPUs.

  batch_size: int = 32  # Sequences in a step, on all devices together.
  accumulation_steps: int = 1  # Micro-batches that a batch is split into.
  steps: int = 400
  learning_rate: float = 0.02  # Peak. Start at 0.4 / sqrt(steps).
  weight_decay: float = 0.01
  eval_every: int = 20  # Steps between lines of output, each with a checkpoint.

  fsdp: int = 1  # Devices that parameters and batches are split over.
  tensor: int = 1  # Devices that heads, MLP and vocabulary are split over.
  distributed: bool = False  # Connect to the other processes of a pod or job.


normal = nnx.initializers.normal
# The mesh axes data and fsdp split the batch. Matrices and their moments are
# split by fsdp along the residual stream, by tensor along heads and hidden
# features, by both along the vocabulary. All else is copied to every device.
BATCH = ('data', 'fsdp')
MATRICES = {
  'token_embedding.embedding': P(('tensor', 'fsdp')),  # VD
  'qkv.kernel': P(None, 'fsdp', 'tensor'),  # LD(HXK)
  'out.kernel': P(None, 'tensor', 'fsdp'),  # L(HK)D
  'up.kernel': P(None, 'fsdp', 'tensor'),  # LDF
  'gate.kernel': P(None, 'fsdp', 'tensor'),  # LDF
  'down.kernel': P(None, 'tensor', 'fsdp'),  # LFD
}


def make_mesh(config: Config) -> Mesh:
  """Returns the device mesh; the axis data takes the devices that are left."""
  devices, split = jax.device_count(), config.fsdp * config.tensor
  sizes = vars(config) | {'devices': devices, 'data': devices // split}
  for name, *parts in (  # JAX would copy what it cannot split.
    ('devices', 'fsdp', 'tensor'), ('vocab_size', 'fsdp', 'tensor'),
    ('width', 'fsdp'), ('width', 'num_heads'), ('num_heads', 'tensor'),
    ('batch_size', 'accumulation_steps', 'data', 'fsdp'),
  ):  # fmt: skip
    if sizes[name] % np.prod([sizes[x] for x in parts]):
      raise ValueError(f'{"*".join(parts)} must divide {name} {sizes[name]}.')
  axes, types = (*BATCH, 'tensor'), (AxisType.Auto,) * 3
  return jax.make_mesh([sizes[x] for x in axes], axes, axis_types=types)


def pin(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
  """Fixes where an array of the training state is; to be traced."""
  # The path of a moment ends with that of its parameter.
  name = jax.tree_util.keystr(path[-2:], simple=True, separator='.')
  return jax.lax.with_sharding_constraint(x, MATRICES.get(name, P()))


def load_tokens(config: Config) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens to train on and tokens to validate on, one axis each."""
  if config.data:
    files = [config.data / name for name in ('train.bin', 'val.bin')]
    if '://' in str(config.data):  # Each process holds all of them in memory.
      train, val = (np.frombuffer(x.read_bytes(), np.uint16) for x in files)
    else:
      train, val = (np.memmap(x, dtype=np.uint16, mode='r') for x in files)
    # In wider tokens, and in llm.c's header, odd words are mostly zero.
    for file, x in zip(files, (train, val), strict=True):
      if np.mean(x[1:512:2] < 4) > 0.9 or bytes(x[:3]) == b'\x93NUMPY':
        raise ValueError(f'{file} must be uint16 tokens without a header.')
  else:
    files = sorted(Path(os.__file__).parent.glob('*.py'))
    tokens = np.frombuffer(b''.join(x.read_bytes() for x in files), np.uint8)
    train, val = np.split(tokens, [len(tokens) * 95 // 100])
  if (size := min(len(train), len(val))) <= config.context_length:
    raise ValueError(f'context_length must be below {size}, tokens of a part.')
  # JAX does not check indices: a larger token would make the loss NaN.
  if (largest := max(train.max(), val.max())) >= config.vocab_size:
    raise ValueError(f'vocab_size must be above {largest}, a token.')
  return train, val


def make_batch(tokens: np.ndarray, config: Config, step: int) -> jax.Array:
  """Returns the sequences of a step, or of validation, int32, (A, B, T + 1)."""
  length, rows = config.context_length + 1, config.batch_size
  if step:
    # By seed and step alone: a run resumes with the batches it would have had.
    rng = np.random.default_rng((config.seed, step))
    starts = rng.integers(len(tokens) - length + 1, size=rows)
  else:
    # To validate on: four batches, spread evenly, the same for any seed.
    starts = np.linspace(0, len(tokens) - length, 4 * rows, dtype=int)
  starts_AB1 = starts.reshape(-1, rows // config.accumulation_steps, 1)
  positions_ABT = starts_AB1 + np.arange(length)
  return jax.make_array_from_callback(
    positions_ABT.shape,
    NamedSharding(jax.sharding.get_mesh(), P(None, BATCH)),
    # A process reads the sequences of its own devices only.
    lambda index: tokens[positions_ABT[index]].astype(np.int32),
  )


def make_norm(config: Config, rngs: nnx.Rngs) -> nnx.Module:
  """Returns a norm of the residual stream."""
  kind = nnx.RMSNorm if config.llama else nnx.LayerNorm
  return kind(config.width, epsilon=1e-5, dtype=config.dtype, rngs=rngs)


def rotate(x_BTHK: jax.Array) -> jax.Array:
  """Turns pairs of features by angles that grow with the position: RoPE."""
  length, half = x_BTHK.shape[1], x_BTHK.shape[-1] // 2
  angles_TK = np.outer(np.arange(length), 1e4 ** (-np.arange(half) / half))
  cos, sin = jnp.cos(angles_TK)[:, None], jnp.sin(angles_TK)[:, None]
  a, b = jnp.split(x_BTHK.astype('float32'), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
  return turned.astype(x_BTHK.dtype)


class Block(nnx.Module):
  """Transformer block: attention and an MLP, each after a norm."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    width, options = config.width, dict(dtype=config.dtype, rngs=rngs)
    linear = functools.partial(nnx.Linear, use_bias=not config.llama, **options)
    # SwiGLU has a third matrix, and as many parameters as GPT-2's MLP.
    hidden = -(-width // 24) * 64 if config.llama else 4 * width
    init = normal(config.init_std)
    # What is added to the residual stream, twice a layer, starts smaller.
    small = normal(config.init_std / (2 * config.num_layers) ** 0.5)
    self.config = config
    self.attention_norm = make_norm(config, rngs)
    self.qkv = linear(width, 3 * width, kernel_init=init)
    self.out = linear(width, width, kernel_init=small)
    self.mlp_norm = make_norm(config, rngs)
    self.up = linear(width, hidden, kernel_init=init)
    self.down = linear(hidden, width, kernel_init=small)
    if config.qk_norm:
      head_width = width // config.num_heads
      self.query_norm = nnx.RMSNorm(head_width, **options)
      self.key_norm = nnx.RMSNorm(head_width, **options)
    if config.llama:
      self.gate = linear(width, hidden, kernel_init=init)

  def query_key_value(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the queries, keys and values of all heads, (B, T, H, K) each."""
    qkv = self.qkv(self.attention_norm(x_BTD))
    # H comes before X, so that a device of the axis tensor has whole heads.
    qkv_BTHXK = qkv.reshape(*x_BTD.shape[:2], self.config.num_heads, 3, -1)
    query, key, value = jnp.moveaxis(qkv_BTHXK, 3, 0)
    if self.config.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    if self.config.llama:
      query, key = rotate(query), rotate(key)
    return query, key, value

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the residual stream after the block."""
    qkv = self.query_key_value(x_BTD)
    # cuDNN's kernel does not store the logits, (B, H, T, T); it takes bfloat16.
    is_fused = jax.default_backend() == 'gpu' and x_BTD.dtype == jnp.bfloat16
    kernel = 'cudnn' if is_fused else 'xla'
    y_BTHK = jax.nn.dot_product_attention(
      *qkv, is_causal=True, implementation=kernel
    )
    x_BTD += self.out(y_BTHK.reshape(x_BTD.shape))
    y_BTD = self.mlp_norm(x_BTD)
    if self.config.llama:
      return x_BTD + self.down(jax.nn.silu(self.gate(y_BTD)) * self.up(y_BTD))
    return x_BTD + self.down(jax.nn.gelu(self.up(y_BTD)))


class GPT2(nnx.Module):
  """GPT-2, the parameters of its blocks stacked on a leading axis of layers."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    options, init = dict(dtype=config.dtype, rngs=rngs), normal(config.init_std)
    embedding = functools.partial(nnx.Embed, embedding_init=init, **options)
    self.config = config
    self.token_embedding = embedding(config.vocab_size, config.width)
    if not config.llama:
      self.position_embedding = embedding(config.context_length, config.width)
    keys = jax.random.split(rngs.params(), config.num_layers)
    self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(keys)
    self.final_norm = make_norm(config, rngs)

  def embed(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the residual stream before the first block, (B, T, D)."""
    # The gradient of a row is added up token by token, hence in float32:
    # bfloat16 would round each sum, and is slow on GPUs.
    tokens_BTD = self.token_embedding.embedding[tokens_BT]
    if self.config.llama:
      return tokens_BTD.astype(self.config.dtype)
    positions_TD = self.position_embedding.embedding[: tokens_BT.shape[1]]
    dtype = self.config.dtype
    return tokens_BTD.astype(dtype) + positions_TD.astype(dtype)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the logits of each next token, float32, shape (B, T, V)."""
    x_BTD = self.embed(tokens_BT)
    # The scan compiles one block, and gives it one layer's arrays at a time.
    structure, arrays = nnx.split(self.blocks)

    def apply(x_BTD: jax.Array, arrays: Any) -> tuple[jax.Array, None]:
      # Without this, the compiler may split features, as in the parameters.
      x_BTD = jax.lax.with_sharding_constraint(x_BTD, P(BATCH))
      return nnx.merge(structure, arrays)(x_BTD), None

    if self.config.remat:  # In a scan, nothing could be merged anyway.
      apply = jax.checkpoint(apply, prevent_cse=False)
    x_BTD, _ = jax.lax.scan(apply, x_BTD, arrays, unroll=self.config.unroll)
    return self.token_embedding.attend(self.final_norm(x_BTD)).astype('float32')


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """Returns MERIT with warm-up and cosine decay, after a gradient clip."""
  peak, warmup_steps = config.learning_rate, config.steps // 10
  schedule = optax.warmup_cosine_decay_schedule(
    peak / max(1, warmup_steps), peak, warmup_steps, config.steps
  )
  # Biases of all layers, (L, F), look like a matrix, but are vectors.
  axes = functools.partial(
    merit_optax.flax_dimension_numbers, stacked={'^blocks/': 1}
  )
  merit = merit_optax.merit(
    schedule, weight_decay=config.weight_decay, weight_dimension_numbers=axes
  )
  return optax.chain(optax.clip_by_global_norm(1.0), merit)


def init_params(config: Config) -> Any:
  """Returns the first parameters, a tree of arrays."""
  return nnx.as_pure(nnx.state(GPT2(config, nnx.Rngs(config.seed))))


@functools.partial(jax.jit, static_argnames='config')
def init_state(config: Config) -> dict[str, Any]:
  """Returns the first parameters and optimizer state, as trees of arrays."""
  params = init_params(config)
  state = dict(params=params, opt_state=make_optimizer(config).init(params))
  return jax.tree.map_with_path(pin, state)


def make_model(params: Any, config: Config) -> GPT2:
  """Returns the model with these parameters."""
  model = nnx.eval_shape(lambda: GPT2(config, nnx.Rngs(0)))  # No arrays yet.
  nnx.update(model, params)
  return model


def loss_fn(params: Any, tokens_BT: jax.Array, config: Config) -> jax.Array:
  """Returns the mean cross-entropy in nats per token."""
  model = make_model(params, config)
  logits_BTV = model(tokens_BT[:, :-1])
  # Unlike integer labels, a comparison is fused, and splits over the mesh.
  labels_BTV = jax.nn.one_hot(tokens_BT[:, 1:], logits_BTV.shape[-1])
  return optax.softmax_cross_entropy(logits_BTV, labels_BTV).mean()


@functools.partial(jax.jit, static_argnames='config', donate_argnames='state')
def train_step(state: Any, tokens_ABT: jax.Array, config: Config) -> Any:
  """Returns the next state, and the loss before the step."""
  params, opt_state = state['params'], state['opt_state']

  def add(total: Any, tokens_BT: jax.Array) -> tuple[Any, None]:
    one = jax.value_and_grad(loss_fn)(params, tokens_BT, config)
    return jax.tree.map(jnp.add, total, one), None

  zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
  total, _ = jax.lax.scan(add, zero, tokens_ABT)
  loss, grads = jax.tree.map(lambda x: x / len(tokens_ABT), total)
  updates, opt_state = make_optimizer(config).update(grads, opt_state, params)
  state = dict(params=optax.apply_updates(params, updates), opt_state=opt_state)
  return jax.tree.map_with_path(pin, state), loss


@functools.partial(jax.jit, static_argnames='config')
def eval_step(params: Any, tokens_ABT: jax.Array, config: Config) -> jax.Array:
  """Returns the mean loss."""
  return jax.lax.map(lambda x: loss_fn(params, x, config), tokens_ABT).mean()


def train(config: Config) -> list[float]:
  """Trains from the last checkpoint on, and returns the loss of each step."""
  if config.distributed:
    jax.distributed.initialize()
  is_process_0 = jax.process_index() == 0
  log = functools.partial(print, flush=True) if is_process_0 else lambda _: None
  folder = Path(os.getcwd()) / config.out_dir  # Orbax wants absolute ones.
  if str(config.out_dir).startswith('s3:'):
    raise ValueError(f'out_dir must be on a disk or gs://: {config.out_dir}')
  if set('[]\\') & set(str(folder)):  # Orbax could not read from there.
    raise ValueError(f'out_dir must have no brackets or backslash: {folder}')
  tokens, val_tokens = load_tokens(config)
  # These may change when a run resumes. The others decide its losses.
  free = ('out_dir', 'remat', 'unroll', 'accumulation_steps', 'eval_every')
  free += ('fsdp', 'tensor', 'distributed')
  settings = {k: str(v) for k, v in vars(config).items() if k not in free}
  # The text itself, wherever it is.
  settings['data'] = f'{zlib.crc32(val_tokens, zlib.crc32(tokens)):08x}'
  last_two = ocp.checkpoint_managers.LatestN(2)
  options = ocp.CheckpointManagerOptions(preservation_policy=last_two)
  manager = ocp.CheckpointManager(folder, options=options)
  with jax.set_mesh(make_mesh(config)), manager:
    first = manager.latest_step() or 0
    if first:
      old = manager.metadata(first).custom_metadata
      if changed := dict(old.items() - settings.items()):
        raise ValueError(f'{config.out_dir} holds a run with {changed}.')
      like = jax.tree.map(ocp.utils.to_shape_dtype_struct, init_state(config))
      state = manager.restore(first, args=ocp.args.StandardRestore(like))
    else:
      state = init_state(config)
    devices = f'{jax.device_count()} {jax.default_backend()} devices'
    log(f'{config.out_dir}: step {first} of {config.steps} on {devices}')
    val_ABT = make_batch(val_tokens, config, step=0)
    losses, since, start = [], first, time.perf_counter()
    for step in range(first + 1, config.steps + 1):
      # Does not wait for the devices: they work while the next batch is made.
      state, loss = train_step(state, make_batch(tokens, config, step), config)
      losses.append(loss)
      if step % config.eval_every == 0 or step in (first + 1, config.steps):
        jax.block_until_ready(loss)  # The first one includes compilation.
        num_tokens = (step - since) * config.batch_size * config.context_length
        speed = num_tokens / (time.perf_counter() - start)
        val = float(eval_step(state['params'], val_ABT, config))
        log(f'step {step} loss {loss:.3f} val {val:.3f} {speed:,.0f} tokens/s')
        if not np.isfinite(val):
          raise FloatingPointError(f'The loss is {val} after step {step}.')
        args = ocp.args.StandardSave(state)
        manager.save(step, args=args, custom_metadata=settings)
        since, start = step, time.perf_counter()
  log(f'finished, last checkpoint in {config.out_dir}')
  return [float(loss) for loss in losses]


if __name__ == '__main__':
  train(tyro.cli(Config))
