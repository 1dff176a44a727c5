"""Settings of a training run: the flags, and every fact about each of them.

The settings come in groups, one for each part of ``--help``. A run has all of
them in one flat :class:`Config`. What is accepted, and what a setting decides,
stands in the metadata of its field, which ``setting`` makes.
"""

from collections.abc import Callable
import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro

Optimizer: TypeAlias = Literal[
  'merit', 'adamw', 'lamb', 'lion', 'muon', 'muon-hyperball'
]
Remat: TypeAlias = Literal['none', 'dots', 'full']
# Not in --help: what only presets and imported models set.
_HIDDEN = tyro.conf.Suppress


class UsageError(ValueError):
  """A mistake in the settings or the data that the user can correct."""


@dataclasses.dataclass(frozen=True)
class Range:
  """The numbers that a setting accepts.

  Attributes:
    text: In words, for messages and for ``--help``.
    holds: Whether it accepts a number.
  """

  text: str
  holds: Callable[[Any], bool]


AT_LEAST_1 = Range('at least 1', lambda x: x >= 1)
NOT_NEGATIVE = Range('finite and at least 0', lambda x: 0 <= x < math.inf)
POSITIVE = Range('finite and above 0', lambda x: 0 < x < math.inf)
ABOVE_0 = Range('above 0', lambda x: x > 0)
DECAY_RATE = Range('in [0, 1)', lambda x: 0 <= x < 1)
SHARE = Range('in [0, 1]', lambda x: 0 <= x <= 1)
SEED = Range('in [0, 2**32)', lambda x: 0 <= x < 2**32)
VOCAB_SIZE = Range('in [257, 2**31)', lambda x: 257 <= x < 2**31)
ROPE_SCALING = Range(
  'four numbers above 0, the second below the third',
  lambda x: x[1] < x[2] and all(0 < y < math.inf for y in x),
)


def setting(
  default: Any,
  accepts: Range | None = None,
  *,
  optimizers: tuple[Optimizer, ...] = (),
  decides: bool = True,
  is_schedule: bool = False,
  is_local: bool = False,
) -> Any:
  """Returns a field of a setting.

  Args:
    default: Its default; ``None`` where it follows from other settings.
    accepts: The numbers that it accepts.
    optimizers: The optimizers that have it, all if none is named.
    decides: Whether it decides the numbers that a run computes, beyond
      rounding. Such a setting cannot change when a run goes on.
    is_schedule: Whether it may change in a run that goes on, as long as no
      learning rate of a step that is done changes with it.
    is_local: Whether processes of one run may have different values.
  """
  facts = {
    'accepts': accepts,
    'optimizers': optimizers,
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


@dataclasses.dataclass(frozen=True)
class ModelSettings:
  """What the model is."""

  # gpt2: LayerNorm, learned positions, GELU, biases. llama: RMSNorm, rotary
  # positions, SwiGLU, no biases.
  architecture: Literal['gpt2', 'llama'] = setting('gpt2')
  # Transformer blocks.
  num_layers: int = setting(3, AT_LEAST_1)
  # Attention heads of a block.
  num_heads: int = setting(4, AT_LEAST_1)
  # Heads of keys and values, each shared by a group of heads (llama).
  num_kv_heads: Annotated[int | None, _by('--num-heads')] = setting(
    None, AT_LEAST_1
  )
  # Features of the residual stream.
  width: int = setting(128, AT_LEAST_1)
  # Hidden features of the MLP.
  mlp_width: Annotated[int | None, _by('4 * --width, llama 8/3 of it')] = (
    setting(None, AT_LEAST_1)
  )
  # Tokens in a sequence.
  context_length: int = setting(128, AT_LEAST_1)
  # Tokens of the byte-pair vocabulary that is trained on text, at most; 257
  # gives plain bytes. Of token files without a tokenizer: the number that all
  # tokens are below; above 65536, files without a header are uint32.
  vocab_size: int = setting(1024, VOCAB_SIZE)
  # Put queries and keys through an RMSNorm in each head.
  qk_norm: bool = setting(False)
  # Give the output head a matrix of its own.
  untied_head: bool = setting(False)
  # Standard deviation of the initial weights.
  init_std: Annotated[
    float | None, _by('0.02; demo and muon-hyperball: by the width')
  ] = setting(None, POSITIVE)
  # Features of a head (llama); None for --width / --num-heads.
  head_width: Annotated[int | None, _HIDDEN] = setting(None, AT_LEAST_1)
  # Added to the variance in norms; None for 1e-5, of llama 1e-6.
  norm_epsilon: Annotated[float | None, _HIDDEN] = setting(None, POSITIVE)
  # Base of the frequencies of rotary positions (llama).
  rope_theta: Annotated[float, _HIDDEN] = setting(10_000.0, POSITIVE)
  # Llama 3.1's scaling of rotary positions: factor, low and high frequency
  # factor, original context length in tokens.
  rope_scaling: Annotated[tuple[float, float, float, float] | None, _HIDDEN] = (
    setting(None, ROPE_SCALING)
  )


@dataclasses.dataclass(frozen=True)
class DataSettings:
  """What it is trained on."""

  # Text, a file or a folder of files; or folders of token files, of
  # examples.gpt2.prepare, nanoGPT, llm.c and others, with weights if they are
  # to be mixed, as in tokens/web:0.7 tokens/code:0.3. 'stdlib' is the source of
  # Python's standard library.
  data: tuple[str, ...] = setting(('stdlib',), decides=False, is_local=True)
  # More text or token files to evaluate on, each as name=path.
  eval_data: tuple[str, ...] = setting((), decides=False, is_local=True)
  # How sequences are drawn. Without replacement, an epoch has each once.
  sampling: Literal['without-replacement', 'with-replacement'] = setting(
    'without-replacement'
  )
  # Folder that keeps tokenizers and tokens, by the content of the text.
  cache_dir: Path = setting(
    Path('~/.cache/merit_optax'), decides=False, is_local=True
  )
  # Seed of the weights and of the order of the data.
  seed: int = setting(0, SEED)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
  """The optimizer."""

  # muon-hyperball is Muon's direction with the norms of matrices kept.
  optimizer: Optimizer = setting('merit')
  # What updates embeddings, biases and norms: MERIT too, or Adam, at
  # --adam-rate.
  others: Literal['same', 'adam'] = setting('same', optimizers=('merit',))
  # Peak learning rate, after a linear warm-up.
  learning_rate: Annotated[
    float | None, _by('a constant / sqrt(--steps); adamw: 1 / --width')
  ] = setting(None, POSITIVE, is_schedule=True)
  # Learning rate of what Adam updates beside the optimizer: merit with --others
  # adam: the rate itself; muon and muon-hyperball: over --learning-rate.
  adam_rate: Annotated[
    float | None, _by('merit: 0.004, muon: 1, muon-hyperball: 1/3')
  ] = setting(None, POSITIVE, optimizers=('merit', 'muon', 'muon-hyperball'))
  # Weight decay; muon-hyperball: of what Adam updates.
  weight_decay: Annotated[float | None, _by('by the optimizer')] = setting(
    None, NOT_NEGATIVE
  )
  # Decay rate of the first moment, or of Muon's momentum.
  b1: Annotated[float | None, _by('0.9, muon 0.95')] = setting(None, DECAY_RATE)
  # Decay rate of the second moment.
  b2: Annotated[float | None, _by('0.95, lion 0.99')] = setting(
    None, DECAY_RATE
  )
  # Global norm that gradients are clipped to.
  max_gradient_norm: float = setting(1.0, POSITIVE)
  # Largest size of an element of MERIT's update, before the learning rate; inf
  # for no clip.
  clip_threshold: float = setting(1.0, ABOVE_0, optimizers=('merit',))
  # Lower bound of the norms in a trust ratio of MERIT.
  min_norm: float = setting(0.0, NOT_NEGATIVE, optimizers=('merit',))
  # Whether the weights of query, key and value count as one matrix, as three,
  # or as three for each head.
  qkv: Literal['fused', 'split', 'heads'] = setting(
    'fused', optimizers=('merit', 'muon', 'muon-hyperball')
  )


@dataclasses.dataclass(frozen=True)
class ScheduleSettings:
  """Steps and learning rates."""

  # Sequences of a step, on all devices together.
  batch_size: int = setting(32, AT_LEAST_1)
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


@dataclasses.dataclass(frozen=True)
class RunSettings:
  """The run and its results."""

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
  # Steps between diagnostics of attention, updates and the gradient's noise,
  # which take as long as 1.2 steps; 0 for none.
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


@dataclasses.dataclass(frozen=True)
class DeviceSettings:
  """Devices and processes."""

  # Axes of the device mesh, such as fsdp=4,tensor=2. Devices that are left form
  # the axis data.
  mesh: str = setting('', decides=False)
  # Sequences that each shard of a batch (data * fsdp of the mesh) processes at
  # once, at the most; gradients are accumulated.
  micro_batch_size: Annotated[int | None, _by('all of them')] = setting(
    8, AT_LEAST_1, decides=False
  )
  # Data type of activations, and of Muon's products. Weights are float32.
  dtype: Literal['float32', 'bfloat16'] = setting('float32')
  # What the backward pass computes again to save memory: nothing, all but
  # matrix products, or everything within a block.
  remat: Remat = setting('none', decides=False)
  # Layers that are compiled one by one, instead of a loop over one.
  unroll: Annotated[int | None, _by('all where steps are faster for it')] = (
    setting(None, AT_LEAST_1, decides=False)
  )
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
  # How long to wait for the other processes at the start.
  connect_minutes: float = setting(30.0, POSITIVE, decides=False)
  # Folder of compiled programs, which a run that goes on need not compile
  # again. (None for none.)
  compile_cache: Path | None = setting(
    Path('~/.cache/merit_optax/jax'), decides=False, is_local=True
  )


GROUPS: dict[str, type] = {
  'model': ModelSettings,
  'data': DataSettings,
  'optimizer': OptimizerSettings,
  'schedule': ScheduleSettings,
  'run': RunSettings,
  'devices': DeviceSettings,
}


@dataclasses.dataclass(frozen=True)
class Config(
  DeviceSettings,
  RunSettings,
  ScheduleSettings,
  OptimizerSettings,
  DataSettings,
  ModelSettings,
):
  """All settings. The defaults are those of the preset demo."""

  # A name in examples.gpt2.presets.
  preset: str = setting('demo', decides=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
  """Settings that :func:`examples.gpt2.presets.resolve` has filled in."""

  num_kv_heads: int
  mlp_width: int
  head_width: int
  learning_rate: float
  weight_decay: float
  b1: float
  b2: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedConfig(RunConfig):
  """Settings that :func:`examples.gpt2.run.memory.fit` has filled in."""

  micro_batch_size: int
  unroll: int


FIELDS = {x.name: x for x in dataclasses.fields(Config)}
"""The settings by name; the metadata of each says what ``setting`` was told."""


def fact(name: str, which: str) -> Any:
  """Returns a fact about a setting, see ``setting``."""
  return FIELDS[name].metadata[which]


def identity(config: Config) -> dict[str, Any]:
  """Returns the settings that decide what a run computes, as JSON values."""
  return {
    name: value
    if value is None or isinstance(value, (int, float))
    else str(value)
    for name, value in vars(config).items()
    if fact(name, 'decides')
  }


def in_steps(value: float, config: Config) -> int:
  """Returns a number of steps, which below 1 is a share of all steps."""
  return round(value * config.steps if value < 1 else value)


def flag(name: str) -> str:
  """Returns the command-line flag of a setting."""
  return '--' + name.replace('_', '-')


def check_at_least(least: int, **settings: int | None) -> None:
  """Raises ``UsageError`` for a setting that is given and below a number."""
  for name, value in settings.items():
    if value is not None and value < least:
      raise UsageError(f'{flag(name)} must be at least {least}, got {value}.')


def describe_changes(old: dict[str, Any], new: dict[str, Any]) -> str:
  """Returns which JSON values differ, '' if none does."""
  names = sorted(k for k in old | new if old.get(k) != new.get(k))
  return ', '.join(f'{k}: {old.get(k)} -> {new.get(k)}' for k in names)


def digest(*parts: Any) -> str:
  """Returns a hash of JSON values, as hexadecimal digits."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
