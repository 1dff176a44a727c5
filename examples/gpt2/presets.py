"""Presets, what follows from other settings, and the checks of all settings."""

from collections.abc import Sequence
import dataclasses
import importlib.util
import json
import math
import os
from pathlib import Path
import sys
from typing import Any

import tyro

from examples.gpt2.config import (
  FIELDS,
  GROUPS,
  Config,
  RunConfig,
  UsageError,
  fact,
  flag,
  in_steps,
)
from examples.gpt2.model.config import (
  attention_defaults,
  check_attention,
  proportional_init_std,
)
from examples.gpt2.storage import as_path, os_errors
import merit_optax

_RUN: dict[str, Any] = dict(
  eval_every=100, eval_sequences=1024, checkpoint_every=100,
  diagnostics_every=100,
)  # fmt: skip
_GPT2 = _RUN | dict(context_length=1024, vocab_size=50257)
_LLAMA = _GPT2 | dict(architecture='llama', untied_head=True, vocab_size=32000)
_LLAMA_3 = _LLAMA | dict(norm_epsilon=1e-5)

# All but the demo take about 20 tokens per parameter. Batch sizes are the
# paper's where it has the model. Sizes of the Llamas are those of Zhao et al.,
# GaLore, 2024, and of the last three those of the config.json of
# meta-llama/Meta-Llama-3-8B, TinyLlama/TinyLlama_v1.1 and
# HuggingFaceTB/SmolLM2-135M.
PRESETS: dict[str, Config] = {
  name: Config(preset=name, **settings)
  for name, settings in {
    'demo': {},
    'small': _GPT2 | dict(
      num_layers=12, num_heads=12, width=768,
      batch_size=1024, micro_batch_size=16, steps=2400,
    ),
    'medium': _GPT2 | dict(
      num_layers=24, num_heads=16, width=1024, batch_size=4096, steps=1700,
    ),
    'large': _GPT2 | dict(
      num_layers=36, num_heads=20, width=1280, batch_size=8192, steps=1850,
    ),
    'xl': _GPT2 | dict(
      num_layers=48, num_heads=25, width=1600, batch_size=8192, steps=3700,
    ),
    'llama-130m': _LLAMA | dict(
      num_layers=12, num_heads=12, width=768, mlp_width=2048,
      batch_size=1024, micro_batch_size=16, steps=2600,
    ),
    'llama-350m': _LLAMA | dict(
      num_layers=24, num_heads=16, width=1024, mlp_width=2736,
      batch_size=4096, steps=1760,
    ),
    'llama-7b': _LLAMA | dict(
      num_layers=32, num_heads=32, width=4096, mlp_width=11008,
      batch_size=8192, steps=16000,
    ),
    'llama-3-8b': _LLAMA_3 | dict(
      num_layers=32, num_heads=32, num_kv_heads=8, width=4096, mlp_width=14336,
      vocab_size=128256, context_length=8192, rope_theta=500_000.0,
      batch_size=1024, micro_batch_size=1, steps=19200,
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
  }.items()
}  # fmt: skip

# The learning rate of lion is a usual one and was not tuned. Those of the
# others follow from the number of steps or the width. The b1 of muon is Optax's
# default; that of muon-hyperball is lower, since 0.9 was better at every batch
# size in examples/study.
OPTIMIZERS: dict[str, dict[str, float]] = {
  'merit': dict(weight_decay=0.01, b1=0.9, b2=0.95),
  'adamw': dict(weight_decay=0.1, b1=0.9, b2=0.95),
  'lamb': dict(weight_decay=0.01, b1=0.9, b2=0.95),
  'lion': dict(learning_rate=1e-3, weight_decay=0.1, b1=0.9, b2=0.99),
  'muon': dict(adam_rate=1.0, weight_decay=0.1, b1=0.95, b2=0.95),
  'muon-hyperball': dict(adam_rate=1 / 3, weight_decay=0.0, b1=0.9, b2=0.95),
}
# Of Adam beside MERIT on hidden matrices, as in examples/study.
_ADAM_RATE = 0.004
# Times the width: the best at width 128 and 4 layers (of 0.7, 1 and 1.4
# times that), and of examples/study (width 64) at 305 and 610 steps.
_ADAMW_RATE_TIMES_WIDTH = 1.0
# Norms are kept at this multiple of GPT-2 small's proportion to the width.
_KEPT_SIZE = 2.0

# What other programs call a setting.
_OTHER_NAMES = {
  '--lr': '--learning-rate',
  '--bs': '--batch-size',
  '--resume': 'nothing: the same command goes on where a run was stopped',
  '--epochs': '--steps; the table before the first step counts the epochs',
  '--max-steps': '--steps',
  '--device': 'JAX_PLATFORMS=cpu, cuda or tpu in the environment',
  '--devices': '--mesh',
  '--output-dir': '--out-dir',
  '--save-every': '--checkpoint-every',
}


def parse(args: Sequence[str] | None, prog: str) -> Config:
  """Reads flags, over those of a preset or of a file of settings.

  Args:
    args: Command line; ``None`` for that of the process.
    prog: Name of the command.

  Raises:
    UsageError: If a preset or file is not there, or a flag is that of another
      program.
  """
  args = list(sys.argv[1:] if args is None else args)
  for arg in args:
    if (name := arg.partition('=')[0].replace('_', '-')) in _OTHER_NAMES:
      raise UsageError(f'{name} is here: {_OTHER_NAMES[name]}.')
  start, args = _take_start(args)
  flags = tyro.cli(
    _flags_of(start),
    args=args,
    prog=prog,
    registry=_REGISTRY,
    description='Trains a GPT-2 or Llama. The defaults are those of --preset '
    f'({", ".join(PRESETS)}) or of --config, the config.json of a run.',
  )
  given = [vars(getattr(flags, group)) for group in GROUPS]
  merged = {name: value for group in given for name, value in group.items()}
  return dataclasses.replace(start, **merged)


def _take_start(args: list[str]) -> tuple[Config, list[str]]:
  """Returns the settings of --preset or --config, and the other arguments."""
  found: dict[str, str] = {}
  rest = []
  words = iter(args)
  for word in words:
    name, has_value, value = word.partition('=')
    if name not in ('--preset', '--config'):
      rest.append(word)
      continue
    found[name] = value if has_value else next(words, '')
  if len(found) > 1:
    raise UsageError('--preset and --config exclude each other.')
  if '--config' in found:
    return read_config(as_path(found['--config'])), rest
  preset = found.get('--preset', 'demo')
  if preset not in PRESETS:
    raise UsageError(
      f'--preset must be one of {", ".join(PRESETS)}, got {preset!r}.'
    )
  return PRESETS[preset], rest


def read_config(path: Path) -> Config:
  """Returns the settings in the config.json of a run, or in its folder.

  Raises:
    UsageError: If the file is not there or holds none.
  """
  try:
    with os_errors():
      path = path / 'config.json' if path.is_dir() else path
      return from_json(json.loads(path.read_text())['settings'])
  except (OSError, ValueError, TypeError, KeyError) as error:
    raise UsageError(
      f'{path} holds no settings of a run: {error!r}.'
    ) from error


def from_json(settings: dict[str, Any]) -> Config:
  """Returns settings from JSON values, see :func:`to_json`."""
  values: dict[str, Any] = {
    k: tuple(x) if isinstance(x, list) else x for k, x in settings.items()
  }
  for name in (
    'out_dir',
    'init_from',
    'fork_from',
    'cache_dir',
    'compile_cache',
  ):
    if values.get(name) is not None:
      values[name] = Path(values[name])
  return Config(**values)


def to_json(config: Config) -> dict[str, Any]:
  """Returns all settings as JSON values."""
  return {
    name: os.fspath(value) if isinstance(value, os.PathLike) else value
    for name, value in vars(config).items()
  }


def _flags_of(start: Config) -> Any:
  """Returns a class of the groups, with the defaults of some settings."""
  fields = []
  for group, kind in GROUPS.items():
    names = [field.name for field in dataclasses.fields(kind)]
    default = kind(**{name: getattr(start, name) for name in names})
    fields.append(
      (
        group,
        tyro.conf.OmitArgPrefixes[kind],  # type: ignore[valid-type, misc]
        dataclasses.field(default=default),
      )
    )
  return dataclasses.make_dataclass('Flags', fields, frozen=True)


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _integer(
  info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
  """Has tyro read 1e3 as an integer too."""
  if info.type is not int:
    return None

  def read(words: list[str]) -> int:
    value = float(words[0])
    if not value.is_integer():
      raise ValueError(f'expected an integer, got {words[0]}')
    return int(value)

  return tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar='INT',
    instance_from_str=read,
    is_instance=lambda x: isinstance(x, int),
    str_from_instance=lambda x: [str(x)],
  )


def resolve(config: Config) -> RunConfig:
  """Fills the settings that follow from others, and checks them all.

  Returns:
    The same settings; ``unroll``, which depends on the devices, may still be
    None.

  Raises:
    UsageError: If a setting is out of its range, or does not fit another.
  """
  _check_ranges(config)
  config = _filled(config, OPTIMIZERS[config.optimizer])
  derived = {
    'mlp_width': _mlp_width(config),
    'init_std': _init_std(config),
    'learning_rate': _default_rate(config),
    **attention_defaults(config),
  }
  if config.others == 'adam':
    derived['adam_rate'] = _ADAM_RATE
  resolved = RunConfig(**vars(_filled(config, derived)))
  _check_ranges(resolved)
  check_attention(resolved, flag)
  _check_optimizer(resolved)
  _check_schedule(resolved)
  _check_start(resolved)
  _check_run(resolved)
  return resolved


def _filled(config: Config, defaults: dict[str, Any]) -> Config:
  missing = {k: v for k, v in defaults.items() if getattr(config, k) is None}
  return dataclasses.replace(config, **missing)


def _check_ranges(config: Config) -> None:
  for name in FIELDS:
    value, accepted = getattr(config, name), _accepts(name)
    if value is not None and accepted is not None and not accepted.holds(value):
      raise UsageError(f'{flag(name)} must be {accepted.text}, got {value}.')


def _accepts(name: str) -> Any:
  return fact(name, 'accepts')


def _check_optimizer(config: RunConfig) -> None:
  for name in FIELDS:
    optimizers = fact(name, 'optimizers')
    usual = OPTIMIZERS[config.optimizer].get(name, getattr(Config, name))
    is_set = getattr(config, name) not in (usual, None)
    if is_set and optimizers and config.optimizer not in optimizers:
      raise UsageError(
        f'{flag(name)} is for --optimizer {" or ".join(optimizers)}, got '
        f'--optimizer {config.optimizer}.'
      )
  is_alone = config.optimizer == 'merit' and config.others == 'same'
  if is_alone and config.adam_rate is not None:
    raise UsageError(
      f'--adam-rate {config.adam_rate} needs --others adam with MERIT.'
    )


def _check_schedule(config: RunConfig) -> None:
  is_changed = any(
    getattr(config, x) != getattr(Config, x) for x in ('decay', 'decay_shape')
  )
  if is_changed and config.schedule != 'wsd':
    raise UsageError(
      '--decay and --decay-shape are for --schedule wsd, got --schedule '
      f'{config.schedule}.'
    )
  given = in_steps(config.warmup, config)
  if config.schedule == 'wsd':
    given += in_steps(config.decay, config)
  if given > config.steps:
    raise UsageError(
      f'--warmup and --decay must together be at most --steps {config.steps}, '
      f'got {given}.'
    )


def _check_start(config: RunConfig) -> None:
  if config.init_from is not None and config.fork_from is not None:
    raise UsageError(
      '--init-from takes the weights of a run, --fork-from all of its state: '
      'leave out one of the two.'
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
  if config.fork_from is not None and (config.from_step or 0) >= config.steps:
    raise UsageError(
      f'--from-step must be below --steps {config.steps}, got '
      f'{config.from_step}.'
    )


def _check_run(config: RunConfig) -> None:
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


def _init_std(config: Config) -> float | None:
  """Returns the default of the initial weights; None is that of GPT-2."""
  if config.optimizer == 'muon-hyperball':
    return proportional_init_std(config.width, _KEPT_SIZE)
  if config.preset == 'demo':
    return proportional_init_std(config.width)
  return None


def _default_rate(config: Config) -> float | None:
  """Returns the learning rate by steps or width; None if there is no rule."""
  if config.optimizer == 'adamw':
    return float(f'{_ADAMW_RATE_TIMES_WIDTH / config.width:.2g}')
  if config.optimizer == 'lion':
    return None
  name = config.optimizer.replace('-', '_')
  return merit_optax.starting_learning_rate(name, config.steps, config.width)


def _mlp_width(config: Config) -> int:
  if config.architecture == 'llama':
    return 16 * math.ceil(config.width / 6)
  return 4 * config.width
