"""Trains a run with the trainer."""

import dataclasses
import math
from pathlib import Path
import statistics
import time
from typing import Any

import jax

from examples.gpt2.data.tokens import load_tokens
from examples.gpt2.devices import hardware, processes, sharding
from examples.gpt2.run import memory
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import NotFiniteError
from examples.gpt2.run.loop import Loop
from examples.gpt2.run.step import Trainer, TrainState
from examples.study import measures
from examples.study.arms import make_optimizer
from examples.study.plans import Run


class _MeanOfValues(Trainer):
  """A model in whose layers each token takes the mean of the values so far.

  Attention with queries and keys of zero does. The gradients of their weights
  are products with the other, so they stay zero with any optimizer.
  """

  def _init(self) -> TrainState:
    state = super()._init()
    for x in ('kernel', 'bias'):
      qkv = state.params['blocks']['attention']['qkv']
      qkv[x] = qkv[x].at[..., :2, :].set(0)
    return state


TRAINERS = {'softmax': Trainer, 'mean': _MeanOfValues}
"""Models by the attention of a run."""


def train(run: Run, work: Path) -> dict[str, Any]:
  """Trains a run, from its last checkpoint if it was killed.

  Args:
    run: The run.
    work: Folder in which a folder of the run holds its checkpoints.

  Returns:
    Its record, JSON values: its label and final loss (None if it diverged), the
    other settings, diagnostics, what was measured of the final weights, seconds
    since it was last started, versions and machine.

  Raises:
    OutOfMemoryError: If a device has too little memory.
    StoppedError: After SIGTERM or control-C.
    OSError: If the folder cannot be written.
    UsageError: If the run's measure needs a package that is missing.
  """
  measure = measures.find(run.measure) if run.measure else None
  config = run.config
  mesh = sharding.make_mesh(config.mesh)
  if config.micro_batch_size is not None:
    # A scale's micro-batch is that of one device; more may have to take less.
    sequences = config.batch_size // sharding.num_batch_shards(mesh)
    size = math.gcd(sequences, config.micro_batch_size)
    config = dataclasses.replace(config, micro_batch_size=size)
  config = memory.fit(config, mesh)
  tokens = load_tokens(config)
  optimizer = make_optimizer(run.arm, config) if run.arm else None
  trainer = TRAINERS[run.attention](config, tokens.vocab_size, mesh, optimizer)
  start = time.perf_counter()
  with RunFolder(work / run.key) as folder:
    identity = run.identity | {'corpus_sha256': tokens.sha256}
    folder.start({'config': identity})
    has_diverged, measured = False, None
    try:
      with memory.advice(config, trainer), jax.set_mesh(mesh):
        state = Loop(trainer, config, tokens, folder).run()
        if measure is not None:
          measured = measure(trainer, config, tokens, state)
    except NotFiniteError:
      has_diverged = True
    folder.flush()
    lines = processes.on_first(folder.read_metrics)
  # Programs of this run, which no other has.
  jax.clear_caches()
  return {
    **run.label,
    'loss': None if has_diverged else round(lines[-1]['val_loss'], 5),
    'config': {k: v for k, v in run.identity.items() if k not in run.label},
    'corpus_sha256': tokens.sha256,
    'parameters': trainer.num_params,
    'steps_done': len(lines),
    'diagnostics': _diagnostics(run, lines),
    **({'measured': measured} if run.measure else {}),
    'tokens_per_second': _median([x['tokens_per_second'] for x in lines]),
    'seconds': round(time.perf_counter() - start, 1),
    'threads': len(hardware.usable_cores()),
    **hardware.versions(),
  }


def _median(values: list[float]) -> int | None:
  return round(statistics.median(values)) if values else None


def _diagnostics(run: Run, lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
  """Returns lists with an entry for each diagnostics step."""
  lines = [line for line in lines if 'layers' in line]
  names = 'step', 'train_loss', 'max_attention_logit', 'attention_entropy'
  found = {name: [_rounded(line[name]) for line in lines] for name in names}
  # The trainer knows only its own MERIT.
  if run.config.optimizer == 'merit' and not run.arm:
    found['clipped'] = [_rounded(x['layers']['clipped']) for x in lines]
  return found


def _rounded(value: Any) -> Any:
  """Returns numbers with four digits, None for those that are not finite."""
  if isinstance(value, list):
    return [_rounded(x) for x in value]
  if value is None or isinstance(value, int):
    return value
  return float(f'{value:.4g}')
