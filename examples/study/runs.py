"""Trains a run, with the trainer if it is one on text."""

from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import math
from pathlib import Path
import statistics
import time
from typing import Any

import jax
from jax.sharding import Mesh

from examples.gpt2.config import Config
from examples.gpt2.data.tokens import Tokens, load_tokens
from examples.gpt2.devices import hardware, processes, sharding
from examples.gpt2.run import memory
from examples.gpt2.run.checkpoints import Checkpoints
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import NotFiniteError
from examples.gpt2.run.loop import Loop
from examples.gpt2.run.step import Trainer, TrainState
from examples.study import measures
from examples.study.arms import make_optimizer
from examples.study.phases import second_phase
from examples.study.plans import Run
from examples.study.tasks import images
from examples.study.tasks.classifiers import MIXERS
from examples.study.tasks.masked import MaskedTrainer


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
    work: Folder in which a folder of the run holds its checkpoints; the folder
      ``halves`` keeps the states that second phases start from.

  Returns:
    Its record, JSON values: its label and final loss (None if it diverged), the
    other settings, diagnostics, what was measured of the final weights, seconds
    since it was last started, versions and machine.

  Raises:
    OutOfMemoryError: If a device has too little memory.
    StoppedError: After SIGTERM or control-C.
    UsageError: If a package is missing.
    OSError: If the folder cannot be written.
  """
  start = time.perf_counter()
  is_image = run.task in MIXERS
  measured = images.train(run) if is_image else _train_text(run, work)
  # Programs of this run, which no other has.
  jax.clear_caches()
  return make_record(run, measured, time.perf_counter() - start)


def make_record(
  run: Run, measured: dict[str, Any], seconds: float
) -> dict[str, Any]:
  """Returns the record of a run, JSON values.

  Args:
    run: The run.
    measured: What came out; it has a ``'loss'``.
    seconds: How long it took.
  """
  return {
    **run.label,
    'loss': measured['loss'],
    'config': {k: v for k, v in run.identity.items() if k not in run.label},
    **measured,
    'seconds': round(seconds, 1),
    'threads': len(hardware.usable_cores()),
    **hardware.versions(),
  }


def _train_text(run: Run, work: Path) -> dict[str, Any]:
  """Trains a run on tokens, and returns what its record says of that."""
  measure = measures.find(run.measure) if run.measure else None
  config, tokens, trainer = set_up(run)
  with RunFolder(work / run.key) as folder:
    folder.start({'config': run.identity | {'corpus_sha256': tokens.sha256}})
    if run.first is not None:

      def init() -> TrainState:
        # There are none yet if the first phase diverges.
        folder.keep_metrics(0)
        first = _half_way(run.first, work)
        return second_phase(trainer, first, fresh_moments=run.fresh_moments)

      trainer.init = init
    has_diverged, measured = False, None
    try:
      with memory.advice(config, trainer), jax.set_mesh(trainer.mesh):
        state = Loop(trainer, config, tokens, folder).run()
        if measure is not None:
          measured = measure(trainer, config, tokens, state)
    except NotFiniteError:
      has_diverged = True
    folder.flush()
    lines = processes.on_first(folder.read_metrics)
  return {
    'loss': None if has_diverged else round(lines[-1]['val_loss'], 5),
    'corpus_sha256': tokens.sha256,
    'parameters': trainer.num_params,
    'steps_done': len(lines),
    'diagnostics': _diagnostics(run, lines),
    **({'measured': measured} if run.measure else {}),
    'tokens_per_second': _median([x['tokens_per_second'] for x in lines]),
  }


def set_up(run: Run) -> tuple[Config, Tokens, Trainer]:
  """Returns settings that fit the devices, the data, and the trainer."""
  config = run.config
  mesh = sharding.make_mesh(config.mesh)
  if config.micro_batch_size is not None:
    # A scale's micro-batch is that of one device; more may have to take less.
    sequences = config.batch_size // sharding.num_batch_shards(mesh)
    size = math.gcd(sequences, config.micro_batch_size)
    config = dataclasses.replace(config, micro_batch_size=size)
  config = memory.fit(config, mesh)
  tokens = load_tokens(config)
  return config, tokens, make_trainer(run, config, tokens, mesh)


def make_trainer(
  run: Run, config: Config, tokens: Tokens, mesh: Mesh
) -> Trainer:
  """Returns the trainer of a run on tokens, with settings for it."""
  optimizer = make_optimizer(run.arm, config) if run.arm else None
  is_masked = run.task == 'masked'
  kind = MaskedTrainer if is_masked else TRAINERS[run.attention]
  return kind(config, tokens.vocab_size, mesh, optimizer)


def _half_way(run: Run, work: Path) -> TrainState:
  """Returns the state after half of the steps of a run.

  Its last checkpoint is kept for all that ask for it; one of them trains, and
  the others wait.

  Raises:
    NotFiniteError: If the run diverges before.
    OSError: If that checkpoint cannot be written.
  """
  config, tokens, trainer = set_up(run)
  # The trainer has the schedule of the whole run.
  config = dataclasses.replace(config, steps=config.steps // 2)
  path = work / 'halves' / run.key
  with contextlib.ExitStack() as stack:
    processes.on_first(stack.enter_context, _alone(path.with_suffix('.lock')))
    folder = stack.enter_context(RunFolder(path))
    folder.start({'config': run.identity | {'corpus_sha256': tokens.sha256}})
    checkpoints = Checkpoints(folder.checkpoints, config.keep)
    found = checkpoints.restore(trainer.shapes)
    if found is None or found[0] < config.steps:
      Loop(trainer, config, tokens, folder).run()
      found = checkpoints.restore(trainer.shapes)
    if found is None or found[0] < config.steps:
      raise OSError(f'{path} has no checkpoint of step {config.steps}.')
    return found[1]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
  """Waits until no other process holds a lock, and holds it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('wb') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


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
