"""Settings of a training run: the flags."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

# The last is a former name of muon-hyperball.
Optimizer = Literal[
  'merit', 'adamw', 'lamb', 'lion', 'muon', 'muon-hyperball', 'muon-kept',
]  # fmt: skip
Preset = Literal[
  'demo', 'small', 'medium', 'large', 'xl',
  'llama-130m', 'llama-350m', 'llama-7b', 'llama-3-8b', 'tinyllama-1.1b',
  'smollm2-135m',
]  # fmt: skip
Remat = Literal['none', 'dots', 'full']
# Flags that had other names are still accepted under these.
_FormerlyFresh = Annotated[bool, tyro.conf.arg(aliases=['--fresh'])]
_FormerlyKeep = Annotated[int, tyro.conf.arg(aliases=['--keep'])]
_FormerlyWatchEvery = Annotated[
  int | None, tyro.conf.arg(aliases=['--watch-every'])
]


class UsageError(ValueError):
  """A mistake in the settings or the data that the user can correct."""


@dataclasses.dataclass(frozen=True)
class Config:
  """Trains a GPT-2 or Llama with MERIT, or with a peer to compare.

  A setting that is not given takes the value of the preset (sizes) or of the
  optimizer (learning rate, weight decay, betas).
  """

  # Model and run: demo takes minutes on two cores, the others are GPT-2's and
  # Llama's.
  preset: Preset = 'demo'

  # Data.

  # Text, JSON lines or Parquet, a file or a folder of files; or a folder of
  # token files, of examples.gpt2.prepare, nanoGPT, llm.c and others. 'stdlib'
  # is the source text of Python's standard library. Several folders of token
  # files are mixed, with weights as in 'tokens/web:0.7 tokens/code:0.3', by
  # default in proportion to their tokens.
  data: str | tuple[str, ...] = 'stdlib'
  # Field that holds the text of a document in JSON, column in Parquet.
  text_field: str = 'text'
  # More texts or token files to evaluate on, as 'name=path', each with a loss
  # of its own in the metrics.
  eval_data: tuple[str, ...] = ()
  # How sequences are drawn. Without replacement, an epoch has each of them
  # once. Default: with replacement from text and from a single folder without
  # an index.json, as in former releases, else without.
  sampling: Literal['with-replacement', 'without-replacement'] | None = None
  # Size of the byte-pair vocabulary that is trained on the text; 257 gives
  # plain bytes and an end-of-text token. For token files without a tokenizer:
  # the number of token identifiers; above 65536, files without a header are
  # read as uint32.
  vocab_size: int | None = None
  # Folder that keeps tokenizers and tokens, by the content of the text.
  cache_dir: Path = Path('~/.cache/merit_optax')
  # Seed of the weights and of the order of the data.
  seed: int = 0

  # Model.

  # gpt2: LayerNorm, learned positions, GELU, biases. llama: RMSNorm, rotary
  # positions, SwiGLU, no biases.
  architecture: Literal['gpt2', 'llama'] | None = None
  # Transformer blocks.
  num_layers: int | None = None
  # Attention heads in a block.
  num_heads: int | None = None
  # Heads of keys and values, each shared by a group of heads (grouped-query
  # attention); of llama. Default: the preset's, or with --num-heads as many as
  # those.
  num_kv_heads: int | None = None
  # Features of a head; of llama. Default: --width / --num-heads.
  head_width: int | None = None
  # Base of the frequencies of rotary positions; of llama. Default: the
  # preset's, else 10000.
  rope_theta: float | None = None
  # Llama 3.1's scaling of rotary positions for longer contexts: its factor,
  # low_freq_factor, high_freq_factor and original_max_position_embeddings; of
  # llama. Default: none.
  rope_scaling: tuple[float, float, float, float] | None = None
  # Features of the residual stream.
  width: int | None = None
  # Hidden features of the MLP. Default: the preset's, or with --width four
  # times that (llama: 8/3 of it, rounded up to a multiple of 16).
  mlp_width: int | None = None
  # Tokens in a sequence.
  context_length: int | None = None
  # What norms add to the variance. Default: 1e-5, of llama 1e-6.
  norm_epsilon: float | None = None
  # Standard deviation of initial weights and embeddings. Default: GPT-2's 0.02;
  # of the preset demo in proportion to the width, 0.02 * sqrt(768 / width), and
  # of muon-hyperball twice that.
  init_std: float | None = None
  # Whether queries and keys go through an RMSNorm in each head.
  qk_norm: bool = False
  # Whether the output head has a matrix of its own.
  untied_head: bool | None = None
  # Folder of a run or of an imported model whose weights to start from. What
  # the model is need not be said then, nor with --fork-from.
  init_from: Path | None = None
  # Step of the checkpoint of --init-from. Default: the weights at its end.
  init_step: int | None = None
  # Folder of a run to go on from as a run of its own, with its optimizer's
  # state, steps and metrics, and settings that may differ: such as a cooldown
  # from the stable phase of wsd.
  fork_from: Path | None = None
  # Step of the checkpoint of --fork-from.
  fork_step: int | None = None

  # Optimizer.

  # Optimizer of the weights. muon-hyperball is Muon's direction for hidden
  # matrices, whose norms are kept (once named muon-kept).
  optimizer: Optimizer = 'merit'
  # Peak learning rate, after a linear warm-up. The default of merit, lamb, muon
  # and muon-hyperball is a constant over the root of the number of steps, that
  # of adamw 1 / width, and that of lion 0.001.
  learning_rate: float | None = None
  # muon and muon-hyperball: learning rate of the parameters that Adam updates
  # (embeddings, biases and norms), over --learning-rate. Default: 1, of
  # muon-hyperball a third.
  adam_rate: float | None = None
  # Weight decay; with muon-hyperball, of what Adam updates.
  weight_decay: float | None = None
  # Parameters that decay. matrices leaves out biases and norms; hidden leaves
  # out embeddings and the head too.
  decay: Literal['all', 'matrices', 'hidden'] = 'all'
  # Decay of the first moment (muon: of the momentum).
  b1: float | None = None
  # Decay of the second moment.
  b2: float | None = None
  # Global norm that gradients are clipped to.
  max_gradient_norm: float = 1.0
  # Largest attention logit allowed. Where a head exceeds it, its weights of
  # queries and keys are scaled down after the step (QK-clip). Default: no
  # bound.
  qk_clip: float | None = None
  # Steps between uses of --qk-clip. On GPU and TPU, where attention does not
  # show its logits, they are computed once more in such a step. Default: 1.
  qk_clip_every: int | None = None
  # Learning rate after the warm-up: a cosine or a line down to --min-rate,
  # which the step after the last one would have; wsd (warm-up, stable, decay):
  # the peak, until --decay-steps before the end; inverse-sqrt: the peak times
  # the root of warm-up steps over steps. Only of the last two is a run that is
  # made longer, by a larger --steps, the one that it would have been.
  schedule: Literal['cosine', 'linear', 'wsd', 'inverse-sqrt'] = 'cosine'
  # Share of the steps in which the learning rate rises.
  warmup_share: float = 0.1
  # Steps in which the learning rate rises. Default: --warmup-share of --steps.
  warmup_steps: int | None = None
  # wsd: steps at the end in which the learning rate falls, from the peak in the
  # first of them; 0 for none, and at most those after the warm-up. Default: a
  # fifth of --steps.
  decay_steps: int | None = None
  # wsd: how it falls, in a line, or as 1 - sqrt(share of --decay-steps).
  decay_shape: Literal['linear', '1-sqrt'] = 'linear'
  # Smallest learning rate after the warm-up, over --learning-rate.
  min_rate: float = 0.0
  # merit: parameters that get a trust ratio; the others take clipped steps of
  # Adam.
  trust_ratio: Literal['all', 'matrices'] = 'all'
  # merit: trust ratios of which the largest is taken.
  ratios: tuple[Literal['weight', 'row', 'column'], ...] = (
    'weight', 'row', 'column',
  )  # fmt: skip
  # merit, muon and muon-hyperball: whether the weights of query, key and value
  # count as one matrix, as three, or as three for each head.
  qkv: Literal['fused', 'split', 'heads'] = 'fused'
  # muon and muon-hyperball: data type of the products that orthogonalize, and
  # of what moves between devices for them. Default: that of --dtype.
  ns_dtype: Literal['float32', 'bfloat16'] | None = None
  # merit: largest size of an element of the update before the learning rate;
  # inf for no clip.
  clip_threshold: float = 1.0
  # merit: lower bound of the norms in a trust ratio.
  min_norm: float = 0.0

  # Run.

  # Global batch size of a step, in sequences.
  batch_size: int | None = None
  # Optimizer steps.
  steps: int | None = None
  # Steps between evaluations.
  eval_every: int | None = None
  # Sequences of validation text in an evaluation, at the most.
  eval_sequences: int | None = None
  # Steps between diagnostics of attention, updates and the gradient's noise; 0
  # for none. Diagnostics take about as long as 1.2 steps.
  diagnostics_every: _FormerlyWatchEvery = None
  # What to do when a loss or gradient is infinite or not a number: stop, or
  # leave the step out and go on.
  not_finite: Literal['stop', 'skip'] = 'stop'

  # Results.

  # Folder of the results. Default: one under runs/ that is named after preset,
  # optimizer and a hash of all settings. A run that was killed there goes on
  # from its last checkpoint.
  out_dir: Path | None = None
  # Start over, even if there are checkpoints of this run. What it left is moved
  # aside within the folder, not deleted. A job that Slurm requeues goes on from
  # the checkpoints that it has written itself.
  from_scratch: _FormerlyFresh = False
  # Steps between checkpoints.
  checkpoint_every: int | None = None
  # Minutes after which there is a checkpoint, if there was none before. Several
  # processes then wait for each step to end before they start the next one.
  checkpoint_minutes: float | None = None
  # Checkpoints to keep, the newest; the best by validation loss, of the steps
  # that were evaluated too, is kept besides.
  max_to_keep: _FormerlyKeep = 2
  # Write and keep the checkpoint of each multiple of this number of steps too.
  keep_period: int | None = None
  # Steps between exports for Hugging Face, to hf/step-N in --out-dir.
  hf_every: int | None = None
  # Write the metrics for TensorBoard too.
  tensorboard: bool = False
  # Project at Weights & Biases to log the metrics to as well. A run that is
  # resumed goes on with its run there.
  wandb: str | None = None
  # Write a trace of six steps, from the tenth on, for TensorBoard or xprof.
  profile: bool = False
  # Print what Muon, or else MERIT, does with each parameter, before the first
  # step.
  describe: bool = False

  # Devices.

  # Axes of the device mesh, such as 'fsdp=4,tensor=2'. Devices that are left
  # form the axis 'data'.
  mesh: str = ''
  # Sequences that each shard of a batch (data * fsdp of the mesh) processes at
  # once; gradients of a step are accumulated over micro-batches. Default: on an
  # accelerator as many as its memory holds by an estimate, else the preset's.
  micro_batch_size: int | None = None
  # Data type of activations. Weights and moments are float32.
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  # Data type in which gradients of bfloat16 activations are summed over tokens
  # and devices: bfloat16 sends half the bytes and rounds more.
  reduce_dtype: Literal['float32', 'bfloat16'] = 'float32'
  # What the backward pass recomputes to save memory (rematerialization):
  # nothing, all but matrix products, or everything within a block.
  remat: Remat = 'none'
  # Layers that are compiled one by one in a turn of the loop over layers, which
  # takes longer to compile. Default: all where steps are quicker, on GPUs (with
  # neither fsdp in the mesh nor --remat) and on CPU (of models of up to four
  # layers); else one.
  unroll: int | None = None
  # Whether other processes take part: auto asks jax, which finds those of TPU
  # pods, Slurm, Open MPI and Kubernetes; on fails where it finds none.
  distributed: Literal['auto', 'on', 'off'] = 'auto'
  # Address and port of process 0, such as '10.0.0.1:1234', for processes that
  # jax does not find.
  coordinator: str | None = None
  # Number of processes, with --coordinator.
  num_processes: int | None = None
  # Number of this process, from 0, with --coordinator.
  process_id: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
  """Settings that :func:`examples.gpt2.presets.resolve` has filled in."""

  vocab_size: int
  architecture: Literal['gpt2', 'llama']
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_width: int
  width: int
  mlp_width: int
  context_length: int
  untied_head: bool
  rope_theta: float
  learning_rate: float
  weight_decay: float
  b1: float
  b2: float
  batch_size: int
  steps: int
  eval_every: int
  eval_sequences: int
  diagnostics_every: int
  checkpoint_every: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedConfig(RunConfig):
  """Settings that :func:`examples.gpt2.run.memory.fit` has filled in."""

  micro_batch_size: int
  unroll: int


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
