"""Presets, the defaults of the optimizers, and the checks of all settings."""

from collections.abc import Callable
import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

from examples.gpt2.config import Config, RunConfig, UsageError, flag
from examples.gpt2.model.config import (
  attention_defaults,
  check_attention,
  is_scaling,
  proportional_init_std,
)
import merit_optax

_RUN = dict(eval_every=100, eval_sequences=1024, checkpoint_every=100)
_GPT2 = _RUN | dict(
  architecture='gpt2', untied_head=False, context_length=1024, vocab_size=50257,
  diagnostics_every=100,
)  # fmt: skip
_LLAMA = _GPT2 | dict(architecture='llama', untied_head=True, vocab_size=32000)
_LLAMA_3 = _LLAMA | dict(norm_epsilon=1e-5)

# All but the demo take about 20 tokens per parameter. Batch sizes are the
# paper's where it has the model. Sizes of the Llamas are those of Zhao et al.,
# GaLore, 2024, and of the last three those of the config.json of
# meta-llama/Meta-Llama-3-8B, TinyLlama/TinyLlama_v1.1 and
# HuggingFaceTB/SmolLM2-135M.
PRESETS: dict[str, dict[str, Any]] = {
    'demo': _GPT2 | dict(
        num_layers=4, num_heads=4, width=128, mlp_width=512, context_length=128,
        vocab_size=1024, batch_size=64, micro_batch_size=8, steps=400,
        eval_every=40, eval_sequences=512, checkpoint_every=80,
        diagnostics_every=40,
    ),
    'small': _GPT2 | dict(
        num_layers=12, num_heads=12, width=768, mlp_width=3072,
        batch_size=1024, micro_batch_size=16, steps=2400,
    ),
    'medium': _GPT2 | dict(
        num_layers=24, num_heads=16, width=1024, mlp_width=4096,
        batch_size=4096, micro_batch_size=8, steps=1700,
    ),
    'large': _GPT2 | dict(
        num_layers=36, num_heads=20, width=1280, mlp_width=5120,
        batch_size=8192, micro_batch_size=8, steps=1850,
    ),
    'xl': _GPT2 | dict(
        num_layers=48, num_heads=25, width=1600, mlp_width=6400,
        batch_size=8192, micro_batch_size=8, steps=3700,
    ),
    'llama-130m': _LLAMA | dict(
        num_layers=12, num_heads=12, width=768, mlp_width=2048,
        batch_size=1024, micro_batch_size=16, steps=2600,
    ),
    'llama-350m': _LLAMA | dict(
        num_layers=24, num_heads=16, width=1024, mlp_width=2736,
        batch_size=4096, micro_batch_size=8, steps=1760,
    ),
    'llama-7b': _LLAMA | dict(
        num_layers=32, num_heads=32, width=4096, mlp_width=11008,
        batch_size=8192, micro_batch_size=8, steps=16000,
    ),
    'llama-3-8b': _LLAMA_3 | dict(
        num_layers=32, num_heads=32, num_kv_heads=8, width=4096,
        mlp_width=14336, vocab_size=128256, context_length=8192,
        rope_theta=500_000.0, batch_size=1024, micro_batch_size=1, steps=19200,
    ),
    'tinyllama-1.1b': _LLAMA_3 | dict(
        num_layers=22, num_heads=32, num_kv_heads=4, width=2048, mlp_width=5632,
        context_length=2048, batch_size=1024, micro_batch_size=4, steps=10500,
    ),
    'smollm2-135m': _LLAMA_3 | dict(
        num_layers=30, num_heads=9, num_kv_heads=3, width=576, mlp_width=1536,
        vocab_size=49152, context_length=8192, rope_theta=100_000.0,
        untied_head=False, batch_size=128, micro_batch_size=1, steps=2600,
    ),
}  # fmt: skip

# The learning rate of lion is a usual one and was not tuned. That of the others
# follows the number of steps or the width. The b1 of muon is Optax's default;
# that of muon-hyperball is lower, since 0.9 was better at every batch size in
# examples/study.
OPTIMIZERS: dict[str, dict[str, float]] = {
  'merit': dict(weight_decay=0.01, b1=0.9, b2=0.95),
  'adamw': dict(weight_decay=0.1, b1=0.9, b2=0.95),
  'lamb': dict(weight_decay=0.01, b1=0.9, b2=0.95),
  'lion': dict(learning_rate=1e-3, weight_decay=0.1, b1=0.9, b2=0.99),
  'muon': dict(weight_decay=0.1, b1=0.95, b2=0.95),
  'muon-hyperball': dict(adam_rate=1 / 3, weight_decay=0.0, b1=0.9, b2=0.95),
}

_FORMER_NAMES = {'muon-kept': 'muon-hyperball'}
# That of adamw times the width: the best on the demo (width 128, of 0.7, 1 and
# 1.4 times that), and of examples/study (width 64) at 305 and 610 steps.
_ADAMW_RATE_TIMES_WIDTH = 1.0
# Norms are kept at this multiple of GPT-2 small's proportion to the width.
_KEPT_SIZE = 2.0

# What does not decide what a run computes, but for rounding.
_NOT_IDENTITY = (
  'data', 'text_field', 'eval_data', 'cache_dir', 'out_dir', 'from_scratch',
  'checkpoint_every', 'checkpoint_minutes', 'max_to_keep', 'keep_period',
  'hf_every',
  # Start.origin says what a run starts from.
  'init_step', 'fork_from', 'fork_step',
  # Tokens.order says what comes of it.
  'sampling',
  'diagnostics_every', 'tensorboard', 'wandb', 'profile', 'describe', 'mesh',
  'micro_batch_size', 'remat', 'unroll', 'not_finite', 'coordinator',
  'distributed', 'num_processes', 'process_id', 'init_from',
)  # fmt: skip
# Settings that releases before 0.3.0 did not have, but for those whose default
# is None.
_NEW = ('schedule', 'decay_shape', 'min_rate')

_COUNTS = (
  'num_layers', 'num_heads', 'num_kv_heads', 'head_width', 'width',
  'mlp_width', 'context_length',
  'batch_size', 'micro_batch_size', 'steps', 'eval_every', 'eval_sequences',
  'checkpoint_every', 'max_to_keep', 'keep_period', 'unroll', 'qk_clip_every',
  'init_step', 'fork_step', 'hf_every',
)  # fmt: skip

# Settings, what is accepted in words, and whether a value that is given is.
_RANGES: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
  (_COUNTS, 'at least 1', lambda x: x >= 1),
  (('diagnostics_every', 'weight_decay', 'min_norm', 'warmup_steps',
    'decay_steps'),
   'finite and at least 0', lambda x: 0 <= x < math.inf),
  (('learning_rate', 'max_gradient_norm', 'norm_epsilon', 'qk_clip',
    'init_std', 'adam_rate', 'checkpoint_minutes', 'rope_theta'),
   'finite and above 0', lambda x: 0 < x < math.inf),
  (('b1', 'b2'), 'in [0, 1)', lambda x: 0 <= x < 1),
  (('clip_threshold',), 'above 0', lambda x: x > 0),
  (('warmup_share', 'min_rate'), 'in [0, 1]', lambda x: 0 <= x <= 1),
  (('seed',), 'in [0, 2**32)', lambda x: 0 <= x < 2**32),
  (('vocab_size',), 'in [257, 2**31)', lambda x: 257 <= x < 2**31),
  (('rope_scaling',), 'four numbers above 0, the second below the third',
   is_scaling),
  (('ratios',), "out of 'weight', 'row' and 'column'", bool),
)  # fmt: skip

# Defaults of a preset, and the settings that replace them where one is given.
_REPLACED = {
  'mlp_width': ('width', 'architecture'),
  'num_kv_heads': ('num_heads', 'architecture'),
  'rope_theta': ('architecture',),
  'norm_epsilon': ('architecture',),
}

# Settings that only some optimizers have.
_ONLY_FOR = dict.fromkeys(
  ('trust_ratio', 'ratios', 'clip_threshold', 'min_norm'), ('merit',)
) | {
  'qkv': ('merit', 'muon', 'muon-hyperball'),
  'adam_rate': ('muon', 'muon-hyperball'),
  'ns_dtype': ('muon', 'muon-hyperball'),
}


def resolve(config: Config) -> RunConfig:
  """Fills the settings that were not given, and checks them all.

  Returns:
    The same settings, with the defaults of preset and optimizer; micro-batch
    and ``unroll``, which depend on the devices, may still be None.

  Raises:
    UsageError: If a setting is out of its range, or does not fit another.
  """
  optimizer: Any = _FORMER_NAMES.get(config.optimizer, config.optimizer)
  config = dataclasses.replace(config, optimizer=optimizer)
  defaults = PRESETS[config.preset] | OPTIMIZERS[config.optimizer]
  del defaults['micro_batch_size']
  for name, others in _REPLACED.items():
    if any(getattr(config, other) is not None for other in others):
      defaults.pop(name, None)
  config = _filled(config, defaults)
  _check_ranges(config)
  derived: dict[str, Any] = {
    'mlp_width': _mlp_width(config),
    'init_std': _init_std(config),
    'learning_rate': _default_rate(config),
    **attention_defaults(config),
  }
  # Not the type of what is given, which may have been resolved for a mesh.
  resolved = RunConfig(**vars(_filled(config, derived)))
  _check_model(resolved)
  _check_schedule(resolved)
  _check_start(resolved)
  _check_run(resolved)
  return resolved


def _filled(config: Config, defaults: dict[str, Any]) -> Config:
  missing = {k: v for k, v in defaults.items() if getattr(config, k) is None}
  return dataclasses.replace(config, **missing)


def _check_ranges(config: Config) -> None:
  for names, accepted, holds in _RANGES:
    for name in names:
      value = getattr(config, name)
      if value is not None and not holds(value):
        raise UsageError(f'{flag(name)} must be {accepted}, got {value}.')


def _check_model(config: RunConfig) -> None:
  check_attention(config, flag)
  if config.dtype == 'float32' and config.reduce_dtype == 'bfloat16':
    raise UsageError('--reduce-dtype bfloat16 needs --dtype bfloat16.')
  if config.hf_every is not None and config.qk_norm:
    raise UsageError(
      '--hf-every does nothing with --qk-norm, which no model of Hugging Face '
      'here has: leave out one of the two.'
    )
  if config.decay == 'hidden' and config.optimizer == 'muon-hyperball':
    raise UsageError(
      '--decay hidden leaves nothing to decay with --optimizer muon-hyperball, '
      'which keeps the norms of hidden matrices.'
    )
  if config.qk_clip_every is not None and config.qk_clip is None:
    raise UsageError('--qk-clip-every needs --qk-clip.')
  if config.qk_clip is not None and config.qk_norm:
    raise UsageError(
      '--qk-clip does nothing behind --qk-norm, where the scale of queries and '
      'keys does not matter: leave out one of the two.'
    )


def _check_schedule(config: RunConfig) -> None:
  has_decay = config.decay_steps is not None or config.decay_shape != 'linear'
  if has_decay and config.schedule != 'wsd':
    raise UsageError(
      '--decay-steps and --decay-shape are for --schedule wsd, got --schedule '
      f'{config.schedule}.'
    )
  given = (config.warmup_steps or 0) + (config.decay_steps or 0)
  if given > config.steps:
    raise UsageError(
      '--warmup-steps and --decay-steps must together be at most --steps '
      f'{config.steps}, got {given}.'
    )


def _check_start(config: RunConfig) -> None:
  for step, folder in (('init_step', 'init_from'), ('fork_step', 'fork_from')):
    if getattr(config, step) and getattr(config, folder) is None:
      raise UsageError(f'{flag(step)} needs {flag(folder)}.')
  if config.fork_from is not None and config.fork_step is None:
    # Else it would be another run as soon as that one has gone on.
    raise UsageError(
      f'--fork-from {config.fork_from} needs --fork-step, the step of one of '
      'its checkpoints.'
    )
  if config.init_from is not None and config.fork_from is not None:
    raise UsageError(
      '--init-from takes the weights of a run, --fork-from all of its state: '
      'leave out one of the two.'
    )
  if config.fork_step is not None and config.fork_step >= config.steps:
    raise UsageError(
      f'--fork-step must be below --steps {config.steps}, got '
      f'{config.fork_step}.'
    )


def _check_run(config: RunConfig) -> None:
  for name, optimizers in _ONLY_FOR.items():
    is_set = getattr(config, name) != getattr(Config, name)
    if is_set and config.optimizer not in optimizers:
      raise UsageError(
        f'{flag(name)} is for --optimizer {" or ".join(optimizers)}, got '
        f'--optimizer {config.optimizer}.'
      )
  if config.out_dir == Path():
    raise UsageError(
      '--out-dir must name a folder, got nothing or the current one, which '
      'takes its absolute path.'
    )
  values = config.coordinator, config.num_processes, config.process_id
  if None in values and any(x is not None for x in values):
    raise UsageError(
      '--coordinator, --num-processes and --process-id must be given together.'
    )
  number, count = config.process_id, config.num_processes
  if number is not None and count is not None and not 0 <= number < count:
    raise UsageError(
      f'--process-id must be in [0, {config.num_processes}), the number of '
      f'processes, got {config.process_id}.'
    )
  if config.tensorboard and not _is_installed('tensorboardX'):
    raise UsageError('--tensorboard needs a package: pip install tensorboardX')
  if config.wandb is not None and not _is_installed('wandb'):
    raise UsageError(
      "--wandb needs a package: pip install 'merit_optax[wandb]'"
    )


def _is_installed(package: str) -> bool:
  spec = importlib.util.find_spec(package)
  # A folder of that name, such as wandb makes where it is used, is no package.
  return spec is not None and spec.origin is not None


def identity(config: RunConfig) -> dict[str, Any]:
  """Returns the settings that decide what a run computes, as JSON values."""
  # Runs from before something existed, or got its name, can resume.
  usual = attention_defaults(config)
  usual |= {name: getattr(Config, name) for name in _NEW}
  found = {
    name: value
    for name, value in vars(config).items()
    if name not in _NOT_IDENTITY and value not in (None, usual.get(name))
  }
  if config.dtype == 'float32':
    del found['reduce_dtype']  # It decides nothing then.
  former = {new: old for old, new in _FORMER_NAMES.items()}
  found['optimizer'] = former.get(config.optimizer, config.optimizer)
  return found


def _init_std(config: Any) -> float | None:
  """Returns the default of the initial weights; None is that of GPT-2."""
  if config.optimizer == 'muon-hyperball':
    return proportional_init_std(config.width, _KEPT_SIZE)
  if config.preset == 'demo':
    return proportional_init_std(config.width)
  return None


def _default_rate(config: Any) -> float | None:
  """Returns the learning rate by steps or width; None if there is no rule."""
  if config.optimizer == 'adamw':
    return float(f'{_ADAMW_RATE_TIMES_WIDTH / config.width:.2g}')
  if config.optimizer == 'lion':
    return None
  name = config.optimizer.replace('-', '_')
  return merit_optax.starting_learning_rate(name, config.steps, config.width)


def _mlp_width(config: Any) -> int:
  if config.architecture == 'llama':
    return 16 * math.ceil(config.width / 6)
  return 4 * config.width
