"""Training throughput beside GPT-2 of Hugging Face in PyTorch.

python -m benchmarks.train_step --help
"""

from collections.abc import Callable
import dataclasses
import math
import os
from pathlib import Path
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import tyro

from benchmarks.rounds import Timing, race, ratio, write_json
from examples.gpt2 import compile_for, hardware, sharding
from examples.gpt2.command import exit_on_error
from examples.gpt2.config import (
  Config,
  Optimizer,
  padded_vocab_size,
  to_json,
)
from examples.gpt2.data import TokenSequences, batch_shape, batches, mix
from examples.gpt2.diagnostics import make_diagnostics
from examples.gpt2.hardware import needed_bytes
from examples.gpt2.resolve import resolve
from examples.gpt2.step import Trainer, TrainState
from examples.gpt2.token_files import open_tokens, token_dtype
from examples.gpt2.train import parse

_PROG = 'benchmarks.train_step'
_PEER = 'transformers, PyTorch'
_DIAGNOSTICS = 'one diagnostics step, merit'
_UPDATE = 'update of one step, merit'
_READING = 'batch of one step, out of two sources in shards'


@dataclasses.dataclass(frozen=True)
class Settings:
  """Times whole training steps: ours with several optimizers, and a peer's.

  The peer is the GPT-2 of transformers with AdamW and clipping, of the same
  sizes, precision and batch, on the same threads or GPU (there compiled, with
  fused AdamW). It is left out where torch or transformers is missing.

  Sizes and precision are those of the trainer's arguments, such as a preset,
  --batch-size (a preset's is for many devices), --dtype, --remat and --unroll.
  """

  optimizers: tuple[Optimizer, ...] = ('adamw', 'lamb', 'merit')
  """Optimizers of our trainer."""

  micro_batch_size: int | None = None
  """Sequences that a device processes at once. Default: the preset's, and the
  whole batch in PyTorch."""

  peer: bool = True
  """Whether to time the peer. It and all optimizers are in memory at once."""

  steps: int = 3
  """Steps in a round."""

  rounds: int = 7
  """Rounds, in each of which every candidate has its turn."""

  out: Path = Path('benchmarks/results/train_step.json')
  """File of the results."""


def main(args: list[str] | None = None) -> None:
  """Runs the command line."""
  settings, others = tyro.cli(
    Settings, args=args, prog=_PROG, return_unknown_args=True
  )
  with exit_on_error():
    sizes = parse(others, _PROG)
    configs = {
      _title(name): _config(settings, sizes, name)
      for name in (*settings.optimizers, 'merit')
    }
  config = configs[_title('merit')]
  candidates = {
    _title(name): _ours(configs[_title(name)], settings)
    for name in settings.optimizers
  }
  candidates[_DIAGNOSTICS] = _diagnostics(config)
  candidates[_UPDATE] = _update(config)
  with tempfile.TemporaryDirectory() as folder:
    candidates[_READING] = _reading(config, Path(folder))
    peer = _peer(config, settings) if settings.peer else None
    if peer is not None:
      candidates[_PEER] = peer
    timings = race(candidates, settings.rounds)
  parts = {
    'update_seconds': timings.pop(_UPDATE).median,
    'reading_seconds': timings.pop(_READING).median,
  }
  rows = _rows(timings, config, settings)
  # What was measured is kept if what follows runs out of time or memory.
  _write(settings, sizes, rows, parts)
  for row in rows:
    if row['name'] in configs:
      row['peak_bytes'] = _peak_bytes(configs[row['name']])
  _print(rows, config)
  for name, seconds in zip((_UPDATE, _READING), parts.values(), strict=True):
    share = seconds / rows[0]['seconds_per_step']
    print(f'{name}: {1e3 * seconds:.2f} ms, {share:.2%} of a step')
  _write(settings, sizes, rows, parts)


def _write(
  settings: Settings,
  sizes: Config,
  rows: list[dict[str, Any]],
  parts: dict[str, float],
) -> None:
  values = to_json(sizes) | dataclasses.asdict(settings)
  write_json(settings.out, {'settings': values, 'rows': rows} | parts)


def _title(optimizer: Optimizer) -> str:
  return f'merit_optax trainer, {optimizer}'


def _peak_bytes(config: Config) -> int:
  """Returns the bytes of memory that the compiled step needs."""
  trainer = Trainer(config, config.model.vocab_size, sharding.make_mesh(''))
  return needed_bytes(compile_for.compile_step(config, trainer))


def _config(settings: Settings, sizes: Config, optimizer: Optimizer) -> Config:
  config = dataclasses.replace(
    sizes,
    optimizer=optimizer,
    micro_batch_size=settings.micro_batch_size or sizes.micro_batch_size,
  )
  return resolve(config, sharding.make_mesh(''))


def _tokens(config: Config) -> np.ndarray:
  """Returns random tokens of one step, shape (A, B, T + 1)."""
  return np.random.default_rng(0).integers(
    config.model.vocab_size,
    size=batch_shape(config, sharding.make_mesh('')).shape,
    dtype=np.int32,
  )


def _start(config: Config) -> tuple[Trainer, TrainState]:
  """Returns a trainer and its first state."""
  trainer = Trainer(config, config.model.vocab_size, sharding.make_mesh(''))
  with jax.set_mesh(trainer.mesh):
    return trainer, trainer.init()


def _batch(config: Config, mesh: Mesh) -> jax.Array:
  return jax.device_put(_tokens(config), sharding.batch_sharding(mesh))


def _ours(config: Config, settings: Settings) -> Callable[[], None]:
  """Returns a function that takes some steps with our trainer."""
  trainer, state = _start(config)
  batch = _batch(config, trainer.mesh)

  def run() -> None:
    nonlocal state
    with jax.set_mesh(trainer.mesh):
      for _ in range(settings.steps):
        state, metrics = trainer.step(state, batch)
    jax.block_until_ready((state, metrics))

  return run


def _diagnostics(config: Config) -> Callable[[], None]:
  """Returns a function that measures the diagnostics of a step."""
  trainer, state = _start(config)
  measure = make_diagnostics(config, trainer)
  batch = _batch(config, trainer.mesh)

  def run() -> None:
    with jax.set_mesh(trainer.mesh):
      jax.block_until_ready(measure(state, batch))

  return run


def _update(config: Config) -> Callable[[], None]:
  """Returns a function that computes and applies the update of a step."""
  trainer, state = _start(config)
  gradients = jax.tree.map(jnp.copy, state.params)

  def run() -> None:
    nonlocal state
    with jax.set_mesh(trainer.mesh):
      state = trainer.update(state, gradients)
    jax.block_until_ready(state)

  return run


def _reading(config: Config, folder: Path) -> Callable[[], None]:
  """Returns a function that makes the batch of a step, the next each time."""
  generator = np.random.default_rng(0)
  for i in range(4):
    tokens = generator.integers(config.model.vocab_size, size=25_000_000)
    dtype = token_dtype(config.model.vocab_size)
    tokens.astype(dtype).tofile(folder / f'{i}.bin')
  paths = sorted(folder.iterdir())
  model = config.model
  files = [open_tokens(path, model.vocab_size) for path in paths]
  sources = [
    TokenSequences(some, model.context_length, model.vocab_size)
    for some in (files[:2], files[2:])
  ]
  found = batches(
    mix(sources, (0.7, 0.3), config.seed),
    batch_shape(config, sharding.make_mesh('')),
  )

  def run() -> None:
    jax.block_until_ready(next(found))

  return run


def _peer(config: Config, settings: Settings) -> Callable[[], None] | None:
  """Returns a function that takes some steps in PyTorch, if it is there."""
  # Threads of one framework must not spin while the other computes.
  os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
  try:
    import torch  # noqa: PLC0415  An extra.
    import transformers  # noqa: PLC0415
  except ImportError as error:
    print(f'no peer: {error}')
    return None
  has_gpu = torch.cuda.is_available()
  device = 'cuda' if has_gpu else 'cpu'
  model: Any = transformers.GPT2LMHeadModel(_peer_config(transformers, config))
  model.to(device).train()
  forward = torch.compile(model) if has_gpu else model
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True
  )
  tokens = torch.tensor(
    _tokens(config)[..., :-1].reshape(config.batch_size, -1), device=device
  ).long()
  parts = tokens.split(settings.micro_batch_size or config.batch_size)
  dtype = torch.bfloat16 if config.model.dtype == 'bfloat16' else torch.float32

  def run() -> None:
    for _ in range(settings.steps):
      for part in parts:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
          loss = forward(part, labels=part).loss / len(parts)
        loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
      optimizer.zero_grad(set_to_none=True)
    loss.item()

  return run


def _peer_config(transformers: Any, config: Config) -> Any:
  return transformers.GPT2Config(
    vocab_size=padded_vocab_size(config.model.vocab_size),
    n_positions=config.model.context_length,
    n_embd=config.model.width,
    n_layer=config.model.num_layers,
    n_head=config.model.num_heads,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
    attn_implementation='sdpa',
  )


def _rows(
  timings: dict[str, Timing], config: Config, settings: Settings
) -> list[dict[str, Any]]:
  """Returns the results of each candidate."""
  trainer = Trainer(config, config.model.vocab_size, sharding.make_mesh(''))
  flops = trainer.flops_per_token
  peak = hardware.peak_flops(jax.devices()[0]) * jax.device_count()
  base = _PEER if _PEER in timings else next(iter(timings))
  rows = []
  for name, timing in timings.items():
    steps = 1 if name == _DIAGNOSTICS else settings.steps
    speed = (
      steps * config.batch_size * config.model.context_length / timing.median
    )
    rows.append(
      {
        'name': name,
        'seconds_per_step': timing.median / steps,
        'spread': timing.spread,
        'tokens_per_second': speed,
        'mfu': flops * speed / peak if math.isfinite(peak) else None,
        'speed_over': base,
        'speed_ratio': steps / settings.steps / ratio(timings, name, base),
      }
    )
  return rows


def _print(rows: list[dict[str, Any]], config: Config) -> None:
  print(
    f'{config.preset}, {config.batch_size} x {config.model.context_length} '
    f'tokens, {config.model.dtype}; speed over {rows[0]["speed_over"]}'
  )
  for row in rows:
    mfu = 'n/a' if row['mfu'] is None else f'{row["mfu"]:.1%}'
    peak = row.get('peak_bytes')
    size = 'n/a' if peak is None else f'{peak / 2**20:,.0f} MiB'
    print(
      f'{row["name"]:32} {row["seconds_per_step"]:8.3f} s '
      f'(± {row["spread"]:.1%}) {row["tokens_per_second"]:10,.0f} tokens/s  '
      f'MFU {mfu:6} {row["speed_ratio"]:6.2f} x  peak {size}'
    )


if __name__ == '__main__':
  main()
