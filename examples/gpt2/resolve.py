"""Fills the settings that follow from others, and checks them together."""

import importlib.util
import math

from jax.sharding import Mesh
import numpy as np

from examples.gpt2.command import UsageError, flag
from examples.gpt2.config import (
  MODEL_FIELDS,
  Config,
  ModelConfig,
  batch_sizes,
  by_name,
  change,
  check_values,
  complete,
)
from examples.gpt2.optimizers import OPTIMIZERS
from examples.gpt2.presets import PRESETS
from examples.gpt2.schedules import in_steps
from examples.gpt2.sharding import num_batch_shards

# Layers whose loop is slower on CPU than they are one by one.
_MOST_UNROLLED = 4
# Settings that a run may choose for a model that it starts from.
_CHOSEN = ('vocab_size', 'init_std', 'dtype', 'remat', 'unroll')


def resolve(
  config: Config, mesh: Mesh | None = None, model: ModelConfig | None = None
) -> Config:
  """Fills the settings that follow from others, and checks them all.

  Args:
    config: Settings, in which ``None`` stands for what follows from others.
    mesh: Device mesh, by which micro-batch and ``unroll`` are chosen. They are
      left as they are without one.
    model: The model that the run starts from, if it starts from one.

  Returns:
    The settings with all values.

  Raises:
    UsageError: If a setting is out of its range, or does not fit another, the
      mesh or the model.
  """
  check_values(by_name(config))
  _check_start(config)
  if model is not None:
    config = _take_model(config, model)
  _check_optimizer(config)
  optimizer = OPTIMIZERS[config.optimizer]
  for name, value in optimizer.defaults.items():
    if by_name(config)[name] is None:
      usual = value(config) if callable(value) else value
      config = change(config, **{name: usual})
  if config.model.init_std is None:
    config = change(config, init_std=optimizer.init_std(config.model.width))
  config = change(config, model=complete(config.model, flag))
  check_values(by_name(config))
  _check_steps(config)
  _check_packages(config)
  return config if mesh is None else _fit_to_mesh(config, mesh)


def _take_model(config: Config, model: ModelConfig) -> Config:
  """Returns settings with those of a model; other given ones are refused."""
  usual = vars(PRESETS[config.preset].model)
  found = {k: x for k, x in vars(model).items() if k not in _CHOSEN}
  given = {k: x for k, x in vars(config.model).items() if x != usual[k]}
  if model.architecture == 'llama' and 'context_length' in given:
    del found['context_length']  # A Llama has no weights for positions.
  changes = [
    f'{flag(k)} {given[k]} instead of {x}'
    for k, x in found.items()
    if k in given and given[k] != x
  ]
  if changes:
    raise UsageError(
      f'{config.init_from or config.fork_from} holds another model than the '
      f'settings say: {", ".join(changes)}. They may be left out.'
    )
  return change(config, **found)


def _check_optimizer(config: Config) -> None:
  """Raises ``UsageError`` for a setting that the optimizer does not have."""
  known = {k for x in OPTIMIZERS.values() for k in x.defaults}
  own = OPTIMIZERS[config.optimizer].defaults.keys()
  for name in sorted(known - own - MODEL_FIELDS.keys()):
    if getattr(config, name) is not None:
      owners = [k for k, x in OPTIMIZERS.items() if name in x.defaults]
      raise UsageError(
        f'{flag(name)} is for --optimizer {" or ".join(owners)}, got '
        f'--optimizer {config.optimizer}.'
      )


def _check_steps(config: Config) -> None:
  batch_sizes(config)
  is_changed = any(
    getattr(config, x) != getattr(Config, x) for x in ('decay', 'decay_shape')
  )
  if is_changed and config.schedule != 'wsd':
    raise UsageError(
      '--decay and --decay-shape are for --schedule wsd, got --schedule '
      f'{config.schedule}.'
    )
  given = in_steps(config.warmup, config.steps)
  if config.schedule == 'wsd':
    given += in_steps(config.decay, config.steps)
  if given > config.steps:
    raise UsageError(
      f'--warmup and --decay must together be at most --steps {config.steps}, '
      f'got {given}.'
    )


def _check_start(config: Config) -> None:
  if config.init_from is not None and config.fork_from is not None:
    raise UsageError(
      '--init-from takes the weights of a run, --fork-from all of its state: '
      'leave out one of the two.'
    )
  if config.init_from is not None and config.learning_rate is None:
    raise UsageError(
      '--init-from needs --learning-rate, of which the default is for weights '
      'that start from scratch: README.md of the trainer says what to try.'
    )
  has_source = config.init_from is not None or config.fork_from is not None
  if config.from_step is not None and not has_source:
    raise UsageError('--from-step needs --init-from or --fork-from.')
  if config.fork_from is not None and config.from_step is None:
    # Else it would be another run as soon as that one has gone on.
    raise UsageError(
      f'--fork-from {config.fork_from} needs --from-step, the step of one of '
      'its checkpoints.'
    )


def _check_packages(config: Config) -> None:
  for wanted, name, package in (
    (config.tensorboard, '--tensorboard', 'tensorboardX'),
    (config.wandb, '--wandb', 'wandb'),
  ):
    if wanted and not _is_installed(package):
      raise UsageError(f'{name} needs a package: pip install {package}')


def _is_installed(package: str) -> bool:
  spec = importlib.util.find_spec(package)
  # A folder of that name, such as wandb makes where it is used, is no package.
  return spec is not None and spec.origin is not None


def _fit_to_mesh(config: Config, mesh: Mesh) -> Config:
  """Chooses micro-batch and unroll for a mesh, which it checks.

  The micro-batch is the largest divisor of a shard's part of each batch up to
  the setting.
  """
  shards, tensor = num_batch_shards(mesh), mesh.shape['tensor']
  sizes = np.unique(batch_sizes(config)).tolist()
  for size in sizes:
    if size % shards:
      what = '--batch-size' if size == config.batch_size else '--batch-ramp'
      raise UsageError(
        f'data * fsdp = {shards} of --mesh must divide {what} {size}.'
      )
  model = config.model
  if model.num_kv_heads % tensor:
    raise UsageError(
      f'tensor = {tensor} of --mesh must divide --num-kv-heads '
      f'{model.num_kv_heads} (by default --num-heads).'
    )
  sequences = math.gcd(*sizes) // shards
  most = min(config.micro_batch_size or sequences, sequences)
  micro_batch = next(n for n in range(most, 0, -1) if sequences % n == 0)
  unroll = model.unroll or _default_unroll(config, mesh)
  return change(config, micro_batch_size=micro_batch, unroll=unroll)


def _default_unroll(config: Config, mesh: Mesh) -> int:
  """Returns the number of layers where that makes steps quicker, else 1.

  On CPU that is so of small models. On GPU a loop over layers fills and copies
  what it stacks for the backward pass. But it bounds how many layers are
  gathered (FSDP) or recomputed at once, which a compiler need not do without.
  """
  platform = mesh.devices.flat[0].platform
  if platform == 'gpu':
    is_quicker = config.model.remat == 'none' and mesh.shape['fsdp'] == 1
  else:
    is_quicker = platform == 'cpu' and config.model.num_layers <= _MOST_UNROLLED
  return config.model.num_layers if is_quicker else 1
