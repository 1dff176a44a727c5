"""Settings of a training run: the flags, the presets, and their checks.

What is accepted, and what a setting decides, stands in the metadata of its
field, which ``setting`` makes. :func:`resolve` fills what follows from other
settings, once, and checks them all.
"""

from collections.abc import Callable
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
from pathlib import Path
import re
from typing import (
  TYPE_CHECKING,
  Annotated,
  Any,
  Literal,
  NamedTuple,
  Optional,
  TypeAlias,
  TypeVar,
)

import numpy as np
import tyro

from examples.gpt2.command import UsageError, flag
from examples.gpt2.optimizers import (
  GPT2_WIDTH,
  OPTIMIZERS,
  in_steps,
  usual_init_std,
)

T = TypeVar('T')
Remat: TypeAlias = Literal['none', 'dots', 'full']

if TYPE_CHECKING:
  Optimizer: TypeAlias = str
  Derived: TypeAlias = Annotated[T, 'None until `resolve` has filled it']
else:
  Optimizer = Literal[tuple(OPTIMIZERS)]
  Derived = Optional[T]  # noqa: UP045

# Not in --help: what only presets and imported models set.
_HIDDEN = tyro.conf.Suppress
_NORM_EPSILON = {'gpt2': 1e-5, 'llama': 1e-6}
# Sizes that a power of two divides are quicker, and split over a tensor axis.
_VOCAB_MULTIPLE = 64


class Range(NamedTuple):
  """The values that a setting accepts."""

  text: str  # In words, for messages.
  holds: Callable[[Any], bool]


AT_LEAST_1 = Range('at least 1', lambda x: x >= 1)
NOT_NEGATIVE = Range('finite and at least 0', lambda x: 0 <= x < math.inf)
POSITIVE = Range('finite and above 0', lambda x: 0 < x < math.inf)
ABOVE_0 = Range('above 0', lambda x: x > 0)
DECAY_RATE = Range('in [0, 1)', lambda x: 0 <= x < 1)
SHARE = Range('in [0, 1]', lambda x: 0 <= x <= 1)
SEED = Range('in [0, 2**32)', lambda x: 0 <= x < 2**32)
VOCAB_SIZE = Range('in [1, 2**31)', lambda x: 1 <= x < 2**31)
ROPE_SCALING = Range(
  'four numbers above 0, the second below the third',
  lambda x: x[1] < x[2] and all(0 < y < math.inf for y in x),
)


def setting(
  default: Any,
  accepts: Range | None = None,
  *,
  decides: bool = True,
  is_schedule: bool = False,
  is_local: bool = False,
) -> Any:
  """Returns a field of a setting.

  Args:
    default: Its default; ``None`` where it follows from other settings.
    accepts: The values that it accepts, of those of its type.
    decides: Whether it decides the numbers that a run computes, beyond
      rounding. Such a setting cannot change when a run goes on.
    is_schedule: Whether it may change in a run that goes on, as long as no
      learning rate of a step that is done changes with it.
    is_local: Whether processes of one run may have different values.
  """
  facts = {
    'accepts': accepts,
    'decides': decides,
    'is_schedule': is_schedule,
    'is_local': is_local,
  }
  return dataclasses.field(default=default, metadata=facts)


def _by(text: str) -> Any:
  """Returns what ``--help`` shows as the default of a setting of ``None``."""

  def hint(default: str) -> str:
    return f'(default: {text if default == "None" else default})'

  return tyro.conf.arg(help_behavior_hint=hint)


_BY_OPTIMIZER = _by('by the optimizer')


class RopeScaling(NamedTuple):
  """How Llama 3.1 slows rotary positions, for a context longer than before.

  Features that turn less than ``low_freq_factor`` times in the original context
  turn slower by the factor, those that turn more than ``high_freq_factor``
  times as before, and those in between by something in between.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_context_length: float  # Tokens.


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What the model is."""

  # gpt2: LayerNorm, learned positions, GELU, biases. llama: RMSNorm, rotary
  # positions, SwiGLU, no biases.
  architecture: Literal['gpt2', 'llama'] = setting('gpt2')
  # Transformer blocks.
  num_layers: int = setting(3, AT_LEAST_1)
  # Attention heads of a block.
  num_heads: int = setting(4, AT_LEAST_1)
  # Heads of keys and values, each shared by a group of heads (llama).
  num_kv_heads: Annotated[Derived[int], _by('--num-heads')] = setting(
    None, AT_LEAST_1
  )
  # Features of the residual stream.
  width: int = setting(128, AT_LEAST_1)
  # Hidden features of the MLP.
  mlp_width: Annotated[Derived[int], _by('4 * --width, llama 8/3 of it')] = (
    setting(None, AT_LEAST_1)
  )
  # Tokens in a sequence.
  context_length: int = setting(128, AT_LEAST_1)
  # Tokens of the byte-pair vocabulary that is trained on text, at most; 257
  # gives plain bytes. Of token files without a tokenizer: the number that all
  # tokens are below; above 65536, files without a header are uint32. The model
  # of a run has a row for each, rounded up.
  vocab_size: int = setting(1024, VOCAB_SIZE)
  # Put queries and keys through an RMSNorm in each head.
  qk_norm: bool = setting(False)
  # Give the output head a matrix of its own.
  untied_head: bool = setting(False)
  # Standard deviation of the initial weights.
  init_std: Annotated[
    Derived[float],
    _by('0.02, below --width 768 more; muon-hyperball: by the width'),
  ] = setting(None, POSITIVE)
  # Features of a head (llama); by default width / heads.
  head_width: Annotated[Derived[int], _HIDDEN] = setting(None, AT_LEAST_1)
  # Added to the variance in norms; by default 1e-5, of llama 1e-6.
  norm_epsilon: Annotated[Derived[float], _HIDDEN] = setting(None, POSITIVE)
  # Base of the frequencies of rotary positions (llama).
  rope_theta: Annotated[float, _HIDDEN] = setting(10_000.0, POSITIVE)
  # Llama 3.1's scaling of rotary positions.
  rope_scaling: Annotated[RopeScaling | None, _HIDDEN, tyro.conf.Fixed] = (
    setting(None, ROPE_SCALING)
  )
  # Data type of activations, and of Muon's products. Weights are float32.
  dtype: Literal['float32', 'bfloat16'] = setting('float32')
  # What the backward pass computes again to save memory: nothing, all but
  # matrix products, or everything within a block.
  remat: Remat = setting('none', decides=False)
  # Layers that are compiled one by one, instead of a loop over one.
  unroll: Annotated[Derived[int], _by('all where steps are faster for it')] = (
    setting(None, AT_LEAST_1, decides=False)
  )

  @property
  def attention_width(self) -> int:
    """Features of all heads together."""
    return self.num_heads * self.head_width


@dataclasses.dataclass(frozen=True)
class Config:
  """All settings of a run. The defaults are those of the preset demo."""

  model: ModelConfig = ModelConfig()
  # Text, a file or a folder of files; or folders of token files, of
  # examples.gpt2.prepare, nanoGPT, llm.c and others, with weights if they are
  # to be mixed, as in tokens/web:0.7 tokens/code:0.3. 'stdlib' is the source of
  # Python's standard library.
  data: tuple[str, ...] = setting(('stdlib',), decides=False, is_local=True)
  # More text or token files to evaluate on, each as name=path.
  eval_data: tuple[str, ...] = setting((), decides=False, is_local=True)
  # Folder that keeps tokenizers and tokens, by the content of the text.
  cache_dir: Path = setting(
    Path('~/.cache/merit_optax'), decides=False, is_local=True
  )
  # Seed of the weights and of the order of the data.
  seed: int = setting(0, SEED)

  # merit-hidden is MERIT on the matrices of the blocks, with Adam beside it;
  # muon-hyperball is Muon's direction with the norms of matrices kept.
  optimizer: Optimizer = setting('merit')
  # Peak learning rate, after a linear warm-up.
  learning_rate: Annotated[
    Derived[float], _by('by --optimizer, --steps and --width')
  ] = setting(None, POSITIVE, is_schedule=True)
  # Peak learning rate of what Adam updates beside the optimizer: embeddings,
  # biases and norms.
  adam_rate: Annotated[Derived[float], _BY_OPTIMIZER] = setting(None, POSITIVE)
  # Weight decay; muon-hyperball: of what Adam updates.
  weight_decay: Annotated[Derived[float], _BY_OPTIMIZER] = setting(
    None, NOT_NEGATIVE
  )
  # Decay rate of the first moment, or of Muon's momentum.
  b1: Annotated[Derived[float], _BY_OPTIMIZER] = setting(None, DECAY_RATE)
  # Decay rate of the second moment.
  b2: Annotated[Derived[float], _BY_OPTIMIZER] = setting(None, DECAY_RATE)
  # Largest size of an element of MERIT's update, before the learning rate; inf
  # for no clip.
  clip_threshold: Annotated[Derived[float], _by('1')] = setting(None, ABOVE_0)
  # Lower bound of the norms in a trust ratio of MERIT.
  min_norm: Annotated[Derived[float], _by('0')] = setting(None, NOT_NEGATIVE)
  # Whether the weights of query, key and value count as one matrix, as three,
  # or as three for each head, in MERIT and Muon.
  qkv: Annotated[Derived[Literal['fused', 'split', 'heads']], _by('fused')] = (
    setting(None)
  )
  # Global norm that gradients are clipped to.
  max_gradient_norm: float = setting(1.0, POSITIVE)

  # Sequences of a step, on all devices together.
  batch_size: int = setting(32, AT_LEAST_1, is_schedule=True)
  # Smaller batches to begin with, each as sequences:step, up to that step: as
  # in 64:1000 128:3000.
  batch_ramp: tuple[str, ...] = setting((), is_schedule=True)
  # Optimizer steps.
  steps: int = setting(250, AT_LEAST_1, is_schedule=True)
  # Learning rate after the warm-up: a cosine or a line down to --min-rate; wsd
  # (warm-up, stable, decay): the peak, until --decay; inverse-sqrt: the peak
  # times sqrt(warm-up / step). Of the last two, a run can be made longer.
  schedule: Literal['cosine', 'linear', 'wsd', 'inverse-sqrt'] = setting(
    'cosine', is_schedule=True
  )
  # Steps in which the learning rate rises; below 1, a share of --steps.
  warmup: float = setting(0.1, NOT_NEGATIVE, is_schedule=True)
  # wsd: steps at the end in which the learning rate falls; below 1, a share of
  # --steps.
  decay: float = setting(0.2, NOT_NEGATIVE, is_schedule=True)
  # wsd: how it falls, in a line, or as 1 - sqrt(share of --decay).
  decay_shape: Literal['linear', '1-sqrt'] = setting('linear', is_schedule=True)
  # Smallest learning rate after the warm-up, over --learning-rate.
  min_rate: float = setting(0.0, SHARE, is_schedule=True)

  # Folder of the results, on a disk that all hosts share or in gs://. A run
  # that was killed there goes on from its last checkpoint.
  out_dir: Annotated[Path | None, _by('named by the settings, in runs/')] = (
    setting(None, decides=False)
  )
  # Folder of a run or of an imported model whose weights to start from.
  init_from: Path | None = setting(None)
  # Folder of a run to go on from as a run of its own, with the state of its
  # optimizer: such as a cooldown from the stable phase of wsd.
  fork_from: Path | None = setting(None)
  # Step of the checkpoint of --init-from or --fork-from.
  from_step: Annotated[int | None, _by('the last; --fork-from needs it')] = (
    setting(None, AT_LEAST_1)
  )
  # Steps between evaluations.
  eval_every: int = setting(50, AT_LEAST_1, decides=False)
  # Sequences of an evaluation, at the most.
  eval_sequences: int = setting(256, AT_LEAST_1, decides=False)
  # Steps between diagnostics of attention, updates and the gradient's noise:
  # before the step, in the time of 1.2 steps; 0 for none.
  diagnostics_every: int = setting(50, NOT_NEGATIVE, decides=False)
  # Steps between checkpoints.
  checkpoint_every: int = setting(50, AT_LEAST_1, decides=False)
  # Newest checkpoints to keep. The best by validation loss is kept too.
  max_to_keep: int = setting(2, AT_LEAST_1, decides=False)
  # Keep every checkpoint whose step is a multiple of this number.
  keep_period: int | None = setting(None, AT_LEAST_1, decides=False)
  # Stop when a loss or gradient is infinite or not a number, or leave such
  # steps out.
  not_finite: Literal['stop', 'skip'] = setting('stop', decides=False)
  # Write the metrics for TensorBoard too.
  tensorboard: bool = setting(False, decides=False, is_local=True)
  # Project at Weights & Biases to log to. A resumed run goes on there.
  wandb: str | None = setting(None, decides=False, is_local=True)
  # Write a trace of six steps, for TensorBoard or xprof.
  profile: bool = setting(False, decides=False, is_local=True)

  # Axes of the device mesh, such as fsdp=4,tensor=2. Devices that are left form
  # the axis data.
  mesh: str = setting('', decides=False)
  # Sequences that each shard of a batch (data * fsdp of the mesh) processes at
  # once, at the most; gradients are accumulated. The largest number that
  # divides its part of --batch-size is taken, and printed.
  micro_batch_size: Annotated[Derived[int], _by('all of them')] = setting(
    8, AT_LEAST_1, decides=False
  )
  # Compile the step for devices that are not there, such as v5e:16x16 or
  # h100:8x8, and print the memory that it needs and the bytes that it sends.
  compile_for: str | None = setting(None, decides=False, is_local=True)
  # Whether other processes take part: auto asks jax, which finds those of TPU
  # pods, Slurm, Open MPI and Kubernetes.
  distributed: Literal['auto', 'on', 'off'] = setting(
    'auto', decides=False, is_local=True
  )
  # Address and port of process 0, where jax does not find the processes.
  coordinator: str | None = setting(None, decides=False, is_local=True)
  # Number of processes, with --coordinator.
  num_processes: int | None = setting(
    None, AT_LEAST_1, decides=False, is_local=True
  )
  # Number of this process, from 0, with --coordinator.
  process_id: int | None = setting(
    None, NOT_NEGATIVE, decides=False, is_local=True
  )
  # The preset that the settings began with.
  preset: Annotated[str, _HIDDEN] = setting('demo', decides=False)


_MODEL = {x.name: x for x in dataclasses.fields(ModelConfig)}
FIELDS = _MODEL | {
  x.name: x for x in dataclasses.fields(Config) if x.name != 'model'
}
"""The settings by name; the metadata of each says what ``setting`` was told."""


def fact(name: str, which: str) -> Any:
  """Returns a fact about a setting, see ``setting``."""
  return FIELDS[name].metadata[which]


def by_name(config: Config) -> dict[str, Any]:
  """Returns all settings, of the model and others, by name."""
  others = {k: x for k, x in vars(config).items() if k != 'model'}
  return vars(config.model) | others


def change(config: Config, **settings: Any) -> Config:
  """Returns settings with others in their place, also those of the model."""
  settings = {
    k: tuple(x) if isinstance(x, list) else x for k, x in settings.items()
  }
  of_model = {k: settings.pop(k) for k in _MODEL.keys() & settings.keys()}
  model = dataclasses.replace(settings.pop('model', config.model), **of_model)
  return dataclasses.replace(config, model=model, **settings)


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
  name: change(Config(preset=name), **settings)
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


def from_json(settings: dict[str, Any]) -> Config:
  """Returns settings from JSON values, see :func:`to_json`."""
  values = settings | {'model': model_from_json(settings['model'])}
  for name in ('out_dir', 'init_from', 'fork_from', 'cache_dir'):
    if values.get(name) is not None:
      values[name] = Path(values[name])
  return change(Config(), **values)


def model_from_json(settings: dict[str, Any]) -> ModelConfig:
  """Returns what a model is, from JSON values."""
  scaling = settings.get('rope_scaling')
  if scaling is not None:
    settings = settings | {'rope_scaling': RopeScaling(*scaling)}
  return ModelConfig(**settings)


def to_json(config: Config) -> dict[str, Any]:
  """Returns all settings as JSON values."""
  return _as_json(dataclasses.asdict(config))


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
  return json.loads(json.dumps(values, default=os.fspath))


def resolve(config: Config) -> Config:
  """Fills the settings that follow from others, and checks them all.

  What depends on the devices, the micro-batch and ``unroll``, is left.

  Raises:
    UsageError: If a setting is out of its range, or does not fit another.
  """
  check_values(by_name(config))
  _check_optimizer(config)
  for name, value in OPTIMIZERS[config.optimizer].defaults.items():
    if by_name(config)[name] is None:
      usual = value(config) if callable(value) else value
      config = change(config, **{name: usual})
  config = dataclasses.replace(config, model=complete(config.model, flag))
  check_values(by_name(config))
  batch_sizes(config)
  _check_schedule(config)
  _check_start(config)
  _check_run(config)
  return config


def complete(
  model: ModelConfig, named: Callable[[str], str] = str
) -> ModelConfig:
  """Fills what follows of a model from the rest, and checks it.

  Args:
    model: What the model is.
    named: Gives what a setting is called in messages.

  Raises:
    UsageError: If there is no such model.
  """
  check_values(vars(model), named)
  heads = {
    'num_kv_heads': model.num_heads,
    'head_width': model.width // model.num_heads,
  }
  defaults: dict[str, Any] = heads | {
    'mlp_width': 16 * math.ceil(model.width / 6)
    if model.architecture == 'llama'
    else 4 * model.width,
    'init_std': usual_init_std(min(model.width, GPT2_WIDTH)),
    'norm_epsilon': _NORM_EPSILON[model.architecture],
  }
  model = dataclasses.replace(
    model, **{k: x for k, x in defaults.items() if getattr(model, k) is None}
  )
  num_heads = f'{named("num_heads")} {model.num_heads}'
  if model.width % model.num_heads:
    raise UsageError(f'{num_heads} must divide {named("width")} {model.width}.')
  if model.num_heads % model.num_kv_heads:
    raise UsageError(
      f'{named("num_kv_heads")} {model.num_kv_heads} must divide {num_heads}.'
    )
  if model.architecture == 'llama' and model.head_width % 2:
    raise UsageError(
      f'{named("head_width")} must be even for llama, got {model.head_width} '
      f'({named("width")} {model.width}, {num_heads}).'
    )
  for name in (*heads, 'rope_theta', 'rope_scaling'):
    value = getattr(model, name)
    usual = heads.get(name, _MODEL[name].default)
    if model.architecture != 'llama' and value != usual:
      raise UsageError(
        f'{named(name)} is for {named("architecture")} llama, got {value}.'
      )
  return model


def padded_vocab_size(num_tokens: int) -> int:
  """Returns the rows of the embedding for a number of token identifiers."""
  return math.ceil(num_tokens / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def check_values(
  settings: dict[str, Any], named: Callable[[str], str] = flag
) -> None:
  """Raises ``UsageError`` for a value that its setting does not accept."""
  for name, value in settings.items():
    accepts = fact(name, 'accepts')
    if None not in (accepts, value) and not accepts.holds(value):
      raise UsageError(f'{named(name)} must be {accepts.text}, got {value!r}.')


def _check_optimizer(config: Config) -> None:
  """Raises ``UsageError`` for a setting that the optimizer does not have."""
  known = {k for x in OPTIMIZERS.values() for k in x.defaults}
  own = OPTIMIZERS[config.optimizer].defaults.keys()
  for name in sorted(known - own - _MODEL.keys()):
    if getattr(config, name) is not None:
      owners = [k for k, x in OPTIMIZERS.items() if name in x.defaults]
      raise UsageError(
        f'{flag(name)} is for --optimizer {" or ".join(owners)}, got '
        f'--optimizer {config.optimizer}.'
      )


def _check_schedule(config: Config) -> None:
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
  has_source = config.init_from is not None or config.fork_from is not None
  if config.from_step is not None and not has_source:
    raise UsageError('--from-step needs --init-from or --fork-from.')
  if config.fork_from is not None and config.from_step is None:
    # Else it would be another run as soon as that one has gone on.
    raise UsageError(
      f'--fork-from {config.fork_from} needs --from-step, the step of one of '
      'its checkpoints.'
    )


def _check_run(config: Config) -> None:
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


def identity(config: Config) -> dict[str, Any]:
  """Returns the settings that decide what a run computes, as JSON values."""
  return _as_json(
    {k: x for k, x in by_name(config).items() if fact(k, 'decides')}
  )


def batch_sizes(config: Config) -> np.ndarray:
  """Returns the sequences of each step.

  Raises ``UsageError`` unless the steps of ``--batch-ramp`` rise.
  """
  sizes, done = np.full(config.steps, config.batch_size), 0
  for part in config.batch_ramp:
    found = re.fullmatch(r'([1-9]\d*):([1-9]\d*)', part)
    if not found or int(found[2]) <= done:
      raise UsageError(
        '--batch-ramp must be sequences:step, up to steps that rise, as in '
        f'64:1000 128:3000, got {" ".join(config.batch_ramp)}.'
      )
    sizes[done : int(found[2])] = int(found[1])
    done = int(found[2])
  return sizes


def digest(*parts: Any) -> str:
  """Returns a hash of JSON values, as hexadecimal digits."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
