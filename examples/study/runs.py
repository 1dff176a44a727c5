"""Makes a run with the trainer."""

import math
from pathlib import Path
import statistics
import time
from typing import Any

import jax

from examples.gpt2.data.tokens import load_tokens
from examples.gpt2.devices import hardware, sharding
from examples.gpt2.run import memory
from examples.gpt2.run.folder import RunFolder
from examples.gpt2.run.log import NotFiniteError
from examples.gpt2.run.loop import Loop
from examples.gpt2.run.step import Trainer
from examples.study.arms import make_optimizer
from examples.study.plans import Run

_BY_LAYER = ('max_attention_logit', 'attention_entropy')


def make(run: Run, work: Path) -> dict[str, Any]:
  """Makes a run, or goes on with one that was killed.

  Args:
    run: The run.
    work: Folder in which a folder of the run holds its checkpoints.

  Returns:
    JSON values: the settings, the final loss (None if the run diverged), what
    was watched, seconds since the run was last started, versions and machine.
    Of several processes, the first returns them, and others nothing.

  Raises:
    OutOfMemoryError: If a device has too little memory.
    StoppedError: After SIGTERM or control-C.
    OSError: If the folder cannot be written.
  """
  config = run.config
  mesh = sharding.make_mesh(config.mesh)
  config = memory.fit(config, mesh)
  tokens = load_tokens(config)
  optimizer = make_optimizer(run.arm, config) if run.arm else None
  trainer = Trainer(config, tokens.vocab_size, mesh, optimizer)
  start = time.perf_counter()
  is_first = jax.process_index() == 0
  with RunFolder(work / run.key) as folder:
    folder.start({'config': run.identity})
    has_diverged = False
    try:
      with memory.advice(config, trainer), jax.set_mesh(mesh):
        Loop(trainer, config, tokens, folder).run()
    except NotFiniteError:
      has_diverged = True
    folder.flush()
    lines = folder.read_metrics() if is_first else []
  # Programs of this run, which no other has.
  jax.clear_caches()
  if not is_first:
    return {}
  return {
    'config': _as_json(run.identity),
    'corpus_sha256': tokens.sha256,
    'parameters': trainer.num_params,
    'loss': None if has_diverged else round(lines[-1]['val_loss'], 5),
    'steps_done': len(lines),
    'watched': _watched(run, lines),
    'tokens_per_second': _median([x['tokens_per_second'] for x in lines]),
    'seconds': round(time.perf_counter() - start, 1),
    'threads': len(hardware.usable_cores()),
    **hardware.versions(),
  }


def _as_json(identity: dict[str, Any]) -> dict[str, Any]:
  """Returns settings without infinity, which JSON does not have."""
  return {k: str(v) if v == math.inf else v for k, v in identity.items()}


def _median(values: list[float]) -> int | None:
  return round(statistics.median(values)) if values else None


def _watched(run: Run, lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
  """Returns what watch steps saw, as lists with an entry for each."""
  watches = [line for line in lines if 'layers' in line]
  watched = {
    name: [_short(line[name]) for line in watches]
    for name in ('step', 'train_loss', *_BY_LAYER)
  }
  # The watch knows only the trainer's own MERIT.
  if run.config.optimizer == 'merit' and not run.arm:
    watched['clipped'] = [_short(x['layers']['clipped']) for x in watches]
  return watched


def _short(value: Any) -> Any:
  """Returns numbers with four digits, None for those that are not finite."""
  if isinstance(value, list):
    return [_short(x) for x in value]
  if value is None or isinstance(value, int):
    return value
  return float(f'{value:.4g}')
