"""Pretrains GPT-2 on a mesh of devices: one file to read and to copy.

    pip install \
      "merit_optax[examples] @ git+https://github.com/merit-optax/merit-optax"
    python pretrain.py  # Bytes of Python's standard library, on any device.
    JAX_NUM_CPU_DEVICES=8 python pretrain.py --mesh fsdp=4,tensor=2

The same command again resumes a stopped run. On a pod, give it to all processes
with --distributed on. Llama, text of your own, remat, object stores, samples,
export and W&B are in the trainer, examples/gpt2 of the repository.

Letters at the end of a name are the axes of an array: A micro-batches, B
sequences, T tokens, D features, F hidden features, H heads, X query, key and
value, K features of a head, L layers, V vocabulary.
"""

import dataclasses
from functools import partial
import json
import os
from pathlib import Path
import signal
import sys
import threading
import time
from typing import Annotated, Any, Literal
import zlib

from flax import nnx
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro

import merit_optax

DATA = 'stdlib, or a folder with train.bin and val.bin, both of uint16, which '
DATA += 'examples.gpt2.prepare makes of text'


@dataclasses.dataclass(frozen=True)
class Config:
  """Pretrains GPT-2."""

  data: Annotated[str, tyro.conf.arg(help=f'{DATA}.')] = 'stdlib'
  vocab_size: int = 256  # Above every token: 50304 for those of GPT-2.
  out_dir: Path = Path('runs/pretrain')  # Of checkpoints and metrics.jsonl.
  seed: int = 0  # Of the weights and of the order of the data.

  num_layers: int = 4
  num_heads: int = 4
  width: int = 128  # Features of the residual stream.
  context_length: int = 128  # Tokens in a sequence.
  dtype: Literal['float32', 'bfloat16'] = 'float32'  # Of activations.

  # The default is this project's; in its study, the loss of muon was lower.
  optimizer: Literal['merit', 'muon', 'muon-hyperball', 'adamw'] = 'merit'
  learning_rate: float | None = None  # Peak. None: the optimizer's usual one.
  steps: int = 400  # Updates.
  batch_size: int = 32  # Sequences in a step, on all devices together.
  micro_batches: int = 1  # Parts of a batch, one after another, to save memory.

  eval_every: int = 50  # Steps between evaluations.
  eval_batches: int = 4  # Batches in an evaluation, the same each time.
  checkpoint_every: int = 50  # Steps between checkpoints.
  mesh: str = ''  # Such as fsdp=4,tensor=2. Devices that are left are data.
  distributed: Literal['on', 'off'] = 'off'  # Whether there are more processes.


# These may change when a run resumes. Of data, the content counts.
MAY_CHANGE = {'out_dir', 'micro_batches', 'mesh', 'distributed'}
MAY_CHANGE |= {'eval_every', 'eval_batches', 'checkpoint_every'}

STOP = threading.Event()  # Set by control-C and SIGTERM.

# The mesh axes data and fsdp split the batch. Matrices are split by fsdp along
# the residual stream, by tensor along heads and hidden features, by both along
# the vocabulary. All else is copied to every device.
BATCH = ('data', 'fsdp')
SHARDINGS = {
  'token_embedding/embedding': P(('tensor', 'fsdp'), None),  # VD
  'qkv/kernel': P(None, 'fsdp', 'tensor'),  # LD(HXK)
  'out/kernel': P(None, 'tensor', 'fsdp'),  # L(HK)D
  'up/kernel': P(None, 'fsdp', 'tensor'),  # LDF
  'down/kernel': P(None, 'tensor', 'fsdp'),  # LFD
}
pin = jax.lax.with_sharding_constraint

LayerNorm = partial(nnx.LayerNorm, epsilon=1e-5, use_fast_variance=False)


def make_mesh(config: Config) -> Mesh:
  """Returns the mesh; its axis data takes the devices that are left."""
  for name, value in vars(config).items():
    if type(value) is int and name != 'seed' and value < 1:
      raise ValueError(f'{name} must be at least 1, got {value}.')
  sizes = {'fsdp': 1, 'tensor': 1}
  for part in config.mesh.split(',') if config.mesh else []:
    name, _, size = part.partition('=')
    if name not in sizes or not size.isdecimal() or int(size) == 0:
      raise ValueError(f'mesh must be as fsdp=4,tensor=2, got {config.mesh!r}.')
    sizes[name] = int(size)
  fsdp, tensor, devices = sizes['fsdp'], sizes['tensor'], jax.device_count()
  data = devices // (fsdp * tensor)
  for name, value, divisor in (
    ('The number of devices', devices, fsdp * tensor),
    ('batch_size', config.batch_size, config.micro_batches * data * fsdp),
    ('vocab_size', config.vocab_size, fsdp * tensor),
    ('width', config.width, fsdp),
    ('width', config.width, config.num_heads),
    ('num_heads', config.num_heads, tensor),
  ):
    if value % divisor:
      raise ValueError(f'{name} must be a multiple of {divisor}, got {value}.')
  axes, types = (*BATCH, 'tensor'), (AxisType.Auto,) * 3
  return jax.make_mesh((data, fsdp, tensor), axes, axis_types=types)


def specs_of(tree: Any) -> Any:
  """Returns how the arrays of a training state lie on the mesh."""
  name_of = partial(jax.tree_util.keystr, simple=True, separator='/')
  # The path of a moment ends with that of its parameter.
  return jax.tree.map_with_path(
    lambda path, _: SHARDINGS.get(name_of(path[-2:]), P()), tree
  )


def load_tokens(config: Config) -> list[Any]:
  """Returns the tokens to train on and those to evaluate on."""
  if config.data == 'stdlib':
    files = sorted(Path(os.__file__).parent.glob('*.py'))
    tokens = np.frombuffer(b''.join(x.read_bytes() for x in files), np.uint8)
    return np.split(tokens, [len(tokens) * 95 // 100])
  parts: list[Any] = []
  for file in (Path(config.data) / name for name in ('train.bin', 'val.bin')):
    if not file.is_file():
      raise ValueError(f'data must be {DATA}, got {config.data!r}.')
    tokens = np.memmap(file, np.uint16, 'r')
    some = tokens[:1_000_000]  # Of wider integers, every second one is 0.
    if not some[::2].any() or not some[1::2].any():
      raise ValueError(f'{file} must hold uint16, not int32 or int64.')
    if len(tokens) <= config.context_length:
      raise ValueError(f'context_length must be below {len(tokens)}: {file}.')
    parts.append(tokens)
  return parts


def make_batch(tokens: Any, config: Config, seed: int, step: int) -> jax.Array:
  """Returns random sequences, (A, B, T + 1), the same for a seed and step."""
  length = config.context_length + 1
  rng = np.random.default_rng((seed, step))
  starts = rng.integers(len(tokens) - length + 1, size=config.batch_size)
  starts_AB = starts.reshape(config.micro_batches, -1)

  def read(index: Any) -> Any:
    positions_ABT = starts_AB[index[:2]][..., None] + np.arange(length)
    sequences_ABT = tokens[positions_ABT]
    # JAX does not check indices: a larger token would make the loss NaN.
    if (largest := sequences_ABT.max()) >= config.vocab_size:
      raise ValueError(f'vocab_size must be above {largest}, a token.')
    return sequences_ABT.astype(np.int32)

  # A process reads the sequences of its own devices only.
  place = NamedSharding(jax.sharding.get_mesh(), P(None, BATCH))
  return jax.make_array_from_callback((*starts_AB.shape, length), place, read)


def initializer(config: Config, branches: int = 1) -> Any:
  """Returns what makes weights; GPT-2 starts with 0.02 at a width of 768."""
  std = 0.04 if config.optimizer == 'muon-hyperball' else 0.02
  return nnx.initializers.normal(std * (768 / config.width / branches) ** 0.5)


class Block(nnx.Module):
  """Transformer block: causal self-attention and an MLP, each after a norm."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    width, self.num_heads = config.width, config.num_heads
    norm = partial(LayerNorm, dtype=config.dtype, rngs=rngs)
    linear = partial(nnx.Linear, dtype=config.dtype, rngs=rngs)
    large = initializer(config)
    # What the residual stream adds up starts smaller.
    small = initializer(config, 2 * config.num_layers)
    self.attention_norm = norm(width)
    self.qkv = linear(width, 3 * width, kernel_init=large)
    self.out = linear(width, width, kernel_init=small)
    self.mlp_norm = norm(width)
    self.up = linear(width, 4 * width, kernel_init=large)
    self.down = linear(4 * width, width, kernel_init=small)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the residual stream after the block."""
    # The columns are ordered by head, so that tensor splits whole heads.
    by_head = (*x_BTD.shape[:2], self.num_heads, 3, -1)
    qkv_BTHXK = self.qkv(self.attention_norm(x_BTD)).reshape(by_head)
    query, key, value = jnp.moveaxis(qkv_BTHXK, 3, 0)
    # On GPUs, implementation='cudnn' takes less memory in bfloat16.
    y_BTHK = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x_BTD += self.out(y_BTHK.reshape(x_BTD.shape))
    return x_BTD + self.down(jax.nn.gelu(self.up(self.mlp_norm(x_BTD))))


class Transformer(nnx.Module):
  """GPT-2; parameters of its blocks are stacked on an axis of layers."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.dtype, width = config.dtype, config.width
    embed = partial(nnx.Embed, embedding_init=initializer(config), rngs=rngs)
    self.token_embedding = embed(config.vocab_size, width)
    self.position_embedding = embed(config.context_length, width)
    keys = jax.random.split(rngs.params(), config.num_layers)
    self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(keys)
    self.final_norm = LayerNorm(width, dtype=config.dtype, rngs=rngs)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the logits of the next tokens, (B, T, V), in float32."""
    embedding_VD = self.token_embedding.embedding[...]
    positions_TD = self.position_embedding.embedding[: tokens_BT.shape[1]]
    # Rows are taken in float32, so that their gradients are added up in it.
    x_BTD = (embedding_VD[tokens_BT] + positions_TD).astype(self.dtype)

    # The scan compiles one block, and gives it one layer's arrays at a time.
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def apply(x_BTD: jax.Array, block: Block) -> jax.Array:
      # Without this, the compiler may split features, as in the parameters.
      return block(pin(x_BTD, P(BATCH)))

    x_BTD = self.final_norm(apply(x_BTD, self.blocks))
    head_VD = embedding_VD.astype(self.dtype)
    logits_BTV = jnp.matmul(x_BTD, head_VD.T, preferred_element_type='float32')
    return pin(logits_BTV, P(BATCH, None, 'tensor'))


def loss_fn(params: Any, tokens_BT: jax.Array, config: Config) -> jax.Array:
  """Returns the mean cross-entropy in nats per token."""
  model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
  nnx.update(model, params)
  logits_BTV, targets_BT = model(tokens_BT[:, :-1]), tokens_BT[:, 1:]
  loss_of = optax.softmax_cross_entropy_with_integer_labels
  return loss_of(logits_BTV, targets_BT).mean()


def peak_learning_rate(config: Config) -> float:
  """Returns the learning rate after the warm-up."""
  if config.learning_rate is not None:
    return config.learning_rate
  if config.optimizer == 'adamw':
    return 1 / config.width
  name: Any = config.optimizer.replace('-', '_')
  return merit_optax.starting_learning_rate(name, config.steps, config.width)


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """Returns the optimizer, after a clip of the gradient."""
  peak, warmup = peak_learning_rate(config), config.steps // 10
  first = peak / max(1, warmup)
  rate = optax.warmup_cosine_decay_schedule(first, peak, warmup, config.steps)
  # Each layer of a stack is a matrix; queries, keys and values are one.
  numbers = partial(merit_optax.flax_dimension_numbers, stacked={'blocks/': 1})
  matrices: Any = {'weight_dimension_numbers': numbers}
  muon = {'ns_dtype': config.dtype, 'shardings': specs_of, **matrices}
  optimizer = {
    'merit': lambda: merit_optax.merit(rate, weight_decay=0.01, **matrices),
    'muon': lambda: merit_optax.muon(rate, weight_decay=0.1, **muon),
    'muon-hyperball': lambda: merit_optax.muon_hyperball(rate, **muon),
    'adamw': lambda: optax.adamw(rate, b2=0.95, weight_decay=0.1),
  }[config.optimizer]()
  return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


@partial(jax.jit, static_argnames='config')
def init_state(config: Config) -> dict[str, Any]:
  """Returns the first parameters and optimizer state, as trees of arrays."""
  params = nnx.as_pure(nnx.state(Transformer(config, nnx.Rngs(config.seed))))
  state = {'params': params, 'opt': make_optimizer(config).init(params)}
  return pin(state, specs_of(state))


@partial(jax.jit, static_argnames='config', donate_argnames='state')
def train_step(state: Any, tokens_ABT: jax.Array, config: Config) -> Any:
  """Returns the next state, and metrics."""
  params = state['params']

  def add(total: Any, tokens_BT: jax.Array) -> tuple[Any, None]:
    one = jax.value_and_grad(loss_fn)(params, tokens_BT, config)
    return jax.tree.map(jnp.add, total, one), None

  zero = (jnp.float32(0), optax.tree.zeros_like(params))
  total, _ = jax.lax.scan(add, zero, tokens_ABT)
  loss, grads = jax.tree.map(lambda x: x / len(tokens_ABT), total)
  updates, opt = make_optimizer(config).update(grads, state['opt'], params)
  params = optax.apply_updates(params, updates)
  metrics = {'train_loss': loss, 'gradient_norm': optax.tree.norm(grads)}
  metrics['weight_norm'] = optax.tree.norm(params)  # Of the next weights.
  state = {'params': params, 'opt': opt}
  return pin(state, specs_of(state)), metrics


@partial(jax.jit, static_argnames='config')
def eval_step(params: Any, tokens_ABT: jax.Array, config: Config) -> jax.Array:
  """Returns the mean loss of a batch."""
  return jax.lax.map(lambda x: loss_fn(params, x, config), tokens_ABT).mean()


def start(manager: Any, config: Config, settings: Any) -> tuple[int, Any]:
  """Returns the number of steps that are done, and the state after them."""
  state, done = init_state(config), manager.latest_step()
  if done is None:
    return 0, state
  old = manager.metadata(done).custom_metadata or {}
  for name, value in settings.items():
    if (was := old.get(name)) != value:
      raise ValueError(f'{config.out_dir} has {name} {was}, not {value}.')
  print(f'{config.out_dir}: {done} of {config.steps} steps are done')
  state = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  return done, manager.restore(done, args=ocp.args.StandardRestore(state))


def write_metrics(file: Path, last: int, steps: list[Any]) -> None:
  """Adds lines for the steps up to the last; raises if one is not finite."""
  with file.open('a') as output:
    for step, metrics in enumerate(steps, last + 1 - len(steps)):
      line = {name: float(x) for name, x in metrics.items()}
      if not np.isfinite([*line.values()]).all():
        raise FloatingPointError(f'Step {step} is not finite: {line}')
      output.write(json.dumps({'step': step, **line}) + '\n')


def train(config: Config) -> None:
  """Trains, from the last checkpoint on."""
  mesh, tokens = make_mesh(config), load_tokens(config)
  settings = {k: x for k, x in vars(config).items() if k not in MAY_CHANGE}
  settings['learning_rate'] = peak_learning_rate(config)
  settings['data'] = [[len(x), zlib.crc32(x[:1_000_000].data)] for x in tokens]
  folder = config.out_dir.absolute()
  checkpoints, metrics_file = folder / 'checkpoints', folder / 'metrics.jsonl'
  if folder.exists() and any(folder.iterdir()) and not checkpoints.exists():
    raise ValueError(f'out_dir must be new, empty or of a run, got {folder}.')
  options = ocp.CheckpointManagerOptions(max_to_keep=2)
  manager = ocp.CheckpointManager(
    checkpoints, options=options, item_handlers=ocp.StandardCheckpointHandler()
  )
  with jax.set_mesh(mesh), manager:
    done, state = start(manager, config, settings)
    if jax.process_index() > 0:
      metrics_file = Path(os.devnull)
    elif metrics_file.exists():  # Steps after the checkpoint come again.
      old_lines = metrics_file.read_text().splitlines(keepends=True)
      metrics_file.write_text(''.join(old_lines[:done]))
    indices = range(config.eval_batches)
    evaluations = [make_batch(tokens[1], config, 0, i) for i in indices]
    lines, since = [], time.perf_counter()
    for step in range(done + 1, config.steps + 1):
      # The devices work on a step while the next batch is read.
      batch_ABT = make_batch(tokens[0], config, config.seed, step)
      state, metrics = train_step(state, batch_ABT, config)
      lines.append(metrics)
      is_last = step == config.steps
      is_evaluated = is_last or step % config.eval_every == 0
      is_stopped = STOP.is_set()
      if config.distributed == 'on':  # jax has all stop after the same step.
        is_stopped = multihost_utils.reached_preemption_sync_point(step)
      is_saved = is_last or is_stopped or step % config.checkpoint_every == 0
      if step % 10 and step > done + 1 and not is_evaluated and not is_saved:
        continue
      jax.block_until_ready(lines)
      seconds = (time.perf_counter() - since) / len(lines)
      if is_evaluated:
        losses = [eval_step(state['params'], x, config) for x in evaluations]
        lines[-1]['val_loss'] = np.mean(losses)
      write_metrics(metrics_file, step, lines)
      if jax.process_index() == 0:
        speed = config.batch_size * config.context_length / seconds
        found = [f'{k} {x:.3g}' for k, x in lines[-1].items()]
        print(f'step {step}', *found, f'{speed:,.0f} tokens/s', flush=True)
      if is_saved:
        saved = ocp.args.StandardSave(state)
        manager.save(step, args=saved, custom_metadata=settings)
      if is_stopped:
        sys.exit(143)
      lines, since = [], time.perf_counter()


def main() -> None:
  """Runs the command line."""
  config = tyro.cli(Config)
  if config.distributed == 'on':
    jax.distributed.initialize()  # Which takes SIGTERM.
  else:
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, lambda *_: STOP.set())
  train(config)


if __name__ == '__main__':
  main()
