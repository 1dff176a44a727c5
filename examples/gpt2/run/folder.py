"""The folder of a run: its settings, metrics and results."""

import contextlib
import dataclasses
import fcntl
import json
from pathlib import Path
from typing import Any, Self
import warnings

import jax
import numpy as np

from examples.gpt2 import model_files
from examples.gpt2.config import (
  FIELDS,
  RunConfig,
  UsageError,
  describe_changes,
  fact,
  flag,
)
from examples.gpt2.devices.processes import on_process_0
from examples.gpt2.optim.optimizers import make_schedule
from examples.gpt2.run.metrics import MetricsFile, read_metrics
from examples.gpt2.storage import (
  as_path,
  is_remote,
  make_folder,
  os_errors,
  write_whole,
)

_CONFIG = 'config.json'
_METRICS = 'metrics.jsonl'
_SAMPLE = 'sample.txt'
# What a run writes besides; without a config.json it is somebody else's.
_OTHERS = (
  _METRICS,
  _SAMPLE,
  model_files.DESCRIPTION,
  model_files.WEIGHTS,
  'checkpoints',
)


class RunFolder:
  """Reads and writes the files of a run, on a disk or in a store.

  Process 0 does it. All processes call the methods, but for those that say
  otherwise, and an error is raised in all. As a context, it keeps a second run
  out of a folder on a disk.

  Attributes:
    path: The folder.
    checkpoints: Folder of the checkpoints.
    picture: File of the curves.
    metrics: The file of metrics; for process 0.
  """

  def __init__(self, path: Path):
    self.path = as_path(path)
    self.checkpoints = self.path / 'checkpoints'
    self.picture = self.path / 'curves.png'
    self.metrics = MetricsFile(self.path / _METRICS)
    self._lock = contextlib.ExitStack()

  def __enter__(self) -> Self:
    on_process_0(self._open)
    return self

  def __exit__(self, *_: object) -> None:
    self._lock.close()

  def _open(self) -> None:
    """Makes the folder and locks it."""
    try:
      make_folder(self.path)
      if is_remote(self.path):
        return
      file = self._lock.enter_context((self.path / '.lock').open('wb'))
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UsageError(
        f'--out-dir {self.path} is in use by a run that goes on now.'
      ) from error
    except OSError as error:
      raise UsageError(
        f'--out-dir {self.path} cannot be written: {error}'
      ) from error

  @property
  def finished(self) -> bool:
    """Whether a run ended here: the sample is written last."""
    return on_process_0((self.path / _SAMPLE).is_file)

  def start(
    self, config: RunConfig, known_by: dict[str, Any], others: dict[str, Any]
  ) -> None:
    """Writes config.json, unless another run is here.

    Args:
      config: Settings.
      known_by: What decides the numbers of the run, as JSON values.
      others: What config.json holds beside it, as JSON values.

    Raises:
      UsageError: If the folder holds another run, or something else with a name
        that a run writes.
    """
    content = {'config': known_by, **others}
    on_process_0(self._start, config, content)

  @os_errors()
  def _start(self, config: RunConfig, content: dict[str, Any]) -> None:
    if (self.path / _CONFIG).exists():
      self._check_same(config, content['config'])
    elif found := [x for x in _OTHERS if (self.path / x).exists()]:
      raise self._refusal(f'{", ".join(found)} of something else')
    if not (self.path / _SAMPLE).exists():
      text = json.dumps(content, indent=2)
      write_whole(self.path / _CONFIG, text.encode())

  def _check_same(self, config: RunConfig, known_by: dict[str, Any]) -> None:
    """Raises ``UsageError`` unless the run here goes on with these settings."""
    schedule = [x for x in FIELDS if fact(x, 'is_schedule')]
    try:
      old = dict(self.read_settings()['config'])
      before = dataclasses.replace(config, **{x: old[x] for x in schedule})
    except (ValueError, TypeError, KeyError) as error:
      raise self._refusal(
        f'a {_CONFIG} that no run of this trainer wrote, or a damaged one'
      ) from error
    changes, steps = describe_changes(old, known_by), saved_steps(self.path)
    # Without the first state, nothing has been computed.
    if not changes or not steps:
      return
    decisive = describe_changes(
      *(
        {k: x for k, x in settings.items() if k not in schedule}
        for settings in (old, known_by)
      )
    )
    if decisive:
      raise self._refusal(f'a run with other settings ({changes})')
    if max(steps):
      self._check_same_rates(before, config, max(steps), changes)
    # Else they would be taken for those of the longer run.
    for name in (_SAMPLE, model_files.WEIGHTS):
      (self.path / name).unlink(missing_ok=True)

  def _check_same_rates(
    self, before: RunConfig, now: RunConfig, done: int, changes: str
  ) -> None:
    """Raises ``UsageError`` if a step that is done had another rate."""
    if now.steps < done:
      raise self._refusal(f'a run that has done {done} steps ({changes})')
    rates = [
      np.asarray(jax.vmap(make_schedule(x))(np.arange(done)))
      for x in (before, now)
    ]
    (different,) = np.nonzero(rates[0] != rates[1])
    if not different.size:
      return
    step = int(different[0])
    hints = ' '.join(
      f'{flag(x)} {getattr(before, x):g}' for x in ('learning_rate', 'warmup')
    )
    raise self._refusal(
      f'a run with other settings ({changes}): its step {step + 1} had the '
      f'learning rate {rates[0][step]:.6g}, now {rates[1][step]:.6g}. A run '
      'can be made longer while its rates do not depend on --steps, before the '
      f'decay of --schedule wsd, with --warmup in steps (it has {hints}); else '
      '--fork-from makes a run of its own from a checkpoint'
    )

  def _refusal(self, what: str) -> UsageError:
    return UsageError(
      f'--out-dir {self.path} holds {what}: choose another folder.'
    )

  def keep_metrics(self, step: int, fork_from: Path | None = None) -> int:
    """Cuts off the lines of metrics.jsonl after a step, also torn ones.

    Args:
      step: Last step to keep.
      fork_from: Folder of a run whose lines to take, if there are none here.

    Returns:
      The tokens of all steps up to that one, 0 if that is not known.
    """
    return on_process_0(self._keep_metrics, step, fork_from)

  @os_errors()
  def _keep_metrics(self, step: int, fork_from: Path | None) -> int:
    lines = self.read_metrics()
    if not lines and fork_from is not None:
      lines = read_metrics(as_path(fork_from) / _METRICS)
    kept = {line['step']: line for line in lines if line['step'] <= step}
    if len(kept) < step:
      warnings.warn(
        f'{self.path / _METRICS} has lost {step - len(kept)} of the lines up '
        f'to step {step}.',
        stacklevel=4,
      )
    self.metrics.replace(list(kept.values()))
    return kept.get(step, {}).get('tokens', 0)

  def read_metrics(self) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, but for torn ones; for process 0."""
    return read_metrics(self.path / _METRICS)

  def read_settings(self) -> dict[str, Any]:
    """Returns what config.json holds; for process 0."""
    return json.loads((self.path / _CONFIG).read_text())

  def write_sample(self, text: str) -> None:
    """Writes the sample, which marks a run as finished; for process 0."""
    write_whole(self.path / _SAMPLE, text.encode())


def saved_steps(run: Path) -> list[int]:
  """Returns the steps of which there are checkpoints, also unfinished ones."""
  folder = run / 'checkpoints'
  names = [x.name for x in folder.iterdir()] if folder.exists() else []
  return [int(name) for name in names if name.isdecimal()]


def trained_on(folder: Path) -> dict[str, Any]:
  """Returns what config.json says of the data of a run, {} without one."""
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    return dict(RunFolder(folder).read_settings()['corpus'])
  return {}
