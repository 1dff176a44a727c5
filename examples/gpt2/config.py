"""The settings of a run: flags, what each accepts, and how they are stored.

All facts about a setting stand at its field, which ``setting`` makes.
``resolve.py`` fills what follows from other settings and checks them together.
"""

from collections.abc import Callable
import dataclasses
import hashlib
import json
import math
import operator
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
from examples.gpt2.optimizers import OPTIMIZERS, usual_init_std

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


_LIMITS = {
  'at least': operator.ge,
  'above': operator.gt,
  'at most': operator.le,
  'below': operator.lt,
}


def setting(
  default: Any,
  *,
  role: Literal['fixed', 'schedule', 'free', 'local'] = 'fixed',
  **limits: float,
) -> Any:
  """Returns the field of a setting.

  Args:
    default: Its default; ``None`` where it follows from other settings.
    role: What it is to a run that goes on. ``'fixed'``: it decides what the run
      computes, and cannot change. ``'schedule'``: it may change as long as the
      steps that are done keep their learning rates and batches. ``'free'``: it
      changes no number beyond rounding. ``'local'``: nor need it be the same in
      all processes.
    **limits: Limits of the values of a number: ``at_least``, ``above``,
      ``at_most`` or ``below``.
  """
  found = {k.replace('_', ' '): x for k, x in limits.items()}
  return dataclasses.field(
    default=default, metadata={'role': role, 'limits': found}
  )


def _default(text: str) -> Any:
  """Returns what ``--help`` shows as the default of a setting of ``None``."""

  def hint(default: str) -> str:
    return f'(default: {text if default == "None" else default})'

  return tyro.conf.arg(help_behavior_hint=hint)


_BY_OPTIMIZER = _default('by the optimizer')


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
  num_layers: int = setting(3, at_least=1)
  # Attention heads of a block.
  num_heads: int = setting(4, at_least=1)
  # Heads of keys and values, each shared by a group of heads (llama).
  num_kv_heads: Annotated[Derived[int], _default('--num-heads')] = setting(
    None, at_least=1
  )
  # Features of the residual stream.
  width: int = setting(128, at_least=1)
  # Hidden features of the MLP.
  mlp_width: Annotated[
    Derived[int], _default('4 * --width, llama 8/3 of it')
  ] = setting(None, at_least=1)
  # Tokens in a sequence.
  context_length: int = setting(128, at_least=1)
  # Tokens of the byte-pair vocabulary that is trained on text, at most; 257
  # gives plain bytes. Of token files without a tokenizer: the number that all
  # tokens are below; above 65536, files without a header are uint32. The model
  # of a run has a row for each, rounded up.
  vocab_size: int = setting(1024, at_least=1, below=2**31)
  # Put queries and keys through an RMSNorm in each head.
  qk_norm: bool = setting(False)
  # Give the output head a matrix of its own.
  untied_head: bool = setting(False)
  # Standard deviation of the initial weights.
  init_std: Annotated[
    Derived[float],
    _default('0.02, below --width 768 more; muon-hyperball: by the width'),
  ] = setting(None, above=0, below=math.inf)
  # Features of a head (llama); by default width / heads.
  head_width: Annotated[Derived[int], _HIDDEN] = setting(None, at_least=1)
  # Added to the variance in norms; by default 1e-5, of llama 1e-6.
  norm_epsilon: Annotated[Derived[float], _HIDDEN] = setting(
    None, above=0, below=math.inf
  )
  # Base of the frequencies of rotary positions (llama).
  rope_theta: Annotated[float, _HIDDEN] = setting(
    10_000.0, above=0, below=math.inf
  )
  # Llama 3.1's scaling of rotary positions.
  rope_scaling: Annotated[RopeScaling | None, _HIDDEN, tyro.conf.Fixed] = (
    setting(None)
  )
  # Data type of activations, and of Muon's products. Weights are float32.
  dtype: Literal['float32', 'bfloat16'] = setting('float32')
  # What the backward pass computes again to save memory: nothing, all but
  # matrix products, or everything within a block.
  remat: Remat = setting('none', role='free')
  # Layers that are compiled one by one, instead of a loop over one.
  unroll: Annotated[
    Derived[int], _default('all where steps are faster for it')
  ] = setting(None, at_least=1, role='free')

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
  data: tuple[str, ...] = setting(('stdlib',), role='local')
  # More text or token files to evaluate on, each as name=path.
  eval_data: tuple[str, ...] = setting((), role='local')
  # Folder that keeps tokenizers and tokens, by the content of the text.
  cache_dir: Path = setting(Path('~/.cache/merit_optax'), role='local')
  # Seed of the weights and of the order of the data.
  seed: int = setting(0, at_least=0, below=2**32)

  # The default is this project's optimizer; in its study, the loss of muon was
  # lower. merit-hidden is MERIT on the matrices of the blocks, with Adam beside
  # it; muon-hyperball is Muon's direction with the norms of matrices kept.
  optimizer: Optimizer = setting('merit')
  # Peak learning rate, after a linear warm-up.
  learning_rate: Annotated[
    Derived[float], _default('by --optimizer, --steps and --width')
  ] = setting(None, above=0, below=math.inf, role='schedule')
  # Peak learning rate of what Adam updates beside the optimizer: embeddings,
  # biases and norms.
  adam_rate: Annotated[Derived[float], _BY_OPTIMIZER] = setting(
    None, above=0, below=math.inf
  )
  # Weight decay; muon-hyperball: of what Adam updates.
  weight_decay: Annotated[Derived[float], _BY_OPTIMIZER] = setting(
    None, at_least=0, below=math.inf
  )
  # Decay rate of the first moment, or of Muon's momentum.
  b1: Annotated[Derived[float], _BY_OPTIMIZER] = setting(
    None, at_least=0, below=1
  )
  # Decay rate of the second moment.
  b2: Annotated[Derived[float], _BY_OPTIMIZER] = setting(
    None, at_least=0, below=1
  )
  # Largest size of an element of MERIT's update, before the learning rate; inf
  # for no clip.
  clip_threshold: Annotated[Derived[float], _default('1')] = setting(
    None, above=0
  )
  # Lower bound of the norms in a trust ratio of MERIT.
  min_norm: Annotated[Derived[float], _default('0')] = setting(
    None, at_least=0, below=math.inf
  )
  # Whether the weights of query, key and value count as one matrix, as three,
  # or as three for each head, in MERIT and Muon.
  qkv: Annotated[
    Derived[Literal['fused', 'split', 'heads']], _default('fused')
  ] = setting(None)
  # Global norm that gradients are clipped to.
  max_gradient_norm: float = setting(1.0, above=0, below=math.inf)

  # Sequences of a step, on all devices together.
  batch_size: int = setting(32, at_least=1, role='schedule')
  # Smaller batches to begin with, each as sequences:step, up to that step: as
  # in 64:1000 128:3000.
  batch_ramp: tuple[str, ...] = setting((), role='schedule')
  # Optimizer steps.
  steps: int = setting(250, at_least=1, role='schedule')
  # Learning rate after the warm-up: a cosine or a line down to --min-rate; wsd
  # (warm-up, stable, decay): the peak, until --decay; inverse-sqrt: the peak
  # times sqrt(warm-up / step). Of the last two, a run can be made longer.
  schedule: Literal['cosine', 'linear', 'wsd', 'inverse-sqrt'] = setting(
    'cosine', role='schedule'
  )
  # Steps in which the learning rate rises; below 1, a share of --steps.
  warmup: float = setting(0.1, at_least=0, below=math.inf, role='schedule')
  # wsd: steps at the end in which the learning rate falls; below 1, a share of
  # --steps.
  decay: float = setting(0.2, at_least=0, below=math.inf, role='schedule')
  # wsd: how it falls, in a line, or as 1 - sqrt(share of --decay).
  decay_shape: Literal['linear', '1-sqrt'] = setting('linear', role='schedule')
  # Smallest learning rate after the warm-up, over --learning-rate.
  min_rate: float = setting(0.0, at_least=0, at_most=1, role='schedule')

  # Folder of the results, on a disk that all hosts share or in gs://. A run
  # that was killed there goes on from its last checkpoint.
  out_dir: Annotated[
    Path | None, _default('named by the settings, in runs/')
  ] = setting(None, role='free')
  # Folder of a run or of an imported model whose weights to start from.
  init_from: Path | None = setting(None)
  # Folder of a run to go on from as a run of its own, with the state of its
  # optimizer: such as a cooldown from the stable phase of wsd.
  fork_from: Path | None = setting(None)
  # Step of the checkpoint of --init-from or --fork-from.
  from_step: Annotated[
    int | None, _default('the last; --fork-from needs it')
  ] = setting(None, at_least=1)
  # Steps between evaluations.
  eval_every: int = setting(50, at_least=1, role='free')
  # Sequences of an evaluation, at the most.
  eval_sequences: int = setting(256, at_least=1, role='free')
  # Steps between diagnostics of attention, updates and the gradient's noise:
  # before the step, which takes up to twice as long; 0 for none.
  diagnostics_every: int = setting(50, at_least=0, below=math.inf, role='free')
  # Steps between checkpoints.
  checkpoint_every: int = setting(50, at_least=1, role='free')
  # Newest checkpoints to keep. The best by validation loss is kept too.
  max_to_keep: int = setting(2, at_least=1, role='free')
  # Keep every checkpoint whose step is a multiple of this number.
  keep_period: int | None = setting(None, at_least=1, role='free')
  # Stop when a loss or gradient is infinite or not a number, or leave such
  # steps out.
  not_finite: Literal['stop', 'skip'] = setting('stop', role='free')
  # Write the metrics for TensorBoard too.
  tensorboard: bool = setting(False, role='local')
  # Project at Weights & Biases to log to. A resumed run goes on there.
  wandb: str | None = setting(None, role='local')
  # Write a trace of six steps, for TensorBoard or xprof.
  profile: bool = setting(False, role='local')

  # Axes of the device mesh, such as fsdp=4,tensor=2. Devices that are left form
  # the axis data.
  mesh: str = setting('', role='free')
  # Sequences that each shard of a batch (data * fsdp of the mesh) processes at
  # once, at the most; gradients are accumulated. The largest number that
  # divides its part of --batch-size is taken, and printed.
  micro_batch_size: Annotated[Derived[int], _default('all of them')] = setting(
    8, at_least=1, role='free'
  )
  # Compile the step for devices that are not there, such as v5e:16x16 or
  # h100:8x8, and print the memory that it needs and the bytes that it sends.
  compile_for: str | None = setting(None, role='local')
  # Whether other processes take part: auto asks jax, which finds those of TPU
  # pods, Slurm, Open MPI and Kubernetes.
  distributed: Literal['auto', 'on', 'off'] = setting('auto', role='local')
  # Address and port of process 0, where jax does not find the processes.
  coordinator: str | None = setting(None, role='local')
  # Number of processes, with --coordinator.
  num_processes: int | None = setting(None, at_least=1, role='local')
  # Number of this process, from 0, with --coordinator.
  process_id: int | None = setting(
    None, at_least=0, below=math.inf, role='local'
  )
  # The preset that the settings began with.
  preset: Annotated[str, _HIDDEN] = setting('demo', role='free')


MODEL_FIELDS = {x.name: x for x in dataclasses.fields(ModelConfig)}
FIELDS = MODEL_FIELDS | {
  x.name: x for x in dataclasses.fields(Config) if x.name != 'model'
}
"""The settings by name, also those of the model."""
ROLES: dict[str, str] = {k: x.metadata['role'] for k, x in FIELDS.items()}
"""What each setting is to a run that goes on, see ``setting``."""


def by_name(config: Config) -> dict[str, Any]:
  """Returns all settings, of the model and others, by name."""
  others = {k: x for k, x in vars(config).items() if k != 'model'}
  return vars(config.model) | others


def change(config: Config, **settings: Any) -> Config:
  """Returns settings with others in their place, also those of the model."""
  settings = {
    k: tuple(x) if isinstance(x, list) else x for k, x in settings.items()
  }
  of_model = {k: settings.pop(k) for k in MODEL_FIELDS.keys() & settings.keys()}
  model = dataclasses.replace(settings.pop('model', config.model), **of_model)
  return dataclasses.replace(config, model=model, **settings)


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
  if model.rope_scaling is not None:
    _check_rope_scaling(model.rope_scaling, named('rope_scaling'))
  heads = {
    'num_kv_heads': model.num_heads,
    'head_width': model.width // model.num_heads,
  }
  defaults: dict[str, Any] = heads | {
    'mlp_width': 16 * math.ceil(model.width / 6)
    if model.architecture == 'llama'
    else 4 * model.width,
    'init_std': usual_init_std(model.width),
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
    usual = heads.get(name, MODEL_FIELDS[name].default)
    if model.architecture != 'llama' and value != usual:
      raise UsageError(
        f'{named(name)} is for {named("architecture")} llama, got {value}.'
      )
  return model


def _check_rope_scaling(scaling: RopeScaling, name: str) -> None:
  _, low, high, _ = scaling
  if not low < high or not all(0 < x < math.inf for x in scaling):
    raise UsageError(
      f'{name} must be four numbers above 0, the second below the third, got '
      f'{scaling}.'
    )


def padded_vocab_size(num_tokens: int) -> int:
  """Returns the rows of the embedding for a number of token identifiers."""
  return math.ceil(num_tokens / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def check_values(
  settings: dict[str, Any], named: Callable[[str], str] = flag
) -> None:
  """Raises ``UsageError`` for a value that its setting does not accept."""
  for name, value in settings.items():
    limits = FIELDS[name].metadata['limits']
    if value is not None and not all(
      _LIMITS[word](value, limit) for word, limit in limits.items()
    ):
      accepted = ' and '.join(f'{word} {x}' for word, x in limits.items())
      raise UsageError(f'{named(name)} must be {accepted}, got {value!r}.')


def identity(config: Config) -> dict[str, Any]:
  """Returns the settings that decide what a run computes, as JSON values."""
  return _as_json(
    {
      k: x
      for k, x in by_name(config).items()
      if ROLES[k] in ('fixed', 'schedule')
    }
  )


def batch_sizes(config: Config) -> np.ndarray:
  """Returns the sequences of each step.

  Raises ``UsageError`` unless the steps of ``--batch-ramp`` rise, and the last
  is before the end of the run.
  """
  sizes, done = np.full(config.steps, config.batch_size), 0
  for part in config.batch_ramp:
    found = re.fullmatch(r'([1-9]\d*):([1-9]\d*)', part)
    if found and int(found[2]) >= config.steps:
      raise UsageError(
        f'--batch-ramp {part} must end before --steps {config.steps}, or no '
        f'step has --batch-size {config.batch_size}.'
      )
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
